// Package session keeps the conversation with the agent in the guest of one running VM: it connects, gives the guest
// its identity and volumes, follows its logs, containers and addresses, and records what the guest reports.
//
// It does not start, stop or save VMs. What it learns goes to the VM's record through the VM interface.
package session

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/engine/proclog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// setupFailed is the exit code of a main process that could not be started, as in shells.
const setupFailed = 127

// VM is the VM that the guest belongs to.
type VM interface {
	// Record returns the VM's record, whose slices and maps are shared.
	Record() vm.Record
	// Update changes the record in the journal and in memory. change replaces slices and maps.
	Update(ctx context.Context, change func(*vm.Record)) (vm.Record, error)
	// Durable returns when the record survives a power cut.
	Durable(ctx context.Context) error
	// VolumeFiles returns the content of a file volume.
	VolumeFiles(name string) ([]vm.VolumeFile, error)
	// Share shows the guest of a sandbox the folders of its containers, and gives it the device. Idempotent.
	// Errors: Unsupported if the guest has had them since it booted.
	Share(ctx context.Context) error
}

// Config is how patient a session is, and where it logs. All durations are positive.
type Config struct {
	AgentTimeout    time.Duration // how long a guest may take to be set up
	PoweroffTimeout time.Duration // from the acknowledged exit of the main process until the VM is killed
	Silence         time.Duration // how long a guest with our agent may not answer before calls into it end
	DrainTimeout    time.Duration // how long to wait for the last output of an ended guest
	ReconnectMin    time.Duration // first pause after the agent is lost, doubled up to ReconnectMax
	ReconnectMax    time.Duration
	SilentMax       time.Duration // ReconnectMax for a disk guest, whose image may have no agent at all
	Log             *slog.Logger
}

// Link is the connection to the agent of one running guest. A guest without agent has a Link that is never connected.
type Link struct {
	Identity Turn // held while a resumed guest gets its identity, and while a save reads it
	volumes  Turn // held while volumes are sent to the guest
	folder   Turn // held while the guest does without the folder that it shares with the node
	freeze   freeze

	cfg   Config
	vm    VM
	proc  *process.Process
	logs  *proclog.Set
	agent guest.Connector // nil: the guest has no agent
	dial  guest.Dial
	kind  vm.ImageType // of the guest: decides which agent it may have

	done  chan struct{} // closed when the conversation is over
	quit  chan struct{} // closed to end it
	state state

	noted     news      // the record has what the guest reports of its containers
	followers followers // of the logs of containers
}

// New returns the link to the guest of proc. agent is nil for a guest without agent; dial is not used then. Run starts
// the conversation.
func New(cfg Config, m VM, proc *process.Process, logs *proclog.Set, agent guest.Connector, dial guest.Dial) *Link {
	return &Link{
		cfg: cfg, vm: m, proc: proc, logs: logs, agent: agent, dial: dial, kind: m.Record().ImageType,
		Identity: newTurn(), volumes: newTurn(), folder: newTurn(), freeze: freeze{turn: newTurn()}, done: make(chan struct{}), quit: make(chan struct{}),
		state: state{changed: make(chan struct{})},
	}
}

// HasAgent reports whether the guest may have an agent.
func (l *Link) HasAgent() bool { return l.agent != nil }

// OurAgent reports whether the guest has Cocoon's own agent.
func (l *Link) OurAgent() bool { return l.agent != nil && l.kind == vm.ImageOCI }

// Peek returns the session, nil if there is none, whether its guest is set up, and a channel that closes when either
// changes.
func (l *Link) Peek() (agent guest.Agent, ready bool, changed <-chan struct{}) { return l.state.peek() }

// Ready waits until the guest is set up, and returns its session.
// Errors: FailedPrecondition when the guest's process has ended, DeadlineExceeded after limit, and ctx's.
func (l *Link) Ready(ctx context.Context, limit time.Duration) (guest.Agent, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		agent, ready, changed := l.state.peek()
		if ready {
			return agent, nil
		}
		select {
		case <-changed:
		case <-l.proc.Ended():
			return nil, errdefs.Preconditionf("its process ended before its guest answered")
		case <-timer.C:
			return nil, errdefs.New(errdefs.DeadlineExceeded, "its guest has not answered for %s", limit)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Unheard reports whether agent's session was closed because the guest had stopped answering; for nil, whether the
// last session was.
func (l *Link) Unheard(agent guest.Agent) bool { return l.state.unheard(agent) }

// Drain waits until the conversation is over. An open session gets some time to deliver the guest's last output.
// It may be called once. Preconditions: the process has ended, and Run was called if the guest has an agent.
func (l *Link) Drain() {
	if !l.HasAgent() {
		return
	}
	if agent, _, _ := l.Peek(); agent != nil {
		process.Pause(l.cfg.DrainTimeout, l.done, nil)
	}
	close(l.quit)
	<-l.done
}

// Run keeps a session with the guest's agent while its process runs. It sets the guest up, keeps its log and records
// the exit of its main process. It ends with the process, with ctx or by Drain.
func (l *Link) Run(ctx context.Context) {
	defer close(l.done)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-l.quit:
			cancel()
		case <-ctx.Done():
		}
	}()
	most := l.cfg.ReconnectMax
	if l.kind != vm.ImageOCI {
		most = l.cfg.SilentMax
	}
	wait := l.pauses(most)
	for ctx.Err() == nil && !l.proc.Over() {
		served, err := l.serve(ctx)
		if err == nil {
			return
		}
		if served {
			wait.Reset()
		}
		l.cfg.Log.Debug("agent not reached", "vm", l.proc.ID, "err", err)
		process.Pause(wait.NextBackOff(), ctx.Done(), l.proc.Ended())
	}
}

// pauses are those between attempts to reach the guest: they grow up to most.
func (l *Link) pauses(most time.Duration) *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: l.cfg.ReconnectMin, RandomizationFactor: jitter, Multiplier: 2, MaxInterval: most}
}

// jitter is the part of a pause by which it may be longer or shorter.
const jitter = 0.2

// serve is one conversation. It returns nil when nothing is left to do, and whether the guest was set up.
func (l *Link) serve(ctx context.Context) (served bool, err error) {
	began := time.Now()
	silent := time.AfterFunc(l.cfg.AgentTimeout, func() {
		if l.OurAgent() { // other guests may have none
			l.cfg.Log.Warn("guest does not answer; its serial console may say why", "vm", l.proc.ID, "dur", l.cfg.AgentTimeout)
		}
	})
	agent, err := l.agent.Connect(ctx, l.dial)
	silent.Stop()
	if err != nil {
		return false, err
	}
	l.cfg.Log.Debug("agent reached", "vm", l.proc.ID, "dur", time.Since(began))
	defer func() { err = errors.Join(err, agent.Close()) }()
	l.state.set(agent, false)
	defer l.state.set(nil, false)
	l.thawLeft(ctx, agent)
	setUp := l.setUp
	if l.vm.Record().Resume != nil {
		setUp = l.setUpResumed
	}
	if err := setUp(ctx, agent); err != nil {
		if lost(err) {
			return false, err
		}
		return false, l.refused(ctx, err)
	}
	l.state.set(agent, true)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pumped := make(chan struct{})
	go func() {
		defer close(pumped)
		l.learnAddresses(ctx, agent)
		if r := l.vm.Record(); (r.Spec.Sandbox || len(r.Containers) > 0) && l.OurAgent() {
			l.followContainers(ctx, agent)
			return
		}
		l.pump(ctx, agent, "log of vm not stored, trying again", func() error { return agent.Logs(ctx, l.logs.Main.Last(), l.logs.Main.Append) })
	}()
	heeded := make(chan struct{})
	go func() {
		defer close(heeded)
		l.checkAlive(ctx, agent)
	}()
	defer func() { cancel(); <-pumped; <-heeded }()

	exit, err := agent.Wait(ctx)
	if err != nil {
		if l.proc.Over() { // the last lines may still arrive
			process.Pause(l.cfg.DrainTimeout, pumped, agent.Done())
		}
		return true, err
	}
	return true, l.exited(ctx, agent, exit, pumped)
}

// setUp gives the guest its volumes and its identity and records that it answers.
func (l *Link) setUp(ctx context.Context, agent guest.Agent) error {
	limited, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
	defer cancel()
	if err := l.introduce(limited, agent); err != nil {
		return l.waits(ctx, err)
	}
	was := l.vm.Record()
	if was.AgentReady { // an earlier engine may have been killed while it saved the guest
		if err := l.rejoinLater(limited, agent); err != nil {
			return err
		}
	}
	if was.AgentReady && was.Reason != vm.ReasonFailedMount {
		return nil
	}
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		r.AgentReady = r.State == vm.StateRunning
		if r.Reason == vm.ReasonFailedMount {
			r.Reason, r.Message = "", ""
		}
	})
	return errdefs.As(errdefs.Unavailable, err) // the journal may accept it the next time
}

// introduce sets up a guest that booted, or whose agent does not support being resumed. A disk guest gets its volumes
// from its seed.
func (l *Link) introduce(ctx context.Context, agent guest.Agent) error {
	if l.kind == vm.ImageOCI {
		if err := l.pushVolumes(ctx, agent); err != nil {
			return err
		}
	}
	return agent.Setup(ctx, setupOf(l.vm.Record()))
}

// lost reports whether err comes from the link and not from the request.
func lost(err error) bool {
	c := errdefs.ClassOf(err)
	return c == errdefs.Unavailable || c == errdefs.Canceled || c == errdefs.DeadlineExceeded
}

// refused ends a VM whose main process cannot be started.
func (l *Link) refused(ctx context.Context, cause error) error {
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		code := setupFailed
		r.ExitCode, r.Reason, r.Message = &code, vm.ReasonStartFailed, cause.Error()
	})
	if err != nil {
		return err
	}
	l.cfg.Log.Warn("guest of vm not set up", "vm", l.proc.ID, "err", cause)
	return l.proc.Inst.Kill(ctx)
}

// exited records how the main process ended, and only then lets the guest power off: the exit code is never lost.
func (l *Link) exited(ctx context.Context, agent guest.Agent, exit guest.Exit, pumped <-chan struct{}) error {
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		code := exit.Code
		r.ExitCode = &code
		if !l.proc.Asked.Load() && (r.Reason == "" || vm.Passing(r.Reason)) {
			r.Reason, r.Message = vm.ReasonExited, ""
		}
	})
	if err != nil {
		return err
	}
	if err := l.vm.Durable(ctx); err != nil {
		return err
	}
	process.Pause(l.cfg.DrainTimeout, pumped, l.proc.Ended())
	err = agent.AckExit(ctx)
	if err != nil && !l.proc.Over() {
		return err
	}
	process.Pause(l.cfg.PoweroffTimeout, l.proc.Ended(), ctx.Done())
	if l.proc.Over() {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	l.cfg.Log.Warn("vm did not power off and is killed", "vm", l.proc.ID)
	return l.proc.Inst.Kill(ctx)
}

// pump copies what the guest reports to the host, from the end of the host's copy on, until it is complete or the
// session ends.
func (l *Link) pump(ctx context.Context, agent guest.Agent, complaint string, copied func() error) {
	wait := l.pauses(l.cfg.ReconnectMax)
	for {
		err := copied()
		if err == nil || ctx.Err() != nil {
			return
		}
		select {
		case <-agent.Done():
			return
		default:
		}
		l.cfg.Log.Warn(complaint, "vm", l.proc.ID, "err", err) //nolint:sloglint // one of two constants
		process.Pause(wait.NextBackOff(), ctx.Done(), agent.Done())
	}
}

// state is the session that a link has now.
type state struct {
	mu      sync.Mutex
	agent   guest.Agent // nil while there is no session
	ready   bool        // the guest is set up
	silent  guest.Agent // the session that was closed because its guest stopped answering; nil once it answers
	changed chan struct{}
}

func (s *state) peek() (agent guest.Agent, ready bool, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.agent, s.ready, s.changed
}

func (s *state) set(agent guest.Agent, ready bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agent, s.ready = agent, ready
	if ready {
		s.silent = nil
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// silence records that the guest of agent's session has stopped answering.
func (s *state) silence(agent guest.Agent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = agent
}

func (s *state) unheard(agent guest.Agent) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.silent != nil && (agent == nil || s.silent == agent)
}

// Turn admits one holder at a time. A caller waits no longer than its context.
type Turn chan struct{}

func newTurn() Turn { return make(Turn, 1) }

// Take waits for the turn. leave must be called; a second call does nothing.
func (t Turn) Take(ctx context.Context) (leave func(), err error) {
	select {
	case t <- struct{}{}:
		return sync.OnceFunc(func() { <-t }), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// misses is how many answers in a row a guest must miss to count as silent: one may be late because the daemon was
// stopped.
const misses = 2

// checkAlive asks the guest periodically whether it answers, and closes its session if it does not: all calls in it
// end, and the next session begins when the guest answers again. The stream itself does not end when a kernel dies.
// The answers show whether the guest's clock is right.
//
// It is not a gRPC keep-alive, for two reasons: a guest with an older agent ends a session that is probed so often,
// and a guest that is being saved is paused for as long as that takes. Other agents check their sessions themselves; only their
// clocks are read.
func (l *Link) checkAlive(ctx context.Context, agent guest.Agent) {
	if !l.OurAgent() {
		l.followClock(ctx, agent)
		return
	}
	patience := l.cfg.Silence / misses
	var c clock
	for missed := 0; missed < misses; {
		if missed == 0 {
			process.Pause(patience, ctx.Done(), agent.Done())
		}
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, patience)
		info, err := agent.Info(limited)
		cancel()
		switch {
		case ctx.Err() != nil, errdefs.IsUnavailable(err):
			return
		case err == nil:
			missed = 0
			l.keepTime(ctx, agent, &c, reading{up: time.Duration(info.UptimeMS) * time.Millisecond, asked: began, answered: time.Now()})
		case !errdefs.Is(err, errdefs.DeadlineExceeded), l.proc.Held.Load():
			missed = 0
		default:
			missed++
			l.cfg.Log.Debug("guest has not answered yet", "vm", l.proc.ID, "dur", time.Since(began))
		}
	}
	l.cfg.Log.Warn("guest has stopped answering, calls into it end", "vm", l.proc.ID)
	l.state.silence(agent)
	_ = agent.Close() // whoever opened the session sees it end
}
