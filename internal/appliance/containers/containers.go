// Package containers runs workloads of kind Container with a container runtime, on the network of the machine's bridge, and with the
// machine's volumes.
//
// A workload has one container. Its id follows from the workload's name, so that whatever a crash left of it is known: no record of it is
// written before there is something to remove.
package containers

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Labels of a container.
const (
	nameLabel     = "cocoonstack.io/workload"
	hashLabel     = "cocoonstack.io/workload-hash"
	instanceLabel = "cocoonstack.io/workload-instance" // another one for each container
)

// defaultPIDs bounds a container that asks for no bound: a program that forks without end stops there.
const defaultPIDs = 4096

// ID returns the id of the container of a workload, which its volumes and its interface have, too.
func ID(name string) vm.ID {
	sum := sha256.Sum256([]byte("workload/" + name))
	return vm.ID(strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:16])))
}

// Runtime runs containers.
type Runtime interface {
	container.Runtime
	container.Images
	container.Access
}

// Network is the network of the bridge.
type Network interface {
	network.Network
	network.NamespaceAttacher
}

// Namespaces makes network namespaces.
type Namespaces interface {
	Make(id vm.ID) (path string, err error)
	Remove(id vm.ID) error
}

// Volumes is the part of the volume store that containers need.
type Volumes interface {
	List(ctx context.Context) ([]volume.Volume, error)
	Attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (volume.Volume, vm.Disk, error)
	Detach(ctx context.Context, ref string, from vm.ID) error
}

// Mounts mounts volumes on the machine. Folders are below a root that it knows.
type Mounts interface {
	// Mount mounts a volume and returns the folder.
	Mount(ctx context.Context, disk vm.Disk, id vm.ID, volume string, readOnly bool) (string, error)
	// Unmount unmounts all volumes of an id.
	Unmount(ctx context.Context, id vm.ID) error
}

// Deps is what a Driver depends on.
type Deps struct {
	Runtime    Runtime
	Network    Network // nil: there is no bridge
	Namespaces Namespaces
	Volumes    Volumes
	Mounts     Mounts
	Searches   func() []string                        // search domains of the machine
	HostFiles  func() container.Files                 // of the machine, for containers that share its network
	Known      func() []string                        // names of all workloads
	Auth       func(name string) []image.RegistryAuth // the credentials for an image, if there are some
	Dir        string                                 // for records of interfaces
	Log        *slog.Logger
}

// Driver implements reconcile.Driver.
type Driver struct {
	deps Deps
	nics nics
}

var _ reconcile.Driver = (*Driver)(nil)

// New returns a driver. Begin comes before its first use.
func New(d Deps) *Driver { return &Driver{deps: d, nics: nics{dir: d.Dir}} }

// Check implements reconcile.Driver.
func (d *Driver) Check(_ context.Context, w *capsulev1.Workload) error {
	if workload.Network(w) == capsulev1.NetworkMode_NETWORK_MODE_BRIDGE && d.deps.Network == nil {
		return errdefs.Preconditionf("workload %s: this machine has no bridge; use networkMode HOST or NONE", w.GetName())
	}
	return nil
}

// Prepare implements reconcile.Driver.
func (d *Driver) Prepare(ctx context.Context, w *capsulev1.Workload) error {
	pull := container.Pull{Ref: w.GetContainer().GetImage()}
	for _, a := range d.deps.Auth(pull.Ref) {
		pull.Username, pull.Password = a.Username, a.Password
	}
	_, err := d.deps.Runtime.EnsureImage(ctx, pull)
	return err
}

// Start implements reconcile.Driver.
func (d *Driver) Start(ctx context.Context, w *capsulev1.Workload, hash string) (i reconcile.Instance, err error) {
	id := ID(w.GetName())
	if err := d.remove(ctx, id); err != nil { // of an interrupted start
		return i, err
	}
	var back undo.Stack
	back.Push(func(ctx context.Context) error { return d.remove(ctx, id) })
	defer func() {
		if err != nil {
			err = undone(ctx, err, &back)
		}
	}()
	s := d.spec(w, id, hash)
	if err := d.connect(ctx, w, id, &s); err != nil {
		return i, err
	}
	if err := d.mount(ctx, w, id, &s); err != nil {
		return i, err
	}
	if err := d.deps.Runtime.Create(ctx, s); err != nil {
		return i, err
	}
	if err := d.deps.Runtime.Start(ctx, s.ID); err != nil {
		return i, err
	}
	c, err := d.deps.Runtime.Inspect(ctx, s.ID)
	if err != nil {
		return i, err
	}
	return d.instance(c), nil
}

// undone undoes a start, also if its caller is gone.
func undone(ctx context.Context, err error, back *undo.Stack) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return errors.Join(err, back.Run(ctx))
}

// spec returns the container of w, without its network and its volumes.
func (d *Driver) spec(w *capsulev1.Workload, id vm.ID, hash string) container.Spec {
	c := w.GetContainer()
	s := container.Spec{
		ID: string(id), Image: c.GetImage(), Command: c.GetCommand(), Args: c.GetArgs(), Hostname: hostname(w),
		Labels: map[string]string{nameLabel: w.GetName(), hashLabel: hash, instanceLabel: string(vm.NewID())},
		Limits: container.Limits{CPU: int64(c.GetCpuMillis()), Memory: int64(c.GetMemoryMib()) << 20, PIDs: int64(c.GetPids())},
		Host:   container.Host{Privileged: c.GetPrivileged(), PID: c.GetHostPid(), IPC: c.GetHostIpc(), Mount: c.GetHostMount()},
	}
	if s.Limits.PIDs == 0 {
		s.Limits.PIDs = defaultPIDs
	}
	for _, name := range slices.Sorted(maps.Keys(c.GetEnv())) {
		s.Env = append(s.Env, vm.EnvVar{Name: name, Value: c.GetEnv()[name]})
	}
	for _, text := range c.GetHostBindPaths() {
		b, err := workload.ParseBind(text)
		switch {
		case err != nil: // it was validated
		case b.Source == b.Path && !b.ReadOnly:
			s.Host.BindPaths = append(s.Host.BindPaths, b.Path)
		default:
			s.Mounts = append(s.Mounts, container.Mount{Source: b.Source, Path: b.Path, ReadOnly: b.ReadOnly})
		}
	}
	return s
}

func hostname(w *capsulev1.Workload) string {
	if h := w.GetHostname(); h != "" {
		return h
	}
	return w.GetName()
}

// mount attaches and mounts the volumes of w.
func (d *Driver) mount(ctx context.Context, w *capsulev1.Workload, id vm.ID, s *container.Spec) error {
	for _, m := range w.GetContainer().GetMounts() {
		_, disk, err := d.deps.Volumes.Attach(ctx, m.GetVolumeName(), id, volume.Mode{ReadOnly: m.GetReadOnly()})
		if err != nil {
			return fmt.Errorf("attach volume %s: %w", m.GetVolumeName(), err)
		}
		dir, err := d.deps.Mounts.Mount(ctx, disk, id, m.GetVolumeName(), m.GetReadOnly())
		if err != nil {
			return fmt.Errorf("mount volume %s: %w", m.GetVolumeName(), err)
		}
		s.Mounts = append(s.Mounts, container.Mount{Source: dir, Path: m.GetMountPath(), ReadOnly: m.GetReadOnly()})
	}
	return nil
}

// Stop implements reconcile.Driver.
func (d *Driver) Stop(ctx context.Context, i reconcile.Instance, grace time.Duration) error {
	err := d.deps.Runtime.Stop(ctx, string(ID(i.Name)), grace)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Remove implements reconcile.Driver.
func (d *Driver) Remove(ctx context.Context, i reconcile.Instance) error {
	return d.remove(ctx, ID(i.Name))
}

// remove removes a container, and gives back its volumes and its interface, which keeps its address. The log stays. Each step is
// idempotent, and none needs those before it.
func (d *Driver) remove(ctx context.Context, id vm.ID) error {
	if err := d.deps.Runtime.Remove(ctx, string(id), true); err != nil {
		return fmt.Errorf("remove the container: %w", err)
	}
	if err := d.deps.Mounts.Unmount(ctx, id); err != nil {
		return fmt.Errorf("unmount its volumes: %w", err)
	}
	all, err := d.deps.Volumes.List(ctx)
	if err != nil {
		return err
	}
	for _, v := range all {
		if slices.ContainsFunc(v.Attachments, func(a volume.Attachment) bool { return a.VM == id }) {
			if err := d.deps.Volumes.Detach(ctx, string(v.ID), id); err != nil {
				return fmt.Errorf("detach volume %s: %w", v.Name, err)
			}
		}
	}
	return d.disconnect(ctx, id)
}

// End stops and removes the container of a workload, if there is one. Whoever follows the workloads makes it again.
func (d *Driver) End(ctx context.Context, name string, grace time.Duration) error {
	i, err := d.Get(ctx, name)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("end the container of workload %s: %w", name, err)
	}
	if err == nil {
		err = d.Stop(ctx, i, grace)
	} else {
		err = nil
	}
	if err = errors.Join(err, d.remove(ctx, ID(name))); err != nil {
		return fmt.Errorf("end the container of workload %s: %w", name, err)
	}
	return nil
}

// Forget implements reconcile.Driver.
func (d *Driver) Forget(ctx context.Context, name string) error {
	id := ID(name)
	if err := d.remove(ctx, id); err != nil {
		return err
	}
	if err := d.deps.Runtime.Remove(ctx, string(id), false); err != nil {
		return fmt.Errorf("remove the log: %w", err)
	}
	return d.release(ctx, id)
}

// Get implements reconcile.Driver.
func (d *Driver) Get(ctx context.Context, name string) (reconcile.Instance, error) {
	c, err := d.deps.Runtime.Inspect(ctx, string(ID(name)))
	if err != nil {
		return reconcile.Instance{}, err
	}
	if c.Spec.Labels[nameLabel] != name {
		return reconcile.Instance{}, errdefs.Preconditionf("the container %s is not that of workload %s; remove it", c.Spec.ID, name)
	}
	return d.instance(c), nil
}

// List implements reconcile.Driver.
func (d *Driver) List(ctx context.Context) ([]reconcile.Instance, error) {
	all, err := d.deps.Runtime.List(ctx)
	if err != nil {
		return nil, err
	}
	var found []reconcile.Instance
	for _, c := range all {
		if c.Spec.Labels[nameLabel] != "" {
			found = append(found, d.instance(c))
		}
	}
	return found, nil
}

// Watch implements reconcile.Driver.
func (d *Driver) Watch(ctx context.Context, changed func(name string)) error {
	names := map[string]string{}
	return d.deps.Runtime.Watch(ctx, func(id string, _ container.State) error {
		if names[id] == "" {
			for _, name := range d.deps.Known() {
				names[string(ID(name))] = name
			}
		}
		if name := names[id]; name != "" {
			changed(name)
		}
		return nil
	})
}

// instance returns a container as an instance.
func (d *Driver) instance(c container.Container) reconcile.Instance {
	i := reconcile.Instance{
		Name: c.Spec.Labels[nameLabel], ID: c.Spec.Labels[instanceLabel], Hash: c.Spec.Labels[hashLabel], State: reconcile.Ended,
		StartedAt: c.State.StartedAt, EndedAt: c.State.FinishedAt, Message: c.State.Reason, Address: d.nics.address(vm.ID(c.Spec.ID)),
	}
	switch c.State.Phase {
	case container.Running:
		i.State = reconcile.Running
	case container.Created, container.Removing: // an interrupted start or removal
		i.Reason = "NotStarted"
	case container.Exited:
		if code := int32(c.State.ExitCode); code != container.ExitUnknown {
			i.ExitCode = &code
		}
		if c.State.OOMKilled {
			i.Reason, i.Message = "OOMKilled", "it used up its memory"
		}
	}
	return i
}

// Exec implements reconcile.Driver.
func (d *Driver) Exec(ctx context.Context, name string, e guest.Exec, s guest.Streams) (int, error) {
	streams := container.Streams{Stdin: s.Stdin, Stdout: s.Stdout, Stderr: s.Stderr, Signals: s.Signals}
	if s.Resize != nil {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		streams.Resize = sizes(ctx, s.Resize)
	}
	return d.deps.Runtime.Exec(ctx, string(ID(name)), container.Exec{Command: e.Command, Env: e.Env, WorkDir: e.WorkDir, User: e.User, TTY: e.TTY, Rows: e.Rows, Cols: e.Cols}, streams)
}

// sizes passes sizes of a terminal on until ctx ends.
func sizes(ctx context.Context, in <-chan guest.WinSize) <-chan container.WinSize {
	out := make(chan container.WinSize)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case size, ok := <-in:
				if !ok {
					return
				}
				select {
				case out <- container.WinSize{Rows: size.Rows, Cols: size.Cols}:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return out
}

// Logs implements reconcile.Driver.
func (d *Driver) Logs(ctx context.Context, name string, o reconcile.LogOptions, write func([]byte) error) error {
	tail := o.Tail
	if tail == 0 {
		tail = -1
	}
	err := d.deps.Runtime.Logs(ctx, string(ID(name)), container.LogOptions{Follow: o.Follow, Tail: tail}, func(e container.LogEntry) error { return write(e.Data) })
	if errdefs.IsNotFound(err) {
		return nil // it has written nothing yet
	}
	return err
}
