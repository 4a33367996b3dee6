package engine

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// grown makes the guest of m, which may write to v, use all of its bytes. It returns why the guest does not yet; "": it does.
// Preconditions: m is held, unless it is nil.
func (m *machine) grown(ctx context.Context, v volume.Volume) string {
	if m == nil {
		return "the VM is not known here"
	}
	r := m.record()
	i := attachedAs(r, v.ID)
	switch {
	case i < 0:
		return "the VM does not have the volume on record; detach it, and attach it again"
	case r.State == vm.StateHibernated:
		return "it is hibernated; its guest uses the new size when it is woken"
	case r.State != vm.StateRunning || m.run.Load() == nil:
		return fmt.Sprintf("it does not run (%s); its guest uses the new size when it starts", r.State)
	}
	if r.Paused != "" {
		return "it is paused; its guest uses the new size when it is unpaused"
	}
	if err := m.tellGrown(ctx, r.Attached[i], v.Size); err != nil {
		m.log.Warn("guest does not use the new size of a volume", "vm", m.id, "volume", v.Name, "err", err)
		return err.Error()
	}
	_, err := m.update(ctx, func(r *vm.Record) {
		r.Attached = slices.Clone(r.Attached)
		r.Attached[i].Size = v.Size
	})
	if err != nil { // it is told again after its next wake
		m.log.Warn("new size of a volume not recorded", "vm", m.id, "volume", v.Name, "err", err)
	}
	return ""
}

// tellGrown tells the hypervisor, and then the agent, that a volume has size bytes.
func (m *machine) tellGrown(ctx context.Context, a vm.AttachedVolume, size int64) error {
	run := m.run.Load()
	grower, ok := hypervisor.As[hypervisor.DiskGrower](run.Inst)
	if !ok {
		return errdefs.Unsupportedf("driver %s cannot grow disks of a running VM; restart the VM", m.record().Driver)
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.AgentTimeout)
	defer cancel()
	if err := grower.GrowDisk(ctx, a.Serial, size); err != nil {
		return err
	}
	if !run.link.OurAgent() { // it sees the size, and what is on the disk is its own
		return nil
	}
	agent, err := run.link.Attacher(ctx, attachPatience)
	if err == nil {
		err = agent.GrowVolume(ctx, a.Volume, a.Serial, size)
	}
	return err
}
