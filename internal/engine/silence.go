package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// misses is how many answers in a row a guest must miss to count as silent: one may be late because the daemon was
// stopped.
const misses = 2

// checkAlive asks the guest periodically whether it answers, and closes its session if it does not: all calls in it
// end, and the next session begins when the guest answers again. The stream itself does not end when a kernel dies.
//
// It is not a gRPC keep-alive, for two reasons: a guest with an older agent ends a session that is probed so often,
// and a guest that is being saved is paused for as long as that takes. Other agents check their sessions themselves.
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
	_ = agent.Close() // whoever opened the session sees it end
}

// unheard reports whether agent's session was closed because the guest had stopped answering; for nil, whether the
// last session was.
func (l *link) unheard(agent guest.Agent) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.silent != nil && (agent == nil || l.silent == agent)
}

// silent explains why calls into m end. The state of the guest is not known: only its process exists.
func silent(m *machine) error {
	if err := standsStill(m); err != nil {
		return err
	}
	return errdefs.Unavailablef("the guest of vm %s has stopped answering; its serial log may say why, and a restart ends it", m.name())
}
