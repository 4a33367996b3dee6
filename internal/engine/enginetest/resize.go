package enginetest

import (
	"context"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ hypervisor.Resizer = (*Guest)(nil)

// Grow implements hypervisor.Resizer. The fault "driver.Grow half" comes when the guest has got its CPUs.
func (g *Guest) Grow(_ context.Context, to vm.Size) error {
	return g.w.around("driver.Grow", func() error {
		g.change(func() { g.p.Size.CPUs = max(g.p.Size.CPUs, to.CPUs) })
		if err := g.w.Fault("driver.Grow half"); err != nil {
			return err
		}
		g.change(func() { g.p.Size.Memory = max(g.p.Size.Memory, to.Memory) })
		return nil
	})
}

// Size implements hypervisor.Resizer.
func (g *Guest) Size(context.Context) (vm.Size, error) {
	p, _ := g.look()
	return p.Size, nil
}

// Size returns what the running VM id has been given.
func (w *World) Size(id vm.ID) vm.Size {
	p, _, _ := w.loadProc(id)
	return p.Size
}
