package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// proven waits until the guest of m, which has just resumed from x, has shown that it works. Either its agent
// answers, if it did when x was saved, or its process has run for a while. Until then the earlier state of the VM
// must stay. It waits as long as calls wait for an agent, or until the engine ends.
// Errors: FailedPrecondition when the process has ended, Unavailable when the guest does not answer in time.
func (e *Engine) proven(m *machine, x snapshot.Snapshot) error {
	run := m.run.Load()
	if run == nil {
		return errdefs.Preconditionf("its process ended before its guest had answered")
	}
	answers := x.Live && x.Record.AgentReady && run.link != nil
	limit := e.cfg.ProvenAfter
	if answers {
		limit = e.cfg.AgentTimeout
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		_, ready, changed := run.link.peek()
		if answers && ready {
			return nil
		}
		select {
		case <-changed:
		case <-run.ended:
			return errdefs.Preconditionf("its process ended before its guest had answered; its serial log may say why")
		case <-timer.C:
			if !answers {
				return nil
			}
			return errdefs.Unavailablef("its guest has not answered for %s since it went on; its serial log may say why", limit)
		case <-e.life.serving.Done():
			return stopping()
		}
	}
}

// endUnproven ends the process of m, whose guest has not answered since it resumed. Its writes are removed with its
// overlays.
func (e *Engine) endUnproven(ctx context.Context, m *machine) error {
	run := m.run.Load()
	if run == nil {
		return nil
	}
	return e.endHeld(ctx, m, run)
}
