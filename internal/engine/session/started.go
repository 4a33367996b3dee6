package session

import (
	"context"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// StartContainer starts an added container in the session agent, and returns when the record has what became of it. The guest gets
// the container before if it does not have it yet.
// Errors: those of guest.ContainerStarter; Unavailable when the session ends first.
func (l *Link) StartContainer(ctx context.Context, agent guest.Agent, name string) error {
	starter, err := starterOf(agent)
	if err != nil {
		return err
	}
	if err := l.Introduce(ctx, agent, name); err != nil {
		return err
	}
	if err := tooOldToStart(starter.StartContainer(ctx, name)); err != nil {
		return err
	}
	for {
		told := l.noted.next()
		if s := l.statusOf(name); s == nil || !fresh(*s) {
			return nil
		}
		select {
		case <-told:
		case <-agent.Done():
			return errdefs.Unavailablef("the guest was lost before it reported that the container has started")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Introduce makes sure that the guest has got an added container. One that it refuses has ended, and the record says so.
func (l *Link) Introduce(ctx context.Context, agent guest.Agent, name string) error {
	s := l.statusOf(name)
	if s == nil || !fresh(*s) {
		return nil
	}
	err := l.addContainer(ctx, agent, name)
	if err == nil || lost(err) || ctx.Err() != nil {
		return err
	}
	if failed := l.refusedContainer(ctx, name, err); failed != nil {
		return failed
	}
	return errdefs.As(errdefs.FailedPrecondition, err)
}

// RemoveContainer makes the guest remove an added container and forget the disks with these serials. It waits for a guest that is
// being set up.
// Errors: as of guest.ContainerStarter, FailedPrecondition when the guest's process has ended, Unavailable when the guest does not
// answer.
func (l *Link) RemoveContainer(ctx context.Context, name string, disks []string) error {
	agent, err := l.Ready(ctx, l.cfg.AgentTimeout)
	if errdefs.Is(err, errdefs.DeadlineExceeded) {
		return errdefs.Unavailablef("its guest does not answer at the moment")
	}
	if err != nil {
		return err
	}
	starter, err := starterOf(agent)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
	defer cancel()
	return tooOldToStart(starter.RemoveContainer(ctx, name, disks))
}

// ForgetContainer ends the copying of a container's log. The record must not have the container any more.
func (l *Link) ForgetContainer(name string) { l.followers.forget(name) }

func (l *Link) statusOf(name string) *vm.ContainerStatus {
	for _, e := range l.vm.Record().Ephemeral {
		if e.Record.Name == name {
			return &e.Record.Status
		}
	}
	return nil
}

func starterOf(agent guest.Agent) (guest.ContainerStarter, error) {
	s, ok := agent.(guest.ContainerStarter)
	if !ok {
		return nil, tooOldToStart(errdefs.Unsupportedf("the agent in its guest only adds containers"))
	}
	return s, nil
}

func tooOldToStart(err error) error {
	if errdefs.Is(err, errdefs.Unsupported) {
		return errdefs.Unsupportedf("the agent in its guest is older and cannot start or remove containers; restart the VM to update the agent: %w", err)
	}
	return err
}

// resizeAdded tells a guest, at the begin of a session, what its added containers may use: a resize may have been interrupted. What the
// guest refuses stays as it is.
func (l *Link) resizeAdded(ctx context.Context, agent guest.Agent) {
	resizer, ok := agent.(guest.ContainerResizer)
	if !ok {
		return
	}
	for _, e := range l.vm.Record().Ephemeral {
		if e.Spec.Resources == nil || e.Record.Status.State == vm.ContainerTerminated {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
		err := resizer.ResizeContainers(limited, map[string]vm.Resources{e.Record.Name: *e.Spec.Resources})
		cancel()
		if err != nil {
			l.cfg.Log.Debug("added container not resized", "vm", l.proc.ID, "err", err)
		}
	}
}

// news tells whoever waits that something has changed. Its zero value is ready.
type news struct {
	mu   sync.Mutex
	told chan struct{} // closed at the next change; nil while nobody waits
}

// next returns a channel that is closed when something changes from now on.
func (n *news) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.told == nil {
		n.told = make(chan struct{})
	}
	return n.told
}

func (n *news) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.told != nil {
		close(n.told)
		n.told = nil
	}
}

// followers are the goroutines of a session that copy the logs of containers, by name. Its zero value is ready.
type followers struct {
	mu  sync.Mutex
	all map[string]follower
}

type follower struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// begin runs copies for the container called name, unless that was begun before. It ends with ctx, or when it is forgotten.
func (f *followers) begin(ctx context.Context, name string, copies func(context.Context)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, begun := f.all[name]; begun {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	one := follower{cancel, make(chan struct{})}
	if f.all == nil {
		f.all = map[string]follower{}
	}
	f.all[name] = one
	go func() { // whoever forgets it waits for it
		defer close(one.done)
		copies(ctx)
	}()
}

// forget ends what begin has begun, and waits for that.
func (f *followers) forget(name string) {
	f.mu.Lock()
	one, begun := f.all[name]
	delete(f.all, name)
	f.mu.Unlock()
	if begun {
		one.cancel()
		<-one.done
	}
}

// wait waits until all that was begun has ended by itself, and forgets it.
func (f *followers) wait() {
	for _, name := range f.names() {
		f.mu.Lock()
		one, begun := f.all[name]
		f.mu.Unlock()
		if begun {
			<-one.done
		}
		f.forget(name)
	}
}

func (f *followers) names() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.all {
		out = append(out, name)
	}
	return slices.Sorted(slices.Values(out))
}
