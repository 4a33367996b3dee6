package engine

import (
	"context"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Every save and every wake puts a layer on each writable disk of a VM.
const (
	mergeLayers = 8  // from so many on they are merged when the guest runs
	mostLayers  = 48 // above what a disk stands on then, no more are added: a driver starts VMs with so many only
)

// layers is how many files d consists of, the one that it stands on in the end included.
func layers(d vm.Disk) (n int) {
	each(d, func(vm.Disk) { n++ })
	return n
}

// roomOnTop refuses a save whose overlays would be too many.
func roomOnTop(r vm.Record) error {
	for _, d := range r.Disks {
		if n := layers(d); !d.ReadOnly && n > mostLayers {
			return errdefs.Preconditionf("its disk %s consists of %d layers, which are merged when it is started; start or restart it first", d.Serial, n)
		}
	}
	return nil
}

// shorten merges the layers of m's writable disks when they have become many, while its guest runs. What fails leaves the
// longer chain, which is as true: it is tried again after the next save or start.
//
// Preconditions: m is held, and its process has the disks of its record: it has just been started with them, or a save
// has just put their tops on.
func (e *Engine) shorten(ctx context.Context, m *machine) {
	run := m.run.Load()
	if run == nil || run.over() {
		return
	}
	flattener, ok := hypervisor.As[hypervisor.DiskFlattener](run.inst)
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
			e.log.Warn("layers of disk not merged", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
		_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
			r.Disks = slices.Clone(r.Disks)
			r.Disks[i].Backing = &base
		})
		if err != nil {
			e.log.Warn("merged layers of disk not recorded", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
	}
	e.tidy(m, ownFiles(e.stateDir(m.id), was)...)
}
