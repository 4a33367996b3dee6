package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// operator gives access to all VMs and snapshots of the node, as the node's operator sees them. It is for work that
// concerns the node: what exists, who owns it, and what was left. Work for a pod goes through a tenant.
type operator struct {
	vms   Runtime
	snaps Snapshots // nil: the node keeps no snapshots
}

// tenant gives access to the node's VMs and snapshots on behalf of one pod: what belongs to another namespace is NotFound.
// It is the only way in which a worker reaches them.
type tenant struct {
	p     *Provider
	owner vm.Owner
	vms   Runtime
	snaps Snapshots // nil: the node keeps no snapshots
}

// on returns the tenant for o. Preconditions: o is not the operator.
func (p *Provider) on(o vm.Owner) tenant {
	t := tenant{p: p, owner: o, vms: ownVMs{p.node.vms, o}}
	if p.node.snaps != nil {
		t.snaps = ownSnapshots{p.node.snaps, o}
	}
	return t
}

// ownerOf returns the owner of a pod's VM.
func ownerOf(pod *corev1.Pod) vm.Owner {
	o := vm.Owner{Namespace: pod.Namespace, PodUID: string(pod.UID)}
	if c := metav1.GetControllerOf(pod); c != nil {
		o.SetUID = string(c.UID)
	}
	return o
}

// ownerOfVM returns the owner of a VM that a virtual node created.
func ownerOfVM(rec vm.Record) vm.Owner {
	if !rec.Owner.Operator() {
		return rec.Owner
	}
	return vm.Owner{Namespace: rec.Spec.Labels[contract.VMLabelPodNamespace], PodUID: rec.Spec.Labels[contract.VMLabelPodUID]}
}

// may reports whether a pod of the tenant may take over a VM that has no pod label: a VM of the tenant's namespace, or one
// that the operator offers to it.
func (t tenant) may(rec vm.Record) bool {
	return rec.Owner.Namespace == t.owner.Namespace || rec.Owner.Operator() && t.owner.Invited(rec.Spec.Offered)
}

// ownVMs is a Runtime on behalf of an owner. It embeds no Runtime, so a method that is not written here does not exist.
type ownVMs struct {
	r Runtime
	o vm.Owner
}

var _ Runtime = ownVMs{}

func (v ownVMs) Launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return v.r.Launch(vm.OnBehalf(ctx, v.o), spec)
}

func (v ownVMs) Start(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Start(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownVMs) Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return v.r.Stop(vm.OnBehalf(ctx, v.o), ref, grace)
}

func (v ownVMs) Remove(ctx context.Context, ref string, force bool) error {
	return v.r.Remove(vm.OnBehalf(ctx, v.o), ref, force)
}

func (v ownVMs) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Inspect(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownVMs) List(ctx context.Context) ([]vm.Record, error) {
	return v.r.List(vm.OnBehalf(ctx, v.o))
}

func (v ownVMs) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	return v.r.Watch(vm.OnBehalf(ctx, v.o), after, fn)
}

func (v ownVMs) Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error) {
	return v.r.Exec(vm.OnBehalf(ctx, v.o), ref, e, s)
}

func (v ownVMs) Attach(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error {
	return v.r.Attach(vm.OnBehalf(ctx, v.o), ref, a, s)
}

func (v ownVMs) Forward(ctx context.Context, ref string, port int, s guest.Streams) error {
	return v.r.Forward(vm.OnBehalf(ctx, v.o), ref, port, s)
}

func (v ownVMs) Stats(ctx context.Context, ref string) (guest.Stats, error) {
	return v.r.Stats(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownVMs) Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	return v.r.Logs(vm.OnBehalf(ctx, v.o), ref, o, fn)
}

func (v ownVMs) UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	return v.r.UpdateVolume(vm.OnBehalf(ctx, v.o), ref, volume, files)
}

func (v ownVMs) KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error {
	return v.r.KillContainer(vm.OnBehalf(ctx, v.o), ref, container, run, grace)
}

func (v ownVMs) ReleaseContainer(ctx context.Context, ref, container string) error {
	return v.r.ReleaseContainer(vm.OnBehalf(ctx, v.o), ref, container)
}

func (v ownVMs) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	return v.r.Pull(vm.OnBehalf(ctx, v.o), r, progress)
}

// ownSnapshots is Snapshots on behalf of an owner.
type ownSnapshots struct {
	s Snapshots
	o vm.Owner
}

var _ Snapshots = ownSnapshots{}

func (v ownSnapshots) SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error) {
	return v.s.SaveSnapshot(vm.OnBehalf(ctx, v.o), ref, s)
}

func (v ownSnapshots) CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	return v.s.CloneWithImage(vm.OnBehalf(ctx, v.o), s, auth)
}

func (v ownSnapshots) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	return v.s.Hibernate(vm.OnBehalf(ctx, v.o), ref, name)
}

func (v ownSnapshots) Wake(ctx context.Context, ref string) (vm.Record, error) {
	return v.s.Wake(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownSnapshots) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return v.s.GetSnapshot(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownSnapshots) ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error) {
	return v.s.ListSnapshots(vm.OnBehalf(ctx, v.o))
}

func (v ownSnapshots) RemoveSnapshot(ctx context.Context, ref string) error {
	return v.s.RemoveSnapshot(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownSnapshots) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return v.s.PushSnapshot(vm.OnBehalf(ctx, v.o), ref, to, auth, progress)
}

func (v ownSnapshots) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return v.s.PullSnapshot(vm.OnBehalf(ctx, v.o), from, name, auth, progress)
}

func (v ownSnapshots) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	return v.s.TagDigest(vm.OnBehalf(ctx, v.o), ref, auth)
}

func (v ownSnapshots) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	return v.s.DeleteTag(vm.OnBehalf(ctx, v.o), ref, auth)
}

func (v ownSnapshots) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	return v.s.CheckRegistry(vm.OnBehalf(ctx, v.o), ref, auth)
}
