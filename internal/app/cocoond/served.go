package cocoond

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// served is the engine as the doors use it: operations are timed, and a reset includes the network.
type served struct {
	*engine.Engine
	image.Puller
	*catalog.Snapshots
	filler  catalog.Filler
	metrics *metrics
	nets    *networks
	node    *node
	plugins *plugins
}

// serve assembles what the doors use.
func (d *daemon) serve(h *host) *served {
	s := &served{Engine: h.engine, Puller: d.puller, filler: catalog.Filler{Puller: d.puller, Images: d.puller, Disks: d.images, Into: h.engine.Volumes()}, metrics: d.metrics, nets: d.nets, node: d.newNode(h), plugins: h.plugins}
	s.Snapshots = &catalog.Snapshots{
		Cloner: s, Images: d.puller, Puller: d.puller, Store: h.snapshots, Remote: d.remote(h), Dial: d.cfg.Peer.dial(), Spawn: d.later.spawn,
	}
	return s
}

// remote connects to registries of snapshots.
func (d *daemon) remote(h *host) snapshot.Remote {
	return chunked.New(chunked.Config{
		Index: filepath.Join(d.cfg.StateDir, "snapshot-index"), Hypervisors: slices.Sorted(maps.Keys(h.drivers)), Whole: d.cfg.SnapshotForm == formWhole,
		OwnerOf: ownerOf, LoadAs: nobody(), LoadsLate: func(driver string) bool { return hypervisor.LoadsLate(h.drivers[driver]) }, Log: d.log.With("component", "snapshot"),
	}, h.snapshots)
}

// Info tells the virtual node of this process what its engine runs VMs on.
func (s *served) Info(ctx context.Context) (nodewire.NodeInfo, error) { return s.node.Info(ctx) }

// Police lets the virtual node of this process set its network policies.
func (s *served) Police(ctx context.Context, p network.Policies) error { return s.node.Police(ctx, p) }

// VolumeFromImage lets the virtual node of this process fill volumes.
func (s *served) VolumeFromImage(ctx context.Context, spec volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error) {
	return s.filler.FromImage(ctx, spec, from, progress)
}

func (s *served) Create(ctx context.Context, spec vm.Spec) (r vm.Record, err error) {
	defer s.metrics.operation("create", time.Now(), &err)
	return s.Engine.Create(ctx, spec)
}

func (s *served) Launch(ctx context.Context, spec vm.Spec) (r vm.Record, err error) {
	defer s.metrics.operation("launch", time.Now(), &err)
	return s.Engine.Launch(ctx, spec)
}

func (s *served) Start(ctx context.Context, ref string) (r vm.Record, err error) {
	defer s.metrics.operation("start", time.Now(), &err)
	return s.Engine.Start(ctx, ref)
}

func (s *served) Stop(ctx context.Context, ref string, grace time.Duration) (r vm.Record, err error) {
	defer s.metrics.operation("stop", time.Now(), &err)
	return s.Engine.Stop(ctx, ref, grace)
}

func (s *served) Restart(ctx context.Context, ref string, grace time.Duration) (r vm.Record, err error) {
	defer s.metrics.operation("restart", time.Now(), &err)
	return s.Engine.Restart(ctx, ref, grace)
}

// Reboot calls the engine.
func (s *served) Reboot(ctx context.Context, ref string, hard bool) (r vm.Record, err error) {
	defer s.metrics.operation("reboot", time.Now(), &err)
	return s.Engine.Reboot(ctx, ref, hard)
}

// Pause calls the engine.
func (s *served) Pause(ctx context.Context, ref string) (r vm.Record, err error) {
	defer s.metrics.operation("pause", time.Now(), &err)
	return s.Engine.Pause(ctx, ref)
}

// Unpause calls the engine.
func (s *served) Unpause(ctx context.Context, ref string) (r vm.Record, err error) {
	defer s.metrics.operation("unpause", time.Now(), &err)
	return s.Engine.Unpause(ctx, ref)
}

func (s *served) Remove(ctx context.Context, ref string, force bool) (err error) {
	defer s.metrics.operation("remove", time.Now(), &err)
	return s.Engine.Remove(ctx, ref, force)
}

// SaveSnapshot calls the engine.
func (s *served) SaveSnapshot(ctx context.Context, ref string, spec vm.SaveSpec) (snap snapshot.Snapshot, err error) {
	defer s.metrics.operation("save", time.Now(), &err)
	snap, err = s.Engine.SaveSnapshot(ctx, ref, spec)
	if err == nil && snap.Live {
		s.metrics.pause.Observe(snap.Pause.Seconds())
	}
	return snap, err
}

// Clone calls the engine.
func (s *served) Clone(ctx context.Context, spec vm.CloneSpec) (r vm.Record, err error) {
	defer s.metrics.operation("clone", time.Now(), &err)
	return s.Engine.Clone(ctx, spec)
}

// CloneSandbox calls the engine.
func (s *served) CloneSandbox(ctx context.Context, c vm.SandboxClone) (r vm.Record, err error) {
	defer s.metrics.operation("clone", time.Now(), &err)
	return s.Engine.CloneSandbox(ctx, c)
}

// Restore calls the engine.
func (s *served) Restore(ctx context.Context, ref, snap string) (r vm.Record, err error) {
	defer s.metrics.operation("restore", time.Now(), &err)
	return s.Engine.Restore(ctx, ref, snap)
}

// Hibernate calls the engine.
func (s *served) Hibernate(ctx context.Context, ref, name string) (r vm.Record, err error) {
	defer s.metrics.operation("hibernate", time.Now(), &err)
	return s.Engine.Hibernate(ctx, ref, name)
}

// Wake calls the engine.
func (s *served) Wake(ctx context.Context, ref string) (r vm.Record, err error) {
	defer s.metrics.operation("wake", time.Now(), &err)
	return s.Engine.Wake(ctx, ref)
}

// PushSnapshot calls the catalog.
func (s *served) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snap snapshot.Snapshot, err error) {
	watched, done := s.metrics.transfer("push", progress)
	defer done(&err)
	return s.Snapshots.PushSnapshot(ctx, ref, to, auth, watched)
}

// PullSnapshot calls the catalog.
func (s *served) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snap snapshot.Snapshot, err error) {
	watched, done := s.metrics.transfer("pull", progress)
	defer done(&err)
	return s.Snapshots.PullSnapshot(ctx, from, name, auth, watched)
}

// PullSnapshotEarly calls the catalog.
func (s *served) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snap snapshot.Snapshot, err error) {
	watched, done := s.metrics.transfer("pull", progress)
	defer done(&err)
	return s.Snapshots.PullSnapshotEarly(ctx, from, name, auth, watched)
}

// Reset removes every VM and then everything that the network made. The network is set up again with the next VM.
func (s *served) Reset(ctx context.Context) error {
	err := s.Engine.Reset(ctx)
	if err == nil {
		err = s.nets.teardown(ctx)
	}
	return err
}
