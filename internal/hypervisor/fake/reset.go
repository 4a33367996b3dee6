package fake

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ hypervisor.Resetter = (*Instance)(nil)

// Reset implements hypervisor.Resetter.
func (i *Instance) Reset(ctx context.Context) error {
	return i.resettable(ctx, func() error {
		i.d.host.reset(i.v)
		return i.d.host.save(i.v)
	})
}

// ResetOnPoweroff implements hypervisor.Resetter.
func (i *Instance) ResetOnPoweroff(ctx context.Context, until time.Time) error {
	return i.resettable(ctx, func() error {
		i.v.again = until
		return nil
	})
}

// resettable calls f with the host's lock held.
func (i *Instance) resettable(ctx context.Context, f func() error) error {
	if err := i.usable(ctx, OpReset); err != nil {
		return err
	}
	if i.v.Plan.Boot.Direct() {
		return errdefs.Unsupportedf("VM %s: its guest ends when it resets; restart the VM", i.v.Plan.ID)
	}
	i.d.host.mu.Lock()
	defer i.d.host.mu.Unlock()
	return f()
}

// reset starts the guest of v again. Preconditions: the caller holds the host's lock.
func (h *Host) reset(v *machine) {
	v.Resets++
	v.again, v.Asked, v.Memory = time.Time{}, time.Time{}, ""
	for c := range v.conns { // its agent is gone
		_ = c.Close()
	}
	v.conns = nil
	_ = h.save(v) // if this fails, a later process counts one reset less
}

// Resets returns how often the guest of the running VM id was reset.
func (h *Host) Resets(id vm.ID) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.vms[id]; v != nil {
		return v.Resets
	}
	return 0
}
