package fake

import (
	"context"
	"maps"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ hypervisor.DiskPlugger = (*Instance)(nil)
	_ hypervisor.DiskGrower  = (*Instance)(nil)
)

// PlugDisk implements hypervisor.DiskPlugger.
func (i *Instance) PlugDisk(ctx context.Context, d vm.Disk) error {
	if d.Port < 1 || d.Port > vm.MaxPort || d.Serial == "" {
		return errdefs.Invalidf("disk %q has the invalid port %d", d.Serial, d.Port)
	}
	if err := i.usable(ctx, OpPlug); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, have := range i.v.Plan.Disks {
		switch {
		case have.Serial == d.Serial && have.Port == d.Port:
			return nil
		case have.Serial == d.Serial, have.Port == d.Port:
			return errdefs.Conflictf("VM %s has the disk %s at port %d", i.v.Plan.ID, have.Serial, have.Port)
		}
	}
	i.v.Plan.Disks = append(slices.Clip(i.v.Plan.Disks), d)
	return h.save(i.v)
}

// UnplugDisk implements hypervisor.DiskPlugger.
func (i *Instance) UnplugDisk(ctx context.Context, serial string) error {
	if err := i.usable(ctx, OpUnplug); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	at := slices.IndexFunc(i.v.Plan.Disks, func(d vm.Disk) bool { return d.Serial == serial })
	switch {
	case at < 0:
		return nil
	case i.v.Plan.Disks[at].Port == 0:
		return errdefs.Invalidf("the disk %s of VM %s was there when the guest booted", serial, i.v.Plan.ID)
	}
	i.v.Plan.Disks = slices.Delete(slices.Clone(i.v.Plan.Disks), at, at+1)
	return h.save(i.v)
}

// GrowDisk implements hypervisor.DiskGrower.
func (i *Instance) GrowDisk(ctx context.Context, serial string, size int64) error {
	if err := i.usable(ctx, OpGrow); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	at := slices.IndexFunc(i.v.Plan.Disks, func(d vm.Disk) bool { return d.Serial == serial })
	switch {
	case at < 0 || serial == "":
		return errdefs.Invalidf("VM %s has no disk %q", i.v.Plan.ID, serial)
	case i.v.Plan.Disks[at].ReadOnly:
		return errdefs.Invalidf("the disk %s of VM %s is read-only", serial, i.v.Plan.ID)
	case size < i.v.Grown[serial]:
		return errdefs.Invalidf("the disk %s of VM %s has %d bytes already", serial, i.v.Plan.ID, i.v.Grown[serial])
	}
	grown := maps.Clone(i.v.Grown)
	if grown == nil {
		grown = map[string]int64{}
	}
	grown[serial] = size
	i.v.Grown = grown
	return h.save(i.v)
}

// Disks returns the disks of the running VM id.
func (h *Host) Disks(id vm.ID) []vm.Disk {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.vms[id]; v != nil && v.Ended == "" {
		return slices.Clone(v.Plan.Disks)
	}
	return nil
}

// Started returns when the running VM id was started.
func (h *Host) Started(id vm.ID) (at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.vms[id]; v != nil {
		at = v.Started
	}
	return at
}
