// Package microvm runs workloads of kind MicroVM as VMs of the engine.
//
// A workload's VM has the workload's name and belongs to the operator. A label says that it is one, and what it was made from. The
// engine is the only owner of the VM's state; this package keeps only the logs of VMs that are gone.
package microvm

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// hashLabel is the label of the VM of a workload: the hash of what it is made from.
const hashLabel = "cocoonstack.io/workload-hash"

// DefaultMemory is the memory of a VM that asks for none, in MiB.
const DefaultMemory = 256

// Engine is the part of the engine that workloads need.
type Engine interface {
	guest.Access
	Launch(ctx context.Context, s vm.Spec) (vm.Record, error)
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
}

// Images makes sure that an image is there.
type Images interface {
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// Deps is what a Driver depends on.
type Deps struct {
	Engine Engine
	Images Images
	Files  Files
	Auth   func(image string) []image.RegistryAuth // the credentials for an image, if there are some
	Logs   string                                  // folder for the logs of VMs that are gone
	Log    *slog.Logger

	Hypervisors func(ctx context.Context) []string // names of those of the engine that run VMs here now; nil: its default alone
}

// Driver implements reconcile.Driver.
type Driver struct {
	Deps
	logs logs
}

var _ reconcile.Driver = (*Driver)(nil)

// New returns a driver.
func New(d Deps) *Driver { return &Driver{Deps: d, logs: logs{dir: d.Logs, log: d.Log}} }

// The engine's names of the hypervisors that a workload can ask for.
const (
	qemu        = "qemu"
	firecracker = "firecracker"
)

func noDriver(w *capsulev1.Workload) error {
	return errdefs.Unsupportedf("workload %s: this machine has no driver for the backend %s; leave microVm.backend out, and the VM runs in the default hypervisor of the machine", w.GetName(), w.GetMicroVm().GetBackend())
}

// Spec returns the VM of w. Errors: InvalidArgument, Unsupported.
func Spec(w *capsulev1.Workload, hash string) (vm.Spec, error) {
	m, driver := w.GetMicroVm(), ""
	switch m.GetBackend() {
	case capsulev1.MicroVMBackend_MICRO_VM_BACKEND_UNSPECIFIED:
	case capsulev1.MicroVMBackend_MICRO_VM_BACKEND_QEMU:
		driver = qemu
	case capsulev1.MicroVMBackend_MICRO_VM_BACKEND_FIRECRACKER:
		driver = firecracker
	case capsulev1.MicroVMBackend_MICRO_VM_BACKEND_SMOLVM:
		return vm.Spec{}, noDriver(w)
	}
	if m.GetKernelPath() == "" && m.GetKernelCmdlineExtra() != "" {
		return vm.Spec{}, errdefs.Unsupportedf("workload %s: the kernel of an image takes no further arguments; leave microVm.kernelCmdlineExtra out", w.GetName())
	}
	s := vm.Spec{
		Name: w.GetName(), Driver: driver, Hostname: cmp.Or(w.GetHostname(), w.GetName()), Labels: map[string]string{hashLabel: hash}, Image: m.GetImage(),
		CPUs: int(cmp.Or(m.GetVcpus(), 1)), Memory: int64(cmp.Or(m.GetMemoryMib(), DefaultMemory)) << 20, StopGrace: workload.Grace(w),
		Process: vm.Process{Entrypoint: m.GetCommand(), Args: m.GetArgs()},
		NICs:    []vm.NICSpec{{}},
		DNS:     &vm.DNS{Searches: []string{workload.Domain}, Offered: true},
	}
	for _, name := range slices.Sorted(maps.Keys(m.GetEnv())) {
		s.Process.Env = append(s.Process.Env, vm.EnvVar{Name: name, Value: m.GetEnv()[name]})
	}
	for _, p := range m.GetPorts() {
		s.NICs[0].Ports = append(s.NICs[0].Ports, vm.PortMapping{Protocol: vm.Protocol(workload.Protocol(p)), HostPort: uint16(p.GetHostPort()), GuestPort: uint16(p.GetContainerPort())})
	}
	for _, v := range m.GetMounts() {
		s.Volumes = append(s.Volumes, vm.Volume{Name: v.GetVolumeName(), Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: v.GetVolumeName(), ReadOnly: v.GetReadOnly()}})
		if m.GetKernelPath() == "" { // a system of its own mounts its disks itself
			s.Mounts = append(s.Mounts, vm.Mount{Volume: v.GetVolumeName(), Path: v.GetMountPath(), ReadOnly: v.GetReadOnly()})
		}
	}
	if m.GetKernelPath() != "" {
		if err := ownKernel(w, &s); err != nil {
			return vm.Spec{}, err
		}
	}
	s = s.Default()
	return s, s.Validate()
}

// Check implements reconcile.Driver.
func (d *Driver) Check(ctx context.Context, w *capsulev1.Workload) error {
	s, err := Spec(w, "")
	if err == nil && s.Driver != "" && (d.Hypervisors == nil || !slices.Contains(d.Hypervisors(ctx), s.Driver)) {
		err = noDriver(w)
	}
	if err != nil || w.GetMicroVm().GetKernelPath() == "" {
		return err
	}
	return d.Files.Check(bootOf(w))
}

// Prepare implements reconcile.Driver.
func (d *Driver) Prepare(ctx context.Context, w *capsulev1.Workload) error {
	if w.GetMicroVm().GetKernelPath() != "" {
		_, err := d.spec(ctx, w, "")
		return err
	}
	name := w.GetMicroVm().GetImage()
	_, err := d.Images.Pull(ctx, image.PullRequest{Name: name, Policy: image.PullIfNotPresent, Auth: d.Auth(name)}, nil)
	return err
}

// Start implements reconcile.Driver. The engine undoes a launch that fails or is killed.
func (d *Driver) Start(ctx context.Context, w *capsulev1.Workload, hash string) (reconcile.Instance, error) {
	s, err := d.spec(ctx, w, hash)
	if err != nil {
		return reconcile.Instance{}, err
	}
	r, err := d.Engine.Launch(ctx, s)
	return instance(r), err
}

// Stop implements reconcile.Driver.
func (d *Driver) Stop(ctx context.Context, i reconcile.Instance, grace time.Duration) error {
	_, err := d.Engine.Stop(ctx, i.ID, grace)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Remove implements reconcile.Driver. The log is kept first; if that fails, as on a full disk, the VM goes all the same: it holds the
// disk.
func (d *Driver) Remove(ctx context.Context, i reconcile.Instance) error {
	if err := d.logs.keep(ctx, d.Engine, i); err != nil && !errdefs.IsNotFound(err) {
		d.logs.log.Warn("the log of a VM is lost", "workload", i.Name, "instance", i.ID, "err", err)
	}
	if err := d.Engine.Remove(ctx, i.ID, true); !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// Forget implements reconcile.Driver.
func (d *Driver) Forget(_ context.Context, name string) error { return d.logs.forget(name) }

// Get implements reconcile.Driver.
func (d *Driver) Get(ctx context.Context, name string) (reconcile.Instance, error) {
	r, err := d.Engine.Inspect(ctx, name)
	switch {
	case err != nil && !errdefs.IsInvalid(err):
		return reconcile.Instance{}, err
	case err != nil || r.Spec.Name != name: // name is an id, or the beginning of some
		return reconcile.Instance{}, errdefs.NotFoundf("workload %s has no VM", name)
	case r.Spec.Labels[hashLabel] == "":
		return reconcile.Instance{}, errdefs.Preconditionf("the VM %s of this machine is not that of a workload; remove it, or give the workload another name", name)
	}
	return instance(r), nil
}

// List implements reconcile.Driver.
func (d *Driver) List(ctx context.Context) ([]reconcile.Instance, error) {
	all, err := d.Engine.List(ctx)
	if err != nil {
		return nil, err
	}
	var found []reconcile.Instance
	for _, r := range all {
		if r.Owner.Operator() && r.Spec.Labels[hashLabel] != "" {
			found = append(found, instance(r))
		}
	}
	return found, nil
}

// Watch implements reconcile.Driver.
func (d *Driver) Watch(ctx context.Context, changed func(name string)) error {
	return d.Engine.Watch(ctx, -1, func(e vm.Event) error {
		if e.Record.Spec.Labels[hashLabel] != "" {
			changed(e.Record.Spec.Name)
		}
		return nil
	})
}

// Exec implements reconcile.Driver.
func (d *Driver) Exec(ctx context.Context, name string, e guest.Exec, s guest.Streams) (int, error) {
	i, err := d.Get(ctx, name)
	if err != nil {
		return 0, err
	}
	if r, err := d.Engine.Inspect(ctx, i.ID); err == nil && r.ImageType != vm.ImageOCI {
		return 0, errdefs.Unsupportedf("workload %s boots its own kernel and has no agent of ours, so no command runs in it; see its console: capsulectl workload logs %s", name, name)
	}
	return d.Engine.Exec(ctx, i.ID, e, s)
}

// instance returns the VM of a record as an instance.
func instance(r vm.Record) reconcile.Instance {
	i := reconcile.Instance{
		Name: r.Spec.Name, ID: string(r.ID), Hash: r.Spec.Labels[hashLabel], State: reconcile.Ended,
		StartedAt: r.StartedAt, EndedAt: r.StoppedAt, Message: r.Message,
	}
	if len(r.NICs) > 0 {
		i.Address = r.NICs[0].IP
	}
	switch r.State {
	case vm.StateCreating:
		i.State = reconcile.Preparing
	case vm.StateRunning, vm.StateHibernated:
		i.State = reconcile.Preparing
		if r.AgentReady || r.ImageType != vm.ImageOCI {
			i.State = reconcile.Running
		}
	case vm.StateCreated: // its launch was interrupted
		i.Reason = "NotStarted"
	case vm.StateStopped, vm.StateError:
		if r.Reason != vm.ReasonExited && r.Reason != vm.ReasonStopped {
			i.Reason = r.Reason
		}
	}
	if r.ExitCode != nil {
		code := int32(*r.ExitCode)
		i.ExitCode = &code
	}
	if r.Reason == vm.ReasonLost {
		i.Reason = "" // the reconciler knows whether the machine has rebooted
	}
	return i
}
