package qemu

import (
	"context"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
)

var _ hypervisor.Resetter = (*instance)(nil)

// resetLimit bounds how long QEMU may take to reset a guest.
const resetLimit = 10 * time.Second

// Reset implements hypervisor.Resetter.
func (i *instance) Reset(ctx context.Context) error {
	if err := i.resets(); err != nil {
		return err
	}
	return i.command(ctx, "system_reset")
}

// ResetOnPoweroff implements hypervisor.Resetter.
func (i *instance) ResetOnPoweroff(ctx context.Context, until time.Time) error {
	if err := i.resets(); err != nil {
		return err
	}
	if _, err := i.connected(ctx); err != nil {
		return fmt.Errorf("VM %s: %w", i.h.ID, err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.again = until
	return nil
}

// resets refuses a guest that ends when it resets, and one of a driver that did not record that.
func (i *instance) resets() error {
	if !i.h.Resets {
		return errdefs.Unsupportedf("VM %s: its guest ends when it resets; restart the VM", i.h.ID)
	}
	return nil
}

// startAgain resets a guest that has powered itself off, if it is to start again. Otherwise, or if that fails, it returns false.
func (i *instance) startAgain(ctx context.Context, c *qmp.Client) bool {
	i.mu.Lock()
	again := time.Now().Before(i.again)
	i.again = time.Time{}
	i.mu.Unlock()
	if !again {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, resetLimit)
	defer cancel()
	err := c.Execute(ctx, "system_reset", nil, nil)
	if err == nil {
		err = i.whenReset(ctx, c)
	}
	if err == nil {
		err = cont(ctx, c)
	}
	if err != nil {
		i.d.log.Warn("guest that powered off is not started again", "vm", i.h.ID, "err", err)
	}
	return err == nil
}

// whenReset waits until QEMU has reset the guest: the command returns before that.
func (i *instance) whenReset(ctx context.Context, c *qmp.Client) error {
	_, err := backoff.Retry(ctx, func() (string, error) {
		now, err := status(ctx, c)
		switch {
		case err != nil:
			return now, backoff.Permanent(err)
		case now == "shutdown":
			return now, errdefs.Unavailablef("the guest is not reset yet")
		}
		return now, nil
	}, backoff.WithBackOff(backoff.NewConstantBackOff(finalizing)), backoff.WithMaxElapsedTime(resetLimit))
	return err
}
