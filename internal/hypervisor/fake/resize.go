package fake

import (
	"cmp"
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ hypervisor.Resizer = (*Instance)(nil)

// size returns what the guest has been given. Preconditions: the caller holds the host's lock.
func (v *machine) size() vm.Size {
	return vm.Size{CPUs: cmp.Or(v.Resized.CPUs, v.Plan.CPUs), Memory: cmp.Or(v.Resized.Memory, v.Plan.Memory)}
}

// Grow implements hypervisor.Resizer. A fault OpResized comes when the guest has the CPUs, and not the memory.
func (i *Instance) Grow(ctx context.Context, to vm.Size) error {
	if err := i.usable(ctx, OpResize); err != nil {
		return err
	}
	now, err := i.Size(ctx)
	if err != nil {
		return err
	}
	p := i.v.Plan
	most := p.Growth.Sockets * p.Topology.Cores * p.Topology.Threads
	if to.CPUs > max(now.CPUs, most) || to.Memory > max(now.Memory, p.Growth.Memory) {
		return errdefs.Invalidf("VM %s can have %d CPUs and %d bytes of memory", p.ID, most, p.Growth.Memory)
	}
	next := vm.Size{CPUs: max(now.CPUs, to.CPUs), Memory: now.Memory}
	if err := i.resized(next); err != nil {
		return err
	}
	if err := i.usable(ctx, OpResized); err != nil {
		return err
	}
	next.Memory = max(now.Memory, to.Memory)
	return i.resized(next)
}

func (i *Instance) resized(to vm.Size) error {
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	i.v.Resized = to
	return h.save(i.v)
}

// Size implements hypervisor.Resizer.
func (i *Instance) Size(ctx context.Context) (vm.Size, error) {
	if err := i.usable(ctx, OpState); err != nil {
		return vm.Size{}, err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	return i.v.size(), nil
}
