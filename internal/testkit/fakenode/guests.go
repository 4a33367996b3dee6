package fakenode

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/vm"
)

// Guest is the state of a guest. All of it is in its memory: it is saved and resumed with the memory.
type Guest struct {
	BootID   string                     `json:"bootID"` // changes with every boot, and only then
	Hostname string                     `json:"hostname"`
	Env      map[string]string          `json:"env"` // of the main process, or of all containers
	Volumes  map[string][]vm.VolumeFile `json:"volumes"`
	SetUp    bool                       `json:"setUp"`
	// Containers are running from the setup on.
	Containers []vm.ContainerStatus `json:"containers"`
	Added      []string             `json:"added"` // names of the containers that were added; they run
}

// guests are the guests of a node. They implement guest.Connector.
type guests struct {
	host *fake.Host

	mu    sync.Mutex
	exits map[vm.ID]chan struct{} // closed when the main process has ended
	names map[string]vm.ID        // of VMs that were dialled
	joins chan struct{}           // closed and replaced when a container is added to any of them
}

func newGuests(host *fake.Host) *guests {
	return &guests{host: host, exits: map[vm.ID]chan struct{}{}, names: map[string]vm.ID{}, joins: make(chan struct{})}
}

// id of the VM of that name; "" when it was never dialled.
func (g *guests) id(name string) vm.ID {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.names[name]
}

func (g *guests) find(name string) *Guest { return g.of(g.id(name)) }

func (g *guests) of(id vm.ID) *Guest {
	if _, runs := g.host.Running()[id]; id == "" || !runs {
		return nil
	}
	x := g.recall(id)
	return &x
}

func (g *guests) recall(id vm.ID) (x Guest) {
	text, _ := g.host.Memory(id)
	_ = json.Unmarshal([]byte(text), &x) // a guest that has just booted has no state
	return x
}

func (g *guests) change(id vm.ID, f func(*Guest)) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	x := g.recall(id)
	f(&x)
	text, err := json.Marshal(x)
	if err != nil {
		return err
	}
	return g.host.Remember(id, string(text))
}

// dial is the guest's end of the channel: it sends its id, and then nothing.
func (g *guests) dial(_ context.Context, p hypervisor.Plan) (net.Conn, error) {
	g.mu.Lock()
	g.names[p.Name] = p.ID
	if g.exits[p.ID] == nil {
		g.exits[p.ID] = make(chan struct{})
	}
	g.mu.Unlock()
	ours, theirs := net.Pipe()
	go func() {
		_, _ = io.WriteString(theirs, string(p.ID)+"\n")
		_, _ = io.Copy(io.Discard, theirs)
		_ = theirs.Close()
	}()
	return ours, nil
}

// Connect implements guest.Connector.
func (g *guests) Connect(ctx context.Context, dial guest.Dial) (guest.Agent, error) {
	c, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		_ = c.Close()
		return nil, errdefs.Unavailablef("the guest hangs up: %w", err)
	}
	s := &session{all: g, id: vm.ID(strings.TrimSpace(line)), conn: c, done: make(chan struct{})}
	go func() { // ends with the connection
		_, _ = io.Copy(io.Discard, r)
		close(s.done)
	}()
	return s, nil
}

// session is one guest.Agent.
type session struct {
	all  *guests
	id   vm.ID
	conn net.Conn
	done chan struct{}
}

var (
	_ guest.Agent           = (*session)(nil)
	_ guest.Resumer         = (*session)(nil)
	_ guest.VolumeKeeper    = (*session)(nil)
	_ guest.ContainerKeeper = (*session)(nil)
	_ guest.ContainerAdder  = (*session)(nil)
)

func (s *session) exit() chan struct{} {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	return s.all.exits[s.id]
}

// Info implements guest.Agent.
func (s *session) Info(context.Context) (guest.Info, error) {
	x := s.all.recall(s.id)
	return guest.Info{Version: "1", BootID: x.BootID, SetUp: x.SetUp, Process: x.SetUp}, nil
}

// Setup implements guest.Agent.
func (s *session) Setup(_ context.Context, setup guest.Setup) error {
	if !s.all.recall(s.id).SetUp { // it has just booted, perhaps again
		s.all.mu.Lock()
		s.all.exits[s.id] = make(chan struct{})
		s.all.mu.Unlock()
	}
	return s.all.change(s.id, func(x *Guest) {
		x.Hostname = setup.Hostname
		if x.SetUp {
			return
		}
		x.BootID, x.SetUp, x.Env = string(vm.NewID()), true, map[string]string{}
		var processes []vm.Process
		if setup.Process != nil {
			processes = append(processes, *setup.Process)
		}
		for _, c := range setup.Containers {
			processes = append(processes, c.Process)
			x.Containers = append(x.Containers, vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now(), Restarts: c.Run - 1})
		}
		for _, p := range processes {
			for _, e := range p.Env {
				x.Env[e.Name] = e.Value
			}
		}
	})
}

// PutVolume implements guest.VolumeKeeper.
func (s *session) PutVolume(_ context.Context, v vm.Volume) error {
	return s.all.change(s.id, func(x *Guest) {
		x.Volumes = maps.Clone(x.Volumes)
		if x.Volumes == nil {
			x.Volumes = map[string][]vm.VolumeFile{}
		}
		x.Volumes[v.Name] = slices.Clone(v.Files)
	})
}

// Resumed implements guest.Resumer.
func (s *session) Resumed(_ context.Context, r guest.Resumed) (guest.ResumedReply, error) {
	return guest.ResumedReply{}, s.all.change(s.id, func(x *Guest) { x.Hostname = r.Hostname })
}

// Exec implements guest.Agent.
func (s *session) Exec(context.Context, guest.Exec, guest.Streams) (int, error) {
	return -1, errdefs.NotFoundf("guests in memory have no commands")
}

// Logs implements guest.Agent.
func (s *session) Logs(ctx context.Context, _ uint64, _ func(guest.LogEntry) error) error {
	_, err := s.Wait(ctx)
	return err
}

// Containers implements guest.ContainerKeeper.
func (s *session) Containers(ctx context.Context, fn func([]guest.ContainerState) error) error {
	var all []guest.ContainerState
	for over := false; !over; {
		s.all.mu.Lock()
		joins := s.all.joins
		s.all.mu.Unlock()
		x := s.all.recall(s.id)
		all = nil
		for _, status := range x.Containers {
			all = append(all, guest.ContainerState{Status: status})
		}
		for _, name := range x.Added {
			all = append(all, guest.ContainerState{Name: name, Status: vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: s.all.host.Started(s.id)}})
		}
		if err := fn(slices.Clone(all)); err != nil {
			return err
		}
		select {
		case <-joins:
		case <-s.exit():
			over = true
		case <-s.done:
			return errdefs.Unavailablef("link lost")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for i := range all {
		c := &all[i].Status
		c.State, c.Reason = vm.ContainerTerminated, vm.ContainerError
		c.Exit = &vm.ContainerExit{Code: exitCode, Reason: vm.ContainerError, StartedAt: c.StartedAt, FinishedAt: time.Now()}
	}
	return fn(all)
}

// exitCode is the exit code of every process of a guest that is told to power off.
const exitCode = 143

// AddContainer implements guest.ContainerAdder.
func (s *session) AddContainer(_ context.Context, c guest.Container) error {
	err := s.all.change(s.id, func(x *Guest) {
		if !slices.Contains(x.Added, c.Name) {
			x.Added = append(slices.Clip(x.Added), c.Name)
		}
	})
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	close(s.all.joins)
	s.all.joins = make(chan struct{})
	return err
}

// ResizeContainers implements guest.ContainerResizer.
func (s *session) ResizeContainers(context.Context, map[string]vm.Resources) error { return nil }

// ContainerLogs implements guest.ContainerKeeper.
func (s *session) ContainerLogs(ctx context.Context, _ string, _ int, _ uint64, _ func(guest.LogEntry) error) error {
	_, err := s.Wait(ctx)
	return err
}

// KillContainer implements guest.ContainerKeeper.
func (s *session) KillContainer(context.Context, string, int, time.Duration) error {
	return errdefs.Unsupportedf("guests in memory do not restart containers")
}

// ReleaseContainer implements guest.ContainerKeeper.
func (s *session) ReleaseContainer(context.Context, string) error { return nil }

// Wait implements guest.Agent.
func (s *session) Wait(ctx context.Context) (guest.Exit, error) {
	select {
	case <-s.exit():
		return guest.Exit{Code: exitCode}, nil
	case <-s.done:
		return guest.Exit{}, errdefs.Unavailablef("link lost")
	case <-ctx.Done():
		return guest.Exit{}, ctx.Err()
	}
}

// AckExit implements guest.Agent.
func (s *session) AckExit(context.Context) error { return s.all.host.End(s.id, fake.PowerOff) }

// Poweroff implements guest.Agent.
func (s *session) Poweroff(context.Context, time.Duration) error {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	exit := s.all.exits[s.id]
	select {
	case <-exit:
	default:
		close(exit)
	}
	return nil
}

// Stats implements guest.Agent.
func (s *session) Stats(context.Context) (guest.Stats, error) { return guest.Stats{Processes: 1}, nil }

// Done implements guest.Agent.
func (s *session) Done() <-chan struct{} { return s.done }

// Close implements guest.Agent.
func (s *session) Close() error { return s.conn.Close() }
