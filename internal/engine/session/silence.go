package session

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// misses is how many answers in a row a guest must miss to count as silent: one may be late because the daemon was
// stopped.
const misses = 2

// checkAlive asks the guest periodically whether it answers, and closes its session if it does not: all calls in it
// end, and the next session begins when the guest answers again. The stream itself does not end when a kernel dies.
//
// It is not a gRPC keep-alive, for two reasons: a guest with an older agent ends a session that is probed so often,
// and a guest that is being saved is paused for as long as that takes. Other agents check their sessions themselves.
func (l *Link) checkAlive(ctx context.Context, agent guest.Agent) {
	if !l.OurAgent() {
		return
	}
	patience := l.cfg.Silence / misses
	for missed := 0; missed < misses; {
		if missed == 0 {
			process.Pause(patience, ctx.Done(), agent.Done())
		}
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, patience)
		_, err := agent.Info(limited)
		cancel()
		switch {
		case ctx.Err() != nil, errdefs.IsUnavailable(err):
			return
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
