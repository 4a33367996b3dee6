package engine

import (
	"context"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Every save and every wake adds a layer to each writable disk of a VM.
const (
	mergeLayers = 8  // from this number on, they are merged when the guest runs
	mostLayers  = 48 // above this number, no more are added: a driver starts only VMs with a limited number
)

// layers returns how many files d consists of, including the one at the bottom.
func layers(d vm.Disk) (n int) {
	each(d, func(vm.Disk) { n++ })
	return n
}

// roomOnTop refuses a save that would add too many overlays.
func roomOnTop(r vm.Record) error {
	for _, d := range r.Disks {
		if n := layers(d); !d.ReadOnly && n > mostLayers {
			return errdefs.Preconditionf("its disk %s has too many layers (%d); a start merges them, so start or restart the VM first", d.Serial, n)
		}
	}
	return nil
}

// shorten merges the layers of m's writable disks when there are many, while its guest runs. A failure leaves the
// longer chain, which is equally valid: the next save or start tries again.
//
// Preconditions: m is held, and its process has the disks of its record, because it has just been started with them,
// or a save has just added their overlays.
func (m *machine) shorten(ctx context.Context) {
	run := m.run.Load()
	if run == nil || run.Over() {
		return
	}
	flattener, ok := hypervisor.As[hypervisor.DiskFlattener](run.Inst)
	if !ok {
		return
	}
	was := m.record().Disks
	for i, d := range was {
		if d.ReadOnly || layers(d) < mergeLayers {
			continue
		}
		base := d
		each(d, func(at vm.Disk) { base = at })
		if err := flattener.FlattenDisk(ctx, d.Serial, &base); err != nil {
			m.log.Warn("layers of disk not merged", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
		_, err := m.update(ctx, func(r *vm.Record) {
			r.Disks = slices.Clone(r.Disks)
			r.Disks[i].Backing = &base
		})
		if err != nil {
			m.log.Warn("merged layers of disk not recorded", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
	}
	m.tidy(ownFiles(m.dirs.state(m.id), was)...)
}
