package podprovider

import (
	"context"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/vm"
)

// operator gives access to all VMs and snapshots of the node, as the node's operator. It is for work that concerns the whole
// node: lists, owners and orphans. Work for a pod uses a tenant.
type operator struct {
	vms       overview
	runtime   Runtime // for the tenants
	snapshots *podsnapshots.Store
}

// tenant gives access to the node's VMs on behalf of one pod. A VM of another namespace is NotFound. A worker has no other
// access to VMs. Its access to snapshots is podsnapshots.States.
type tenant struct {
	owner      vm.Owner
	vms        machines
	guests     guest.Access
	containers guest.Containers
	puller     puller
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

// may reports whether a pod of the tenant may take over a VM that has no pod label.
func (t tenant) may(rec vm.Record) bool { return t.owner.MayAdopt(rec.Owner, rec.Spec.Offered) }

// named returns the VM of exactly that name. Errors: NotFound. It compares the name, because the Runtime also accepts the
// beginning of an ID, and a name can look like one.
func (t tenant) named(ctx context.Context, name string) (vm.Record, error) {
	rec, err := t.vms.Inspect(ctx, name)
	if errdefs.IsInvalid(err) || errdefs.IsNotFound(err) || err == nil && rec.Spec.Name != name {
		return vm.Record{}, vm.VMs.Missing(t.owner, name)
	}
	return rec, err
}

// known does the same as named for a VM of another pod. If an earlier release created that VM, its name may differ.
func (t tenant) known(ctx context.Context, name string) (rec vm.Record, err error) {
	for _, alias := range contract.Aliases(t.owner.Namespace, name) {
		if rec, err = t.named(ctx, alias); !errdefs.IsNotFound(err) {
			return rec, err
		}
	}
	return rec, err
}

// own calls a part R of Runtime on behalf of an owner. It does not embed R, so that no method can be called without an owner.
type own[R any] struct {
	r R
	o vm.Owner
}

type (
	ownMachines   own[machines]
	ownGuests     own[guest.Access]
	ownContainers own[guest.Containers]
	ownPuller     own[puller]
)

func (v ownMachines) Launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return v.r.Launch(vm.OnBehalf(ctx, v.o), spec)
}

func (v ownMachines) Start(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Start(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownMachines) Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return v.r.Stop(vm.OnBehalf(ctx, v.o), ref, grace)
}

func (v ownMachines) Pause(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Pause(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownMachines) Unpause(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Unpause(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownMachines) Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error) {
	return v.r.Reboot(vm.OnBehalf(ctx, v.o), ref, hard)
}

func (v ownMachines) Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error) {
	return v.r.Resize(vm.OnBehalf(ctx, v.o), ref, to)
}

func (v ownMachines) AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	return v.r.AttachVolume(vm.OnBehalf(ctx, v.o), ref, use, path)
}

func (v ownMachines) DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error) {
	return v.r.DetachVolume(vm.OnBehalf(ctx, v.o), ref, volume)
}

func (v ownMachines) DumpMemory(ctx context.Context, ref, volume, file string) error {
	return v.r.DumpMemory(vm.OnBehalf(ctx, v.o), ref, volume, file)
}

func (v ownMachines) AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error) {
	return v.r.AttachNIC(vm.OnBehalf(ctx, v.o), ref, want)
}

func (v ownMachines) DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error) {
	return v.r.DetachNIC(vm.OnBehalf(ctx, v.o), ref, nic)
}

func (v ownMachines) SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error) {
	return v.r.SetLink(vm.OnBehalf(ctx, v.o), ref, nic, down)
}

func (v ownMachines) Remove(ctx context.Context, ref string, force bool) error {
	return v.r.Remove(vm.OnBehalf(ctx, v.o), ref, force)
}

func (v ownMachines) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	return v.r.Inspect(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownGuests) Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error) {
	return v.r.Exec(vm.OnBehalf(ctx, v.o), ref, e, s)
}

func (v ownGuests) Attach(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error {
	return v.r.Attach(vm.OnBehalf(ctx, v.o), ref, a, s)
}

func (v ownGuests) Forward(ctx context.Context, ref string, port int, s guest.Streams) error {
	return v.r.Forward(vm.OnBehalf(ctx, v.o), ref, port, s)
}

func (v ownGuests) Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	return v.r.Logs(vm.OnBehalf(ctx, v.o), ref, o, fn)
}

// Console implements guest.ConsoleOpener.
func (v ownGuests) Console(ctx context.Context, ref string) (io.ReadWriteCloser, error) {
	keeper, ok := v.r.(guest.ConsoleOpener)
	if !ok {
		return nil, errdefs.Unsupportedf("the client of the VM engine opens no consoles; attach without -i")
	}
	return keeper.Console(vm.OnBehalf(ctx, v.o), ref)
}

// Display implements guest.Displays.
func (v ownGuests) Display(ctx context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	d, err := displaysOf(v.r)
	if err != nil {
		return nil, err
	}
	return d.Display(vm.OnBehalf(ctx, v.o), ref, keep)
}

// Screenshot implements guest.Displays.
func (v ownGuests) Screenshot(ctx context.Context, ref string, wake bool) ([]byte, error) {
	d, err := displaysOf(v.r)
	if err != nil {
		return nil, err
	}
	return d.Screenshot(vm.OnBehalf(ctx, v.o), ref, wake)
}

// Describe implements guest.Describes.
func (v ownGuests) Describe(ctx context.Context, ref string) (guest.Description, error) {
	d, ok := v.r.(guest.Describes)
	if !ok {
		return guest.Description{}, errdefs.Unsupportedf("the client of the VM engine describes no guests")
	}
	return d.Describe(vm.OnBehalf(ctx, v.o), ref)
}

// SetLogins implements guest.LoginAccess.
func (v ownGuests) SetLogins(ctx context.Context, ref string, l guest.Logins) error {
	s, ok := v.r.(guest.LoginAccess)
	if !ok {
		return errdefs.Unsupportedf("the client of the VM engine sets no passwords and SSH keys")
	}
	return s.SetLogins(vm.OnBehalf(ctx, v.o), ref, l)
}

// Freeze implements guest.Freezes.
func (v ownGuests) Freeze(ctx context.Context, ref string, most time.Duration) error {
	f, err := v.freezes()
	if err != nil {
		return err
	}
	return f.Freeze(vm.OnBehalf(ctx, v.o), ref, most)
}

// Thaw implements guest.Freezes.
func (v ownGuests) Thaw(ctx context.Context, ref string) (bool, error) {
	f, err := v.freezes()
	if err != nil {
		return false, err
	}
	return f.Thaw(vm.OnBehalf(ctx, v.o), ref)
}

func (v ownGuests) freezes() (guest.Freezes, error) {
	f, ok := v.r.(guest.Freezes)
	if !ok {
		return nil, errdefs.Unsupportedf("the client of the VM engine freezes no guests")
	}
	return f, nil
}

func displaysOf(a guest.Access) (guest.Displays, error) {
	d, ok := a.(guest.Displays)
	if !ok {
		return nil, errdefs.Unsupportedf("the client of the VM engine shows no screens")
	}
	return d, nil
}

func (v ownContainers) UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	return v.r.UpdateVolume(vm.OnBehalf(ctx, v.o), ref, volume, files)
}

func (v ownContainers) KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error {
	return v.r.KillContainer(vm.OnBehalf(ctx, v.o), ref, container, run, grace)
}

func (v ownContainers) ReleaseContainer(ctx context.Context, ref, container string) error {
	return v.r.ReleaseContainer(vm.OnBehalf(ctx, v.o), ref, container)
}

func (v ownContainers) AddContainer(ctx context.Context, ref string, c vm.Container) (vm.Record, error) {
	return v.r.AddContainer(vm.OnBehalf(ctx, v.o), ref, c)
}

func (v ownContainers) StartContainer(ctx context.Context, ref, container string) (vm.Record, error) {
	return v.r.StartContainer(vm.OnBehalf(ctx, v.o), ref, container)
}

func (v ownContainers) RemoveContainer(ctx context.Context, ref, container string) error {
	return v.r.RemoveContainer(vm.OnBehalf(ctx, v.o), ref, container)
}

func (v ownContainers) ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	return v.r.ResizeContainers(vm.OnBehalf(ctx, v.o), ref, want)
}

func (v ownPuller) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	return v.r.Pull(vm.OnBehalf(ctx, v.o), r, progress)
}

// runtimeOf returns the machine's ID and addresses from the annotations of a static pod.
func runtimeOf(pod *corev1.Pod) contract.VMRuntime {
	there, _ := contract.ParseVMRuntime(pod.Annotations)
	return there
}
