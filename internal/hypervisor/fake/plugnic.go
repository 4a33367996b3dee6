package fake

import (
	"context"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ hypervisor.NICPlugger = (*Instance)(nil)

// spare is how many NICs a guest can get beyond those with which it booted.
const spare = 3

// places returns how many places for NICs the guest of p had when it booted, and the places of its NICs.
func places(p hypervisor.Plan) []int {
	width, out := p.BootNICs, []int{0}
	for i := range p.NICs {
		place := vm.PlaceOf(p.NICs, i)
		if out = append(out, place); p.BootNICs == 0 {
			width = max(width, place+1)
		}
	}
	out[0] = width
	return out
}

// nicAt returns the index of the NIC at a place; -1: there is none.
func (v *machine) nicAt(place int) int {
	for i := range v.Plan.NICs {
		if vm.PlaceOf(v.Plan.NICs, i) == place {
			return i
		}
	}
	return -1
}

// PlugNIC implements hypervisor.NICPlugger.
func (i *Instance) PlugNIC(ctx context.Context, n vm.NIC) error {
	if err := vm.ValidateMAC(n.MAC); err != nil || n.Place < 1 {
		return errdefs.Invalidf("interface %q has the invalid place %d", n.MAC, n.Place)
	}
	if err := i.usable(ctx, OpPlugNIC); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	at := i.v.nicAt(n.Place)
	switch {
	case at >= 0 && i.v.Plan.NICs[at].MAC == n.MAC:
		i.v.Down = slices.Clone(i.v.Down)
		i.v.Down[at] = n.LinkDown
		return h.save(i.v)
	case at >= 0:
		return errdefs.Conflictf("VM %s has the interface %s at the place %d", i.v.Plan.ID, i.v.Plan.NICs[at].MAC, n.Place)
	case n.Place >= places(i.v.Plan)[0]+spare:
		return errdefs.Exhaustedf("VM %s has no port for one more interface", i.v.Plan.ID)
	}
	i.v.Plan.BootNICs = places(i.v.Plan)[0]
	i.v.Plan.NICs, i.v.Down = append(slices.Clip(i.v.Plan.NICs), n), append(slices.Clip(i.v.Down), n.LinkDown)
	return h.save(i.v)
}

// UnplugNIC implements hypervisor.NICPlugger.
func (i *Instance) UnplugNIC(ctx context.Context, place int) error {
	if place < 1 {
		return errdefs.Invalidf("interface %d of a VM stays", place)
	}
	if err := i.usable(ctx, OpUnplugNIC); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	at := i.v.nicAt(place)
	if at < 0 {
		return nil
	}
	i.v.Plan.BootNICs = places(i.v.Plan)[0]
	rest := slices.Clone(i.v.Plan.NICs)
	for n := range rest {
		rest[n].Place = vm.PlaceOf(i.v.Plan.NICs, n)
	}
	i.v.Plan.NICs, i.v.Down = slices.Delete(rest, at, at+1), slices.Delete(slices.Clone(i.v.Down), at, at+1)
	return h.save(i.v)
}

// NICs returns the NICs of the running VM id.
func (h *Host) NICs(id vm.ID) []vm.NIC {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.vms[id]; v != nil && v.Ended == "" {
		return slices.Clone(v.Plan.NICs)
	}
	return nil
}
