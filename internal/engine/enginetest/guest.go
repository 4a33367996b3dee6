package enginetest

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Guest is a hypervisor process with what runs in it. Tests drive it by its methods and fields.
type Guest struct {
	ACPI     bool // obeys the power button
	Stubborn bool // accepts Poweroff and does nothing

	w     *World
	ended chan struct{}
	exit  hypervisor.Exit

	mu      sync.Mutex
	p       proc
	setup   guest.Setup
	content map[string][]vm.VolumeFile // of volumes
	acked   bool
	quiet   bool          // see Quiet
	busy    bool          // see Busy
	clock   runs          // see Clock
	again   bool          // starts again when it powers off
	resets  int           // see Resets
	changed chan struct{} // closed at any change
	drop    chan struct{} // closed to lose the sessions
}

func newGuest(w *World, p proc) *Guest {
	return &Guest{w: w, p: p, ACPI: true, ended: make(chan struct{}), changed: make(chan struct{}), drop: make(chan struct{})}
}

// End ends the process, unless the guest powers itself off to start again.
func (g *Guest) End(x hypervisor.Exit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.ended:
		return
	default:
	}
	if x.GuestShutdown && g.again {
		g.restart()
		return
	}
	_ = remove(g.w.path("procs", string(g.p.ID)))
	g.exit = x
	close(g.ended)
}

// Print makes the main process write n lines "line <seq>".
func (g *Guest) Print(n int) { g.change(func() { g.p.Lines += n }) }

// Exit ends the main process.
func (g *Guest) Exit(code int) { g.change(func() { g.p.Exit = &code }) }

// Stand sets the status that the guest reports for its containers, in the order of its setup.
func (g *Guest) Stand(all ...vm.ContainerStatus) { g.change(func() { g.p.Stand = all }) }

// PrintIn makes a container write a line in one of its runs.
func (g *Guest) PrintIn(container string, e guest.LogEntry) {
	g.change(func() {
		if g.p.Entries == nil {
			g.p.Entries = map[string][]guest.LogEntry{}
		}
		g.p.Entries[container] = append(g.p.Entries[container], e)
	})
}

// Quiet makes the guest answer nothing, like one whose kernel has died, until it is called with false.
func (g *Guest) Quiet(quiet bool) { g.change(func() { g.quiet = quiet }) }

// runs is how fast the guest's clock is.
type runs struct {
	speed float64 // 1 is right; 0 means that the guest does not tell its uptime
	since time.Time
	sets  int
}

// Clock makes the guest's clock run at the given speed; 1 is right.
func (g *Guest) Clock(speed float64) {
	g.change(func() { g.clock.speed, g.clock.since = speed, time.Now() })
}

// ClockSets is how often the guest's clock was set.
func (g *Guest) ClockSets() (n int) {
	g.change(func() { n = g.clock.sets })
	return n
}

// speaks waits until the guest answers.
func (s *session) speaks(ctx context.Context) error {
	for {
		s.g.mu.Lock()
		quiet, changed := s.g.quiet || s.g.p.Paused, s.g.changed
		s.g.mu.Unlock()
		if !quiet {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
			return errdefs.Unavailablef("link lost")
		}
	}
}

// Drop breaks all sessions.
func (g *Guest) Drop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.drop)
	g.drop = make(chan struct{})
}

// Identity is the setup that the guest got last.
func (g *Guest) Identity() guest.Setup {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.setup
}

// Volume is the content of a volume that the guest got.
func (g *Guest) Volume(name string) []vm.VolumeFile {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.content[name]
}

// Acked reports whether the exit was acknowledged.
func (g *Guest) Acked() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.acked
}

func (g *Guest) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	select {
	case <-g.ended:
	default:
		_ = g.w.save(g.p)
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *Guest) look() (proc, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.p, g.changed
}

// wire is a stream that leads to a guest.
type wire struct {
	net.Conn
	g *Guest
}

// Agents is the world's guest.Connector for the agents at one port.
type Agents struct {
	w    *World
	port string
}

// Agents returns the connector to our own agent.
func (w *World) Agents() Agents { return Agents{w, guest.PortCocoon} }

// DiskAgents returns the connector to the agents that disk guests have.
func (w *World) DiskAgents() Agents { return Agents{w, guest.PortQEMU} }

// Connect implements guest.Connector.
func (a Agents) Connect(ctx context.Context, dial guest.Dial) (guest.Agent, error) {
	if err := a.w.Fault("agent.Connect"); err != nil {
		return nil, err
	}
	c, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	g := c.(wire).g
	if p, _ := g.look(); p.Port != a.port { // no agent answers
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-g.ended:
			return nil, errdefs.Unavailablef("link lost")
		}
	}
	s := &session{g: g, done: make(chan struct{}), closed: make(chan struct{})}
	if err := s.speaks(ctx); err != nil {
		return nil, err
	}
	g.mu.Lock()
	drop := g.drop
	g.mu.Unlock()
	agent := guest.Agent(s)
	if !a.w.Old && (a.w.Told || a.port == guest.PortCocoon) {
		agent = resumer{s}
	} else if a.port == guest.PortQEMU {
		agent = reporter{s}
	}
	go func() { // ends with the session
		select {
		case <-g.ended:
		case <-drop:
		case <-s.closed:
		}
		close(s.done)
	}()
	return agent, nil
}

// session is one guest.Agent.
type session struct {
	g      *Guest
	done   chan struct{}
	closed chan struct{}
	once   sync.Once
}

var (
	_ guest.Agent           = (*session)(nil)
	_ guest.VolumeKeeper    = (*session)(nil)
	_ guest.NetworkReporter = (*session)(nil)
	_ guest.Freezer         = (*session)(nil)
	_ guest.Settler         = (*session)(nil)
	_ guest.ClockReader     = (*session)(nil)
	_ guest.ClockSetter     = (*session)(nil)
)

func (s *session) alive(call string) error {
	select {
	case <-s.done:
		return errdefs.Unavailablef("link lost")
	default:
		return s.g.w.Fault(call)
	}
}

// disk reports whether the guest has no main process.
func (s *session) disk() bool {
	p, _ := s.g.look()
	return p.Port == guest.PortQEMU
}

// Interfaces implements guest.NetworkReporter.
func (s *session) Interfaces(context.Context) ([]guest.Interface, error) {
	var out []guest.Interface
	for _, i := range s.g.w.Reported {
		p, _ := s.g.look()
		i.MAC = p.MAC
		out = append(out, i)
	}
	return out, s.alive("agent.Interfaces")
}

// Info implements guest.Agent.
func (s *session) Info(ctx context.Context) (guest.Info, error) {
	if err := s.speaks(ctx); err != nil {
		return guest.Info{}, err
	}
	info := guest.Info{Version: "1"}
	s.g.change(func() {
		c := s.g.clock
		info.UptimeMS = int64(float64(time.Since(c.since).Milliseconds()) * c.speed)
	})
	return info, s.alive("agent.Info")
}

// ReadClock implements guest.ClockReader.
func (s *session) ReadClock(ctx context.Context) (at time.Time, err error) {
	if err := s.speaks(ctx); err != nil {
		return time.Time{}, err
	}
	s.g.change(func() {
		c := s.g.clock
		if c.speed == 0 {
			err = errdefs.Unsupportedf("the guest does not tell its time")
			return
		}
		at = c.since.Add(time.Duration(float64(time.Since(c.since)) * c.speed))
	})
	if err != nil {
		return at, err
	}
	return at, s.alive("agent.ReadClock")
}

// SetClock implements guest.ClockSetter.
func (s *session) SetClock(context.Context, time.Time) error {
	s.g.change(func() { s.g.clock.sets++ })
	return s.alive("agent.SetClock")
}

// PutVolume implements guest.VolumeKeeper.
func (s *session) PutVolume(_ context.Context, v vm.Volume) error {
	if err := s.alive("agent.PutVolume"); err != nil {
		return err
	}
	s.g.change(func() {
		if s.g.content == nil {
			s.g.content = map[string][]vm.VolumeFile{}
		}
		s.g.content[v.Name] = v.Files
	})
	return nil
}

// Setup implements guest.Agent. The entrypoint "missing" is not found.
func (s *session) Setup(_ context.Context, setup guest.Setup) error {
	if err := s.alive("agent.Setup"); err != nil {
		return err
	}
	if s.disk() {
		return nil
	}
	if err := s.g.connected(setup.NICs); err != nil {
		return err
	}
	if setup.Process != nil && len(setup.Process.Entrypoint) > 0 && setup.Process.Entrypoint[0] == "missing" {
		return errdefs.NotFoundf("start the main process: missing: no such file")
	}
	s.g.change(func() {
		if !s.g.p.SetUp {
			s.g.p.Volumes = volumesOf(setup)
		}
		s.g.setup, s.g.p.SetUp, s.g.p.Hostname = setup, true, setup.Hostname
		s.g.p.Sized = map[string]vm.Resources{}
		for _, c := range setup.Containers {
			if c.Resources != nil {
				s.g.p.Sized[c.Name] = *c.Resources
			}
		}
		if len(s.g.p.Names) == 0 {
			for _, c := range setup.Containers {
				s.g.p.Names = append(s.g.p.Names, c.Name)
			}
		}
		if setup.Sandbox && s.g.p.Stand == nil {
			s.g.p.Stand = []vm.ContainerStatus{}
		}
		if s.g.w.Ready && len(setup.Containers) > 0 {
			s.g.p.Stand = make([]vm.ContainerStatus, len(setup.Containers))
			for i := range s.g.p.Stand {
				s.g.p.Stand[i] = vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now()}
			}
		}
	})
	return nil
}

// Exec implements guest.Agent. The command "echo" writes its argument, "sleep" waits for ctx, others are not found.
func (s *session) Exec(ctx context.Context, e guest.Exec, st guest.Streams) (int, error) {
	if err := s.alive("agent.Exec"); err != nil {
		return -1, err
	}
	switch e.Command[0] {
	case "echo":
		fmt.Fprintln(st.Stdout, e.Command[1])
		return 0, nil
	case "sleep":
		select {
		case <-ctx.Done():
			return -1, ctx.Err()
		case <-s.done:
			return -1, errdefs.Unavailablef("link lost")
		}
	}
	return -1, errdefs.NotFoundf("%s: no such command", e.Command[0])
}

// Attach implements guest.Attacher: it writes the name of the container and copies its input until that ends.
func (s *session) Attach(_ context.Context, a guest.Attach, st guest.Streams) error {
	if err := s.alive("agent.Attach"); err != nil {
		return err
	}
	fmt.Fprintf(st.Stdout, "%s:", a.Container)
	_, err := io.Copy(st.Stdout, st.Stdin)
	return err
}

// Forward implements guest.Forwarder: port 80 echoes, on others nobody listens.
func (s *session) Forward(_ context.Context, port int, st guest.Streams) error {
	if err := s.alive("agent.Forward"); err != nil {
		return err
	}
	if port != 80 {
		return errdefs.Unavailablef("nobody listens on port %d", port)
	}
	_, err := io.Copy(st.Stdout, st.Stdin)
	return err
}

// Logs implements guest.Agent.
func (s *session) Logs(ctx context.Context, after uint64, fn func(guest.LogEntry) error) error {
	for {
		if err := s.alive("agent.Logs"); err != nil {
			return err
		}
		p, changed := s.g.look()
		for ; after < uint64(p.Lines); after++ {
			e := guest.LogEntry{Seq: after + 1, Time: time.Unix(int64(after), 0), Stream: "stdout", Data: fmt.Appendf(nil, "line %d\n", after+1)}
			if err := fn(e); err != nil {
				return err
			}
		}
		if p.Exit != nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
		}
	}
}

// Stats implements guest.Agent.
func (s *session) Stats(context.Context) (guest.Stats, error) {
	return guest.Stats{Processes: 1}, s.alive("agent.Stats")
}

// Done implements guest.Agent.
func (s *session) Done() <-chan struct{} { return s.done }

// Close implements guest.Agent.
func (s *session) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}
