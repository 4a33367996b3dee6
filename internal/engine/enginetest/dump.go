package enginetest

import (
	"context"
	"io"

	"cocoonstack.io/cocoon/internal/hypervisor"
)

var _ hypervisor.MemoryDumper = (*Guest)(nil)

// DumpMemory implements hypervisor.MemoryDumper: it writes the id of the VM. The fault "driver.DumpMemory half" comes in the middle.
func (g *Guest) DumpMemory(ctx context.Context, w io.Writer) error {
	return g.w.around("driver.DumpMemory", func() error {
		p, _ := g.look()
		id, half := string(p.ID), len(p.ID)/2
		if _, err := io.WriteString(w, id[:half]); err != nil {
			return err
		}
		if err := g.w.Fault("driver.DumpMemory half"); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		_, err := io.WriteString(w, id[half:])
		return err
	})
}
