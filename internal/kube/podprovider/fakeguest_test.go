package podprovider

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func (e *engine) ReleaseContainer(ctx context.Context, ref, container string) error {
	leave, err := e.enter("release " + container)
	if err != nil {
		return err
	}
	r := e.findFor(ctx, ref)
	known := r != nil && r.Container(container) != nil
	leave()
	switch {
	case !known:
		return errdefs.NotFoundf("no container %s of %s", container, ref)
	case e.older:
		return errdefs.Unsupportedf("not known")
	}
	e.change(r.ID, begin)
	return nil
}

// withContainers returns a copy of the record of a VM whose containers can be changed. Precondition: mu is held.
func (e *engine) withContainers(ctx context.Context, ref string) (vm.Record, error) {
	r := e.findFor(ctx, ref)
	switch {
	case r == nil:
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	case e.older, len(r.Containers) == 0:
		return vm.Record{}, errdefs.Unsupportedf("not known")
	}
	return *r, nil
}

// AddContainer adds a container, which runs immediately.
func (e *engine) AddContainer(ctx context.Context, ref string, c vm.Container) (vm.Record, error) {
	leave, err := e.enter("add " + c.Name)
	if err != nil {
		return vm.Record{}, err
	}
	r, err := e.withContainers(ctx, ref)
	leave()
	if err != nil {
		return vm.Record{}, err
	}
	if err := c.ValidateEphemeral(); err != nil {
		return vm.Record{}, err
	}
	e.change(r.ID, func(r *vm.Record) {
		if r.Ephemeral == nil || r.Container(c.Name).Name != c.Name {
			added := vm.ContainerRecord{Name: c.Name, ImageDigest: "sha256:debug", Process: c.Process}
			added.Status = vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now()}
			r.Ephemeral = append(slices.Clip(r.Ephemeral), vm.Ephemeral{Spec: c, Record: added})
		}
	})
	return e.Inspect(ctx, ref)
}

// StartContainer finds no container that waits for it: none of a pod does.
func (e *engine) StartContainer(_ context.Context, ref, container string) (vm.Record, error) {
	return vm.Record{}, errdefs.NotFoundf("no container %s of %s", container, ref)
}

// RemoveContainer removes nothing: pods keep their containers.
func (e *engine) RemoveContainer(ctx context.Context, ref, _ string) error {
	_, err := e.Inspect(ctx, ref)
	return err
}

// ResizeContainers changes the containers on record. A memory limit below what e.used says is refused.
func (e *engine) ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	leave, err := e.enter(fmt.Sprint("resize ", want))
	if err != nil {
		return vm.Record{}, err
	}
	r, err := e.withContainers(ctx, ref)
	used := e.used
	leave()
	if err != nil {
		return vm.Record{}, err
	}
	next, err := r.Spec.Resized(want)
	if err != nil {
		return vm.Record{}, err
	}
	for name, w := range want {
		if w.MemoryLimit > 0 && w.MemoryLimit < used {
			return vm.Record{}, errdefs.Preconditionf("container %s: memory limit (%d) below current usage (%d)", name, w.MemoryLimit, used)
		}
	}
	e.change(r.ID, func(r *vm.Record) { r.Spec = next })
	return e.Inspect(ctx, ref)
}

// KillContainer ends a run immediately and starts the next one.
func (e *engine) KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error {
	leave, err := e.enter(fmt.Sprintf("kill %s/%d %s", container, run, grace))
	if err != nil {
		return err
	}
	r := e.findFor(ctx, ref)
	known := r != nil && r.Container(container) != nil
	leave()
	switch {
	case r == nil:
		return errdefs.NotFoundf("no VM %s", ref)
	case !known:
		return errdefs.NotFoundf("no container %s", container)
	case e.older:
		return errdefs.Unsupportedf("not known")
	}
	e.rerun(container, 143)
	return nil
}

func (e *engine) Exec(ctx context.Context, ref string, x guest.Exec, s guest.Streams) (int, error) {
	command := strings.Join(x.Command, " ")
	e.mu.Lock()
	e.calls = append(e.calls, "exec "+command)
	as, r := e.execAs, e.findFor(ctx, ref)
	e.mu.Unlock()
	if r == nil {
		return 0, errdefs.NotFoundf("no VM %s", ref)
	}
	if as != nil {
		_, _ = s.Stdout.Write([]byte("said by " + command + "\n"))
		return as(ctx, command)
	}
	_, err := s.Stdout.Write([]byte("hi\n"))
	return 7, err
}

func (e *engine) Attach(_ context.Context, _ string, a guest.Attach, s guest.Streams) error {
	_, err := s.Stdout.Write([]byte("attached " + a.Container))
	return err
}

func (e *engine) Console(context.Context, string) (io.ReadWriteCloser, error) {
	if e.consoleAs == nil {
		return nil, errdefs.Conflictf("the console is already open")
	}
	return e.consoleAs(), nil
}

func (e *engine) Display(ctx context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	e.mu.Lock()
	r := e.findFor(ctx, ref)
	e.mu.Unlock()
	switch {
	case r == nil:
		return nil, errdefs.NotFoundf("no VM %s", ref)
	case keep:
		return nil, errdefs.Conflictf("somebody is connected")
	}
	return e.consoleAs(), nil
}

func (e *engine) Screenshot(ctx context.Context, ref string, wake bool) ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.findFor(ctx, ref) == nil {
		return nil, errdefs.NotFoundf("no VM %s", ref)
	}
	return fmt.Append(nil, "woken: ", wake), nil
}

func (e *engine) Forward(_ context.Context, _ string, port int, s guest.Streams) error {
	if e.older {
		return errdefs.Unsupportedf("not known")
	}
	if port != 80 {
		return errdefs.Unavailablef("no listener on port %d", port)
	}
	_, err := io.Copy(s.Stdout, s.Stdin)
	return err
}

func (e *engine) Stats(context.Context, string) (guest.Stats, error) { return guest.Stats{}, nil }

func (e *engine) Logs(_ context.Context, _ string, _ guest.LogOptions, fn func(guest.LogEntry) error) error {
	return fn(guest.LogEntry{Seq: 1, Stream: "stdout", Data: []byte("line\n")})
}

func (e *engine) UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	leave, err := e.enter("update " + volume)
	if err != nil {
		return err
	}
	defer leave()
	r := e.findFor(ctx, ref)
	if r == nil {
		return errdefs.NotFoundf("no VM %s", ref)
	}
	for i := range r.Spec.Volumes {
		if r.Spec.Volumes[i].Name == volume {
			r.Spec.Volumes[i].Files = files
		}
	}
	return nil
}

// volume returns the first file of a volume of the test's VM.
func (e *engine) volume(name string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, v := range e.web().Spec.Volumes {
		if v.Name == name && len(v.Files) > 0 {
			return string(v.Files[0].Data)
		}
	}
	return ""
}

func (e *engine) Freeze(ctx context.Context, ref string, _ time.Duration) error {
	_, err := e.Describe(ctx, ref)
	return err
}

func (e *engine) Thaw(ctx context.Context, ref string) (bool, error) {
	_, err := e.Describe(ctx, ref)
	return err == nil, err
}

func (e *engine) Describe(ctx context.Context, ref string) (guest.Description, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.findFor(ctx, ref)
	if r == nil {
		return guest.Description{}, errdefs.NotFoundf("no VM %s", ref)
	}
	return guest.Description{Hostname: r.Spec.Hostname}, nil
}
