package engine

import (
	"context"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// maxFreeze is the longest time for which file systems can be frozen.
const maxFreeze = 5 * time.Minute

// Freeze freezes the file systems of a running guest until Thaw; see guest.Freezes. Snapshots of its volumes are taken meanwhile, and do not
// thaw it. If the engine ends meanwhile, the next one thaws it. Errors as for Exec.
func (e *Engine) Freeze(caller context.Context, ref string, most time.Duration) error {
	if most <= 0 || most > maxFreeze {
		return errdefs.Invalidf("file systems can be frozen for at most %s, not for %s", maxFreeze, most)
	}
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	freezer, ok := c.agent.(guest.FreezeReporter)
	if !ok {
		return errdefs.Unsupportedf("the guest of vm %s has no qemu-guest-agent, which would freeze its file systems", c.m.name())
	}
	if err := c.link.Freeze(ctx, freezer, most, e.life.spawn); err != nil {
		return c.failed(caller, fmt.Errorf("freeze the file systems of vm %s: %w", c.m.name(), err))
	}
	return nil
}

// Thaw ends a freeze; see guest.Freezes. Errors as for Exec.
func (e *Engine) Thaw(caller context.Context, ref string) (held bool, err error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return false, err
	}
	defer leave()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return false, e.life.ended(caller, err)
	}
	if held, err = c.link.Thaw(ctx); err != nil {
		return false, c.failed(caller, fmt.Errorf("thaw the file systems of vm %s: %w", c.m.name(), err))
	}
	return held, nil
}
