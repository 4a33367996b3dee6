package session

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Reconfigure gives the guest of r, which is set up, the interfaces that r has now. It does nothing for guests that boot themselves. It waits that
// long for a guest that is between two sessions.
// Errors: FailedPrecondition when the guest's process has ended, Unavailable when the guest does not answer, and those of the guest.
func (l *Link) Reconfigure(ctx context.Context, r vm.Record, patience time.Duration) error {
	if !l.OurAgent() {
		return nil
	}
	agent, err := l.Ready(ctx, patience)
	if errdefs.Is(err, errdefs.DeadlineExceeded) {
		return errdefs.Unavailablef("its guest does not answer at the moment")
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
	defer cancel()
	return agent.Setup(ctx, setupOf(r))
}
