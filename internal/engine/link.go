package engine

import (
	"context"
	"errors"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// setupFailed is the exit code of a main process that could not be started, as in shells.
const setupFailed = 127

// link is the connection to the agent of one running guest. It is nil for a guest without agent.
type link struct {
	dial guest.Dial
	kind vm.ImageType  // of the guest: decides which agent it may have
	done chan struct{} // closed when the conversation is over
	stop context.CancelFunc

	mu      sync.Mutex
	agent   guest.Agent // nil while there is no session
	ready   bool        // the guest is set up
	silent  guest.Agent // the session that was closed because its guest stopped answering; nil once it answers
	changed chan struct{}
}

func newLink(dial guest.Dial, kind vm.ImageType) *link {
	return &link{dial: dial, kind: kind, done: make(chan struct{}), stop: func() {}, changed: make(chan struct{})}
}

// peek returns the session, whether its guest is set up, and a channel that closes when either changes.
func (l *link) peek() (agent guest.Agent, ready bool, changed <-chan struct{}) {
	if l == nil {
		return nil, false, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.agent, l.ready, l.changed
}

func (l *link) set(agent guest.Agent, ready bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.agent, l.ready = agent, ready
	if ready {
		l.silent = nil
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// drain waits until the conversation is over. An open session gets some time to deliver the guest's last output.
// Preconditions: the process has ended.
func (l *link) drain(limit time.Duration) {
	if l == nil {
		return
	}
	if agent, _, _ := l.peek(); agent != nil {
		pause(limit, l.done, nil)
	}
	l.mu.Lock()
	stop := l.stop
	l.mu.Unlock()
	stop()
	<-l.done
}

// converse keeps a session with the guest's agent while its process runs. It sets the guest up, keeps its log and
// records the exit of its main process. It ends with the process or with ctx.
func (e *Engine) converse(ctx context.Context, m *machine, r *run) {
	defer close(r.link.done)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.link.mu.Lock()
	r.link.stop = cancel
	r.link.mu.Unlock()
	wait, most := e.cfg.ReconnectMin, e.cfg.ReconnectMax
	if r.link.kind != vm.ImageOCI {
		most = e.cfg.SilentMax
	}
	for ctx.Err() == nil && !r.over() {
		served, err := e.session(ctx, m, r)
		if err == nil {
			return
		}
		if served {
			wait = e.cfg.ReconnectMin
		}
		e.log.Debug("agent not reached", "vm", m.id, "err", err)
		pause(wait, ctx.Done(), r.ended)
		wait = min(wait*2, most)
	}
}

// session is one conversation. It returns nil when nothing is left to do, and whether the guest was set up.
func (e *Engine) session(ctx context.Context, m *machine, r *run) (served bool, err error) {
	began := time.Now()
	agent, err := e.agents[r.link.kind].Connect(ctx, r.link.dial)
	if err != nil {
		return false, err
	}
	e.log.Debug("agent reached", "vm", m.id, "dur", time.Since(began))
	defer func() { err = errors.Join(err, agent.Close()) }()
	r.link.set(agent, false)
	defer r.link.set(nil, false)
	setUp := e.setUp
	if m.record().Resume != nil {
		setUp = func(ctx context.Context, m *machine, agent guest.Agent) error {
			return e.setUpResumed(ctx, m, r, agent)
		}
	}
	if err := setUp(ctx, m, agent); err != nil {
		if lost(err) {
			return false, err
		}
		return false, e.refused(ctx, m, r, err)
	}
	r.link.set(agent, true)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pumped := make(chan struct{})
	go func() {
		defer close(pumped)
		e.learnAddresses(ctx, m, agent)
		if len(m.record().Containers) > 0 {
			e.followContainers(ctx, m, agent)
			return
		}
		e.pump(ctx, m, agent, "log of vm not kept, trying again", func() error { return agent.Logs(ctx, m.log.Last(), m.log.Append) })
	}()
	heeded := make(chan struct{})
	go func() {
		defer close(heeded)
		e.checkAlive(ctx, m, r, agent)
	}()
	defer func() { cancel(); <-pumped; <-heeded }()

	exit, err := agent.Wait(ctx)
	if err != nil {
		if r.over() { // the last lines may still arrive
			pause(e.cfg.DrainTimeout, pumped, agent.Done())
		}
		return true, err
	}
	return true, e.exited(ctx, m, r, agent, exit, pumped)
}

// setUp gives the guest its volumes and its identity and records that it answers.
func (e *Engine) setUp(ctx context.Context, m *machine, agent guest.Agent) error {
	limited, cancel := context.WithTimeout(ctx, e.cfg.AgentTimeout)
	defer cancel()
	if m.record().ImageType == vm.ImageOCI { // a disk guest gets them from its seed
		if err := e.pushVolumes(limited, m, agent); err != nil {
			return err
		}
	}
	if err := agent.Setup(limited, setupOf(m.record())); err != nil {
		return err
	}
	if m.record().AgentReady {
		return nil
	}
	_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.AgentReady = r.State == vm.StateRunning })
	return errdefs.As(errdefs.Unavailable, err) // the journal may accept it the next time
}

// lost reports whether err comes from the link and not from the request.
func lost(err error) bool {
	c := errdefs.ClassOf(err)
	return c == errdefs.Unavailable || c == errdefs.Canceled || c == errdefs.DeadlineExceeded
}

// refused ends a VM whose main process cannot be started.
func (e *Engine) refused(ctx context.Context, m *machine, r *run, cause error) error {
	_, err := e.commit(ctx, m, e.journal.Update, func(rec *vm.Record) {
		code := setupFailed
		rec.ExitCode, rec.Reason, rec.Message = &code, vm.ReasonStartFailed, cause.Error()
	})
	if err != nil {
		return err
	}
	e.log.Warn("vm not set up", "vm", m.id, "err", cause)
	return r.inst.Kill(ctx)
}

// exited records how the main process ended, and only then lets the guest power off: the exit code is never lost.
func (e *Engine) exited(ctx context.Context, m *machine, r *run, agent guest.Agent, exit guest.Exit, pumped <-chan struct{}) error {
	_, err := e.commit(ctx, m, e.journal.Update, func(rec *vm.Record) {
		code := exit.Code
		rec.ExitCode = &code
		if !r.asked.Load() && (rec.Reason == "" || ofDisk(rec.Reason)) {
			rec.Reason, rec.Message = vm.ReasonExited, ""
		}
	})
	if err != nil {
		return err
	}
	if err := e.durable(ctx); err != nil {
		return err
	}
	pause(e.cfg.DrainTimeout, pumped, r.ended)
	err = agent.AckExit(ctx)
	if err != nil && !r.over() {
		return err
	}
	pause(e.cfg.PoweroffTimeout, r.ended, ctx.Done())
	if r.over() {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	e.log.Warn("vm did not power off and is killed", "vm", m.id)
	return r.inst.Kill(ctx)
}

// pump copies what the guest reports to the host, from the end of the host's copy on, until it is complete or the
// session ends.
func (e *Engine) pump(ctx context.Context, m *machine, agent guest.Agent, complaint string, copied func() error) {
	wait := e.cfg.ReconnectMin
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
		e.log.Warn(complaint, "vm", m.id, "err", err) //nolint:sloglint // one of two constants
		pause(wait, ctx.Done(), agent.Done())
		wait = min(wait*2, e.cfg.ReconnectMax)
	}
}
