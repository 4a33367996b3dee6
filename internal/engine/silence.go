package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// misses is how many answers in a row a guest must owe before it is silent: one may be late because we were stopped.
const misses = 2

// checkAlive asks the guest now and then whether it is there, and gives its session up when it is not: all calls in it end, and
// the next session begins when the guest answers again. The stream itself does not end when a kernel dies.
//
// It is no keep-alive of gRPC for two reasons: the guest of an agent of before ends a session that is tried so often, and
// a guest that is being saved stands still for as long as that takes. Other agents try their sessions themselves.
func (e *Engine) checkAlive(ctx context.Context, m *machine, r *run, agent guest.Agent) {
	if r.link.kind != vm.ImageOCI {
		return
	}
	patience := e.cfg.Silence / misses
	for missed := 0; missed < misses; {
		if missed == 0 {
			pause(patience, ctx.Done(), agent.Done())
		}
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, patience)
		_, err := agent.Info(limited)
		cancel()
		switch {
		case ctx.Err() != nil, errdefs.IsUnavailable(err):
			return
		case !errdefs.Is(err, errdefs.DeadlineExceeded), r.still.Load():
			missed = 0
		default:
			missed++
			e.log.Debug("guest owes an answer", "vm", m.id, "dur", time.Since(began))
		}
	}
	e.log.Warn("guest has stopped answering, calls into it end", "vm", m.id)
	r.link.mu.Lock()
	r.link.silent = agent
	r.link.mu.Unlock()
	_ = agent.Close() // who opened the session sees it end
}

// unheard reports whether agent's session was given up because the guest had stopped answering; for nil, whether the last
// one was.
func (l *link) unheard(agent guest.Agent) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.silent != nil && (agent == nil || l.silent == agent)
}

// silent says why calls into m end. Its state is not known: only its process is there.
func silent(m *machine) error {
	if err := standsStill(m); err != nil {
		return err
	}
	return errdefs.Unavailablef("the guest of vm %s has stopped answering; its serial log may say why, and a restart ends it", m.name())
}
