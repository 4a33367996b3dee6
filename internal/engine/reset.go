package engine

import (
	"context"
	"errors"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// resetWidth is how many VMs Reset removes at a time.
const resetWidth = 8

// Reset removes every VM by force, what their firmware has kept, and the entries of the pool. FailedPrecondition while unknown VMs are kept aside.
func (e *Engine) Reset(ctx context.Context) error {
	if err := e.life.ready(ctx); err != nil {
		return err
	}
	if n := e.StrayCount(); n > 0 {
		return errdefs.Preconditionf("the journal does not know %d VMs; look at them with `cocoon recover`, then adopt or remove each", n)
	}
	all := e.vms.all()
	errs := make([]error, len(all))
	slots := make(chan struct{}, resetWidth)
	var wg sync.WaitGroup
	for i, m := range all {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := e.Remove(ctx, string(m.id), true); !errdefs.IsNotFound(err) {
				errs[i] = err
			}
		})
	}
	wg.Wait()
	e.pool.Empty(ctx, "")
	return errors.Join(append(errs, e.dropAllFirmware())...)
}
