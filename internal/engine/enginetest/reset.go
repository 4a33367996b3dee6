package enginetest

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

var _ hypervisor.Resetter = (*Guest)(nil)

// Reset implements hypervisor.Resetter.
func (g *Guest) Reset(context.Context) error {
	return g.w.around("driver.Reset", func() error { return g.living(g.restart) })
}

// ResetOnPoweroff implements hypervisor.Resetter.
func (g *Guest) ResetOnPoweroff(_ context.Context, until time.Time) error {
	return g.w.around("driver.ResetOnPoweroff", func() error { return g.living(func() { g.again = time.Now().Before(until) }) })
}

// Resets returns how often the guest has started again.
func (g *Guest) Resets() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.resets
}

// living calls f with the lock held, unless the process has ended.
func (g *Guest) living(f func()) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.ended:
		return errdefs.NotFoundf("vm %s has ended", g.p.ID)
	default:
		f()
		return nil
	}
}

// restart starts the guest again: its sessions are lost. Preconditions: the lock is held.
func (g *Guest) restart() {
	g.again, g.resets, g.p.SetUp = false, g.resets+1, false
	close(g.drop)
	g.drop = make(chan struct{})
}
