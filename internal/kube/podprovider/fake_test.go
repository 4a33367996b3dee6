package podprovider

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// engine is a Runtime in memory. Guests come up after boot. The test decides what they do then.
type engine struct {
	boot      time.Duration
	launchAt  func(vm.Spec) error // nil: always succeeds
	stopTime  time.Duration       // how long a guest takes to shut down
	used      int64               // what each container uses of memory, in bytes
	older     bool                // the agents can neither connect to ports nor kill a single container
	inside    bool                // the only container of a pod is a container in its guest; otherwise as in VMs of earlier releases
	pullAs    func(context.Context, image.PullRequest, func(image.Progress)) (image.Image, error)
	execAs    func(ctx context.Context, command string) (int, error) // nil: the command writes hi and exits with 7
	consoleAs func() io.ReadWriteCloser                              // nil: somebody else uses the console
	startAs   func() error                                           // nil: always succeeds
	pauseAs   error                                                  // of Pause and Unpause
	rebootAs  error                                                  // of Reboot
	plugAs    error                                                  // of AttachVolume and DetachVolume
	plugged   func()                                                 // called after AttachVolume; nil: nothing
	down      error                                                  // every call fails with it
	removed   func(vm.Record)                                        // called with mu held; nil: nothing

	mu       sync.Mutex
	revision int64
	recs     map[vm.ID]*vm.Record
	history  []vm.Event
	changed  chan struct{}
	calls    []string
	nextIP   int
}

var _ Runtime = (*engine)(nil)

func newEngine() *engine {
	return &engine{recs: map[vm.ID]*vm.Record{}, changed: make(chan struct{})}
}

// note records an event. Precondition: mu is held.
func (e *engine) note(kind vm.EventType, r *vm.Record) {
	e.revision++
	r.Revision = e.revision
	e.history = append(e.history, vm.Event{Type: kind, Revision: e.revision, Record: *r})
	close(e.changed)
	e.changed = make(chan struct{})
}

// web returns the VM of pod default/web, which most tests use, or nil.
func (e *engine) web() *vm.Record {
	for _, r := range e.recs {
		if r.Spec.Name == vmName {
			return r
		}
	}
	return nil
}

// findFor returns the VM of ref for the owner in ctx. Like the engine, it finds no VM of another owner.
func (e *engine) findFor(ctx context.Context, ref string) *vm.Record {
	for _, r := range e.recs {
		if (string(r.ID) == ref || r.Spec.Name == ref) && visible(ctx, r) {
			return r
		}
	}
	return nil
}

func visible(ctx context.Context, r *vm.Record) bool { return named(r).VisibleTo(vm.Behalf(ctx)) }

func named(r *vm.Record) vm.Named {
	return vm.Named{ID: r.ID, Name: r.Spec.Name, Owner: r.Owner, Shared: r.Spec.Offered}
}

// taken reports whether o has a VM of that name.
func (e *engine) taken(o vm.Owner, name string) bool {
	for _, r := range e.recs {
		if r.Spec.Name == name && r.Owner.Namespace == o.Namespace {
			return true
		}
	}
	return false
}

// ownerFor returns the owner of a VM that is created with ctx. A VM of a release without owners has the owner in its labels.
func ownerFor(ctx context.Context, labels map[string]string) vm.Owner {
	if o := vm.Behalf(ctx); !o.Operator() {
		return o
	}
	return vm.Owner{Namespace: labels[contract.VMLabelPodNamespace], PodUID: labels[contract.VMLabelPodUID]}
}

func (e *engine) enter(call string) (func(), error) {
	e.mu.Lock()
	e.calls = append(e.calls, call)
	if e.down != nil {
		defer e.mu.Unlock()
		return nil, e.down
	}
	return e.mu.Unlock, nil
}

func (e *engine) Launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	leave, err := e.enter("launch " + spec.Name)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	if err := spec.Validate(); err != nil {
		return vm.Record{}, err
	}
	if e.launchAt != nil {
		if err := e.launchAt(spec); err != nil {
			return vm.Record{}, err
		}
	}
	if !e.inside {
		spec = spec.Bootable()
	}
	owner := ownerFor(ctx, spec.Labels)
	if e.taken(owner, spec.Name) {
		return vm.Record{}, errdefs.Existsf("VM name %s is taken", spec.Name)
	}
	e.nextIP++
	r := &vm.Record{
		ID: vm.NewID(), Owner: owner, Spec: spec, State: vm.StateRunning, Driver: "fake", ImageType: vm.ImageOCI, ImageDigest: "sha256:abc",
		StartedAt: time.Now(), CreatedAt: time.Now(), Paused: startsPaused(spec),
		NICs: []vm.NIC{{MAC: fmt.Sprintf("02:00:00:00:00:%02x", e.nextIP), IP: fmt.Sprintf("10.0.0.%d", e.nextIP), IPv6: fmt.Sprintf("fd00::%x", e.nextIP)}},
	}
	for i := 1; i < len(spec.NICs); i++ {
		r.NICs = append(r.NICs, vm.NIC{Network: spec.NICs[i].Network, MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", i, e.nextIP), LinkDown: spec.NICs[i].LinkDown})
	}
	for _, c := range spec.Containers {
		r.Containers = append(r.Containers, vm.ContainerRecord{Name: c.Name, ImageDigest: "sha256:abc", Root: c.Root})
	}
	e.recs[r.ID] = r
	e.note(vm.EventAdded, r)
	e.bootSoon(r)
	return *r, nil
}

func startsPaused(spec vm.Spec) vm.Paused {
	if spec.Paused {
		return vm.PausedAtStart
	}
	return ""
}

// bootSoon makes the agent answer after the boot time. Precondition: mu is held.
func (e *engine) bootSoon(r *vm.Record) {
	id, run := r.ID, r.StartedAt
	time.AfterFunc(e.boot, func() {
		e.change(id, func(r *vm.Record) {
			if r.State == vm.StateRunning && r.StartedAt.Equal(run) {
				r.AgentReady = true
				begin(r)
			}
		})
	})
}

// begin starts the containers of r's guest that do not run yet, up to the next container that holds the others. Init
// containers end immediately.
func begin(r *vm.Record) {
	r.Containers = slices.Clone(r.Containers)
	held := false
	for i, c := range r.Spec.Containers {
		s := &r.Containers[i].Status
		switch {
		case s.State != "" && s.State != vm.ContainerWaiting:
		case held:
			s.State, s.Reason = vm.ContainerWaiting, vm.ContainerInitGoing
		case c.Kind == vm.ContainerInit:
			s.State, s.StartedAt, s.Exit = vm.ContainerTerminated, time.Now(), &vm.ContainerExit{Reason: vm.ContainerCompleted}
		default:
			s.State, s.StartedAt, held = vm.ContainerRunning, time.Now(), c.Hold
		}
	}
}

// rerun ends a run of a container of the test's VM with code, and starts the next one.
func (e *engine) rerun(name string, code int) {
	e.mu.Lock()
	id := e.web().ID
	e.mu.Unlock()
	e.change(id, func(r *vm.Record) {
		r.Containers = slices.Clone(r.Containers)
		s := &r.Container(name).Status
		s.Last = &vm.ContainerExit{Code: code, Reason: vm.ContainerError, StartedAt: s.StartedAt, FinishedAt: time.Now()}
		s.StartedAt = time.Now()
		s.Restarts++
	})
}

func (e *engine) change(id vm.ID, f func(*vm.Record)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.recs[id]; r != nil {
		f(r)
		e.note(vm.EventModified, r)
	}
}

// exit ends the main process of the test's VM.
func (e *engine) exit(code int) {
	e.mu.Lock()
	r := e.web()
	e.mu.Unlock()
	e.change(r.ID, func(r *vm.Record) {
		r.State, r.AgentReady, r.ExitCode, r.Reason, r.StoppedAt = vm.StateStopped, false, &code, vm.ReasonExited, time.Now()
		r.Containers = slices.Clone(r.Containers)
		for i := range r.Containers {
			s := &r.Containers[i].Status
			s.State, s.Reason = vm.ContainerTerminated, vm.ContainerError
			s.Exit = &vm.ContainerExit{Code: code, Reason: vm.ContainerError, StartedAt: s.StartedAt, FinishedAt: time.Now()}
		}
	})
}

func (e *engine) vanish() {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.web()
	delete(e.recs, r.ID)
	e.note(vm.EventDeleted, r)
}

func (e *engine) Start(ctx context.Context, ref string) (vm.Record, error) {
	leave, err := e.enter("start")
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	if e.startAs != nil {
		if err := e.startAs(); err != nil {
			return vm.Record{}, err
		}
	}
	r := e.findFor(ctx, ref)
	if r == nil {
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	}
	r.State, r.StartedAt, r.ExitCode, r.AgentReady = vm.StateRunning, time.Now(), nil, false
	r.Restarts++
	r.Containers = slices.Clone(r.Containers)
	for i, c := range r.Containers {
		r.Containers[i].Status = vm.ContainerStatus{Restarts: c.Status.Restarts + 1}
	}
	e.note(vm.EventModified, r)
	e.bootSoon(r)
	return *r, nil
}

func (e *engine) Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	leave, err := e.enter(fmt.Sprintf("stop %s", grace))
	if err != nil {
		return vm.Record{}, err
	}
	r := e.findFor(ctx, ref)
	leave()
	if r == nil {
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	}
	reason, code, took := vm.ReasonStopped, 0, e.stopTime
	if grace >= 0 && took > grace {
		reason, code, took = vm.ReasonKilled, 137, grace
	}
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return vm.Record{}, ctx.Err()
	}
	e.change(r.ID, func(r *vm.Record) {
		r.State, r.AgentReady, r.ExitCode, r.Reason, r.StoppedAt = vm.StateStopped, false, &code, reason, time.Now()
	})
	return e.Inspect(ctx, ref)
}

func (e *engine) Pause(ctx context.Context, ref string) (vm.Record, error) {
	return e.setPaused(ctx, "pause", ref, vm.PausedOnRequest)
}

func (e *engine) Unpause(ctx context.Context, ref string) (vm.Record, error) {
	return e.setPaused(ctx, "unpause", ref, "")
}

func (e *engine) Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error) {
	leave, err := e.enter(fmt.Sprint("reboot ", hard))
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	r := e.findFor(ctx, ref)
	if r == nil {
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	}
	return *r, e.rebootAs
}

func (e *engine) setPaused(ctx context.Context, call, ref string, paused vm.Paused) (vm.Record, error) {
	leave, err := e.enter(call)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	r := e.findFor(ctx, ref)
	if r == nil {
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	}
	if e.pauseAs != nil {
		return vm.Record{}, e.pauseAs
	}
	r.Paused = paused
	e.note(vm.EventModified, r)
	return *r, nil
}

func (e *engine) Remove(ctx context.Context, ref string, _ bool) error {
	leave, err := e.enter("remove")
	if err != nil {
		return err
	}
	defer leave()
	r := e.findFor(ctx, ref)
	if r == nil {
		return errdefs.NotFoundf("no VM %s", ref)
	}
	delete(e.recs, r.ID)
	if e.removed != nil {
		e.removed(*r)
	}
	e.note(vm.EventDeleted, r)
	return nil
}

func (e *engine) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	leave, err := e.enter("inspect")
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	id, err := vm.VMs.Match(vm.Behalf(ctx), ref, func(yield func(vm.Named) bool) {
		for _, r := range e.recs {
			if !yield(named(r)) {
				return
			}
		}
	})
	if err != nil {
		return vm.Record{}, err
	}
	return *e.recs[id], nil
}

func (e *engine) List(ctx context.Context) ([]vm.Record, error) {
	leave, err := e.enter("list")
	if err != nil {
		return nil, err
	}
	defer leave()
	var out []vm.Record
	for _, id := range slices.Sorted(maps.Keys(e.recs)) {
		if visible(ctx, e.recs[id]) {
			out = append(out, *e.recs[id])
		}
	}
	return out, nil
}

func (e *engine) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	for {
		e.mu.Lock()
		if e.down != nil {
			defer e.mu.Unlock()
			return e.down
		}
		var todo []vm.Event
		for _, ev := range e.history {
			if ev.Revision > after {
				todo = append(todo, ev)
			}
		}
		changed := e.changed
		e.mu.Unlock()
		for _, ev := range todo {
			if err := fn(ev); err != nil {
				return err
			}
			after = ev.Revision
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fall makes every call fail with err (nil: calls succeed again) and ends the event streams.
func (e *engine) fall(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down = err
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *engine) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.recs)
}

func (e *engine) called(call string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.calls {
		if c == call {
			n++
		}
	}
	return n
}

// Pull returns every image as an imported one, unless the test sets another result.
func (e *engine) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	e.mu.Lock()
	e.calls = append(e.calls, "pull "+string(r.Policy))
	pull := e.pullAs
	e.mu.Unlock()
	if pull != nil {
		return pull(ctx, r, progress)
	}
	if r.Policy == image.PullAlways {
		return image.Image{}, errdefs.Existsf("%s was imported", r.Name)
	}
	return image.Image{Name: r.Name, ID: "sha256:abc"}, nil
}
