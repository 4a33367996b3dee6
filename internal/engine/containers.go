package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/engine/proclog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// designContainers adds the containers to the first record of a VM and returns their images.
func (e *Engine) designContainers(ctx context.Context, r *vm.Record) ([]image.Image, error) {
	var images []image.Image
	for _, c := range r.Spec.Containers {
		img, err := e.images.Get(ctx, c.Image)
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		if img.Type != vm.ImageOCI {
			return nil, errdefs.Invalidf("container %s: image %s boots itself, so it cannot be one of several containers", c.Name, c.Image)
		}
		process := c.Process.Over(img.Config)
		if process.Empty() {
			return nil, errdefs.Invalidf("container %s: image %s has no entrypoint; give a command", c.Name, c.Image)
		}
		images = append(images, img)
		r.Containers = append(r.Containers, vm.ContainerRecord{Name: c.Name, ImageDigest: img.ID, Process: process})
	}
	return images, nil
}

// layContainers records which disks hold the images of the containers and returns disks with the missing ones added.
// Layers that several images share are one disk.
func (e *Engine) layContainers(ctx context.Context, containers []vm.ContainerRecord, images []image.Image, disks []vm.Disk) ([]vm.Disk, error) {
	serials := map[string]string{} // by path
	for _, d := range disks {
		if d.Role == vm.RoleLayer {
			serials[d.Path] = d.Serial
		}
	}
	added := 0
	for i := range containers {
		layers, err := e.images.Base(ctx, images[i])
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", containers[i].Name, err)
		}
		containers[i].Layers = nil
		for _, d := range layers {
			serial, ok := serials[d.Path]
			if !ok {
				serial = image.SerialContainerLayer(added)
				d.Serial = serial
				disks, serials[d.Path] = append(disks, d), serial
				added++
			}
			containers[i].Layers = append(containers[i].Layers, serial)
		}
	}
	return disks, nil
}

// containersOf returns what the guest is told about its containers. A guest that has started them ignores it.
func containersOf(r vm.Record) []guest.Container {
	var out []guest.Container
	for i, c := range r.Containers {
		spec := r.Spec.Containers[i]
		out = append(out, guest.Container{
			Name: c.Name, Kind: spec.Kind, Process: c.Process, Layers: c.Layers, Mounts: spec.Mounts, Run: c.Status.Next(),
			Hold: spec.Hold,
		})
	}
	return out
}

// eachContainer returns all with their statuses changed by f.
func eachContainer(all []vm.ContainerRecord, f func(vm.ContainerStatus) vm.ContainerStatus) []vm.ContainerRecord {
	all = slices.Clone(all)
	for i := range all {
		all[i].Status = f(all[i].Status)
	}
	return all
}

// again returns s for a guest that boots once more.
func again(s vm.ContainerStatus) vm.ContainerStatus {
	if s.State == "" {
		return s
	}
	if s.Exit != nil {
		s.Last, s.Exit = s.Exit, nil
	}
	s.State, s.Reason, s.Message = vm.ContainerWaiting, vm.ContainerInitGoing, ""
	return s
}

// standsOn reports whether r's VM uses the image with that digest.
func standsOn(r vm.Record, digest string) bool {
	return r.ImageDigest == digest ||
		slices.ContainsFunc(r.Containers, func(c vm.ContainerRecord) bool { return c.ImageDigest == digest })
}

// containerOf resolves the name of a container: in a VM with several, "" means the first app container.
func containerOf(r vm.Record, name string) (string, error) {
	if name == "" {
		for _, c := range r.Spec.Containers {
			if c.Kind == vm.ContainerApp {
				return c.Name, nil
			}
		}
		return "", nil
	}
	if r.Container(name) == nil {
		return "", errdefs.NotFoundf("vm %s has no container %q", r.Spec.Name, name)
	}
	return name, nil
}

// containerLogs are the logs of r's containers, each in a folder of its own.
func (e *Engine) containerLogs(r vm.Record) map[string]*proclog.Log {
	logs := map[string]*proclog.Log{}
	for _, c := range r.Containers {
		logs[c.Name] = proclog.New(e.containerDir(r.ID, c.Name), e.cfg.MaxLogBytes)
	}
	return logs
}

func (e *Engine) containerDir(id vm.ID, name string) string {
	return filepath.Join(e.stateDir(id), "containers", name)
}

// containersIn returns the containers of x for a VM of spec that resumes from it or boots its disks. A snapshot from
// elsewhere may say anything.
func containersIn(x snapshot.Snapshot, spec vm.Spec, live bool) ([]vm.ContainerRecord, error) {
	out := x.Record.Clone().Containers
	if !slices.EqualFunc(out, spec.Containers, func(r vm.ContainerRecord, c vm.Container) bool { return r.Name == c.Name }) {
		return nil, errdefs.DataLossf("snapshot %s is damaged: its %d containers are not the %d that its VM was given", x.Name, len(out), len(spec.Containers))
	}
	for i := range out {
		out[i].ImageManifest = ""
		if !live {
			out[i].Status = vm.ContainerStatus{}
		}
	}
	return out, nil
}

// baseOf returns the disks of the images that x depends on, with the serials that its guest knows.
func (e *Engine) baseOf(ctx context.Context, x snapshot.Snapshot, images []image.Image) ([]vm.Disk, error) {
	base, err := e.images.Base(ctx, images[0])
	if err != nil {
		return nil, err
	}
	for i, c := range x.Record.Containers {
		layers, err := e.images.Base(ctx, images[i+1])
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		if len(layers) != len(c.Layers) {
			return nil, errdefs.DataLossf("snapshot %s is damaged: container %s has %d layers, its image %d", x.Name, c.Name, len(c.Layers), len(layers))
		}
		for j, d := range layers {
			d.Serial = c.Layers[j]
			at := slices.IndexFunc(base, func(b vm.Disk) bool { return b.Serial == d.Serial })
			switch {
			case at < 0:
				base = append(base, d)
			case base[at].Path != d.Path:
				return nil, errdefs.DataLossf("snapshot %s is damaged: container %s has the disk %s of another image", x.Name, c.Name, d.Serial)
			}
		}
	}
	return base, nil
}

// foreignLogs begins the logs of m for a guest whose logs begin with those of another run; see skipLogs.
func (e *Engine) foreignLogs(m *machine) func() error {
	return func() error {
		if err := m.log.BeginForeign(); err != nil {
			return err
		}
		for name, log := range m.containers {
			if err := os.MkdirAll(e.containerDir(m.id, name), 0o700); err != nil {
				return fmt.Errorf("begin log of container %s: %w", name, err)
			}
			if err := log.BeginForeign(); err != nil {
				return fmt.Errorf("container %s: %w", name, err)
			}
		}
		return nil
	}
}

// skipLogs leaves out of the logs of m what its resumed guest had written before.
func (e *Engine) skipLogs(m *machine, reply guest.ResumedReply) error {
	if err := m.log.Skip(0, reply.LogSeq); err != nil {
		return err
	}
	for i, c := range m.record().Containers {
		var place guest.LogPlace
		if i < len(reply.Containers) {
			place = reply.Containers[i]
		}
		log := m.containers[c.Name]
		err := os.MkdirAll(e.containerDir(m.id, c.Name), 0o700)
		if err == nil {
			err = log.Resume()
		}
		if err == nil {
			err = log.Skip(place.Run, place.Seq)
		}
		if err != nil {
			return fmt.Errorf("log of container %s: %w", c.Name, err)
		}
	}
	return nil
}

func (m *machine) finishLogs() {
	m.log.Finish()
	for _, l := range m.containers {
		l.Finish()
	}
}

// followContainers records the status of m's containers and keeps their logs until all is reported or the session
// ends.
func (e *Engine) followContainers(ctx context.Context, m *machine, agent guest.Agent) {
	keeper, ok := agent.(guest.ContainerKeeper)
	if !ok {
		e.log.Error("agent of vm knows nothing of containers", "vm", m.id)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for name, log := range m.containers {
		wg.Go(func() { e.keepContainerLog(ctx, m, keeper, agent, name, log) })
	}
	e.pump(ctx, m, agent, "containers of vm not followed, trying again", func() error {
		return keeper.Containers(ctx, func(all []vm.ContainerStatus) error { return e.noteContainers(ctx, m, all) })
	})
}

func (e *Engine) keepContainerLog(ctx context.Context, m *machine, keeper guest.ContainerKeeper, agent guest.Agent, name string, log *proclog.Log) {
	err := os.MkdirAll(e.containerDir(m.id, name), 0o700)
	if err == nil {
		err = log.Resume()
	}
	if err != nil {
		e.log.Error("log of container not kept", "vm", m.id, "err", err)
		return
	}
	e.pump(ctx, m, agent, "log of container not kept, trying again", func() error {
		run, seq := log.Place()
		return keeper.ContainerLogs(ctx, name, run, seq, log.Append)
	})
	if ctx.Err() == nil {
		select {
		case <-agent.Done(): // the next session continues it
		default:
			log.Finish()
		}
	}
}

// KillContainer ends a run of one container of a running VM, the current one when run is 0: by SIGTERM, and by
// SIGKILL after grace (negative: that of the spec, zero: at once). It returns when the run has ended. The run counts
// as failed, and the restart policy decides whether another one follows. A run that has already ended is no error. If
// ctx ends first, the run may still end.
// Errors: NotFound (VM, container), FailedPrecondition when the VM does not run, Unsupported when its guest has an
// older agent, Unavailable when the guest does not answer or the run does not end in time.
func (e *Engine) KillContainer(caller context.Context, ref, container string, run int, grace time.Duration) error {
	return e.life.ended(caller, e.keeperOf(caller, ref, container, func(ctx context.Context, r vm.Record, k guest.ContainerKeeper) error {
		if run < 0 {
			return errdefs.Invalidf("run %d of container %s: runs are counted from 1", run, container)
		}
		if grace < 0 {
			grace = r.Spec.StopGrace
		}
		ctx, cancel := context.WithTimeoutCause(ctx, grace+e.cfg.StopMargin, errdefs.Unavailablef("it has not ended within %s", grace))
		defer cancel()
		return k.KillContainer(ctx, container, run, grace)
	}))
}

// ReleaseContainer lets the containers of a running VM start that wait for the given one, which holds them.
// Idempotent.
// Errors as for KillContainer.
func (e *Engine) ReleaseContainer(caller context.Context, ref, container string) error {
	return e.life.ended(caller, e.keeperOf(caller, ref, container, func(ctx context.Context, _ vm.Record, k guest.ContainerKeeper) error {
		return k.ReleaseContainer(ctx, container)
	}))
}

// keeperOf calls f with the agent that manages a container.
func (e *Engine) keeperOf(caller context.Context, ref, container string, f func(context.Context, vm.Record, guest.ContainerKeeper) error) error {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, _, err := e.running(ctx, ref)
	if err != nil {
		return err
	}
	r := m.record()
	if r.Container(container) == nil {
		return errdefs.NotFoundf("vm %s has no container %q", m.name(), container)
	}
	_, l, agent, err := e.agentOf(ctx, string(m.id))
	if err != nil {
		return err
	}
	keeper, ok := agent.(guest.ContainerKeeper)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s keeps no containers", m.name())
	}
	if err := f(ctx, r, keeper); err != nil {
		return e.failed(ctx, m, l, agent, fmt.Errorf("container %s of vm %s: %w", container, m.name(), err))
	}
	return nil
}

// noteContainers records the status of m's containers.
func (e *Engine) noteContainers(ctx context.Context, m *machine, all []vm.ContainerStatus) error {
	have := m.record().Containers
	if len(all) != len(have) {
		return errdefs.New(errdefs.Internal, "the guest tells of %d containers, and it was given %d", len(all), len(have))
	}
	next := slices.Clone(have)
	for i, s := range all {
		if s.Last == nil && s.Restarts > 0 { // from before this boot, which the guest does not know of
			s.Last = have[i].Status.Last
		}
		next[i].Status = s
	}
	if reflect.DeepEqual(have, next) {
		return nil
	}
	_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.Containers = next })
	return err
}
