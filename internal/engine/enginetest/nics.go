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

var (
	_ hypervisor.NICPlugger = (*Guest)(nil)
	_ hypervisor.Linker     = (*Guest)(nil)
)

// connect gives a process the further interfaces of its plan.
func (p *proc) connect(plan hypervisor.Plan) {
	p.NICs, p.Width, p.Down = map[int]string{}, plan.BootNICs, map[int]bool{}
	for i, n := range plan.NICs {
		place := vm.PlaceOf(plan.NICs, i)
		if n.LinkDown || plan.Incoming != nil && plan.Incoming.LinksDown {
			p.Down[place] = true
		}
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
			g.p.NICs, g.p.Down = next, with(g.p.Down, n.Place, n.LinkDown)
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

// SetLink implements hypervisor.Linker. A guest with the MAC of another one must not be reachable.
func (g *Guest) SetLink(_ context.Context, place int, up bool) error {
	return g.w.around("driver.SetLink", func() error {
		g.change(func() { g.p.Down = with(g.p.Down, place, !up) })
		return nil
	})
}

// with returns a copy of down in which place has or has not a carrier.
func with(down map[int]bool, place int, is bool) map[int]bool {
	next := map[int]bool{}
	maps.Copy(next, down)
	if delete(next, place); is {
		next[place] = true
	}
	return next
}

// Down are the places of the interfaces without carrier.
func (g *Guest) Down() map[int]bool {
	p, _ := g.look()
	return p.Down
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
