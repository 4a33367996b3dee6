package enginetest

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ hypervisor.NICPlugger = (*Guest)(nil)

// connect gives a process the further interfaces of its plan.
func (p *proc) connect(plan hypervisor.Plan) {
	p.NICs, p.Width = map[int]string{}, plan.BootNICs
	for i, n := range plan.NICs {
		place := vm.PlaceOf(plan.NICs, i)
		if plan.BootNICs == 0 {
			p.Width = max(p.Width, place+1)
		}
		if i > 0 {
			p.NICs[place] = n.MAC
		}
	}
}

// PlugNIC implements hypervisor.NICPlugger.
func (g *Guest) PlugNIC(_ context.Context, n vm.NIC) error {
	return g.w.around("driver.PlugNIC", func() error {
		g.change(func() {
			next := map[int]string{n.Place: n.MAC}
			for place, mac := range g.p.NICs {
				next[place] = cmp.Or(next[place], mac)
			}
			g.p.NICs = next
		})
		return nil
	})
}

// UnplugNIC implements hypervisor.NICPlugger.
func (g *Guest) UnplugNIC(_ context.Context, place int) error {
	return g.w.around("driver.UnplugNIC", func() error {
		g.change(func() {
			g.p.NICs = maps.Clone(g.p.NICs)
			delete(g.p.NICs, place)
		})
		return nil
	})
}

// NICs are the MACs of the further interfaces that the guest has, by place.
func (g *Guest) NICs() map[int]string {
	p, _ := g.look()
	return p.NICs
}

// connected returns an error unless the guest has the further interfaces that it is told of.
func (g *Guest) connected(nics []vm.NIC) error {
	p, _ := g.look()
	have := slices.Collect(maps.Values(p.NICs))
	for _, n := range nics[min(len(nics), 1):] {
		if !slices.Contains(have, n.MAC) {
			return errdefs.NotFoundf("no interface has the MAC %s", n.MAC)
		}
	}
	return nil
}
