package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Remove deletes a VM with its disks, logs and addresses. A running VM is removed only with force, which kills it. If
// something cannot be removed, the VM stays in StateError and can be removed again.
func (e *Engine) Remove(caller context.Context, ref string, force bool) error {
	_, err := e.operate(caller, opRemove, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		r := m.record()
		if r.State == vm.StateRunning && !force {
			return r, errdefs.Preconditionf("it is running; stop it first, or remove it by force")
		}
		return removeOperation.run(ctx, m, &removal{machine: m, thorough: r.State == vm.StateError}, nil)
	})
	return err
}

// removal deletes a VM. It is idempotent.
type removal struct {
	*machine
	thorough bool // the record may be incomplete: see erase
	begun    bool // parts of the VM may be gone
}

var removeOperation = operation[*removal]{
	name: opRemove, recall: recallRemoval,
	steps: []step[*removal]{
		{word: stepKill, run: (*removal).remove, undo: (*removal).undo, recover: (*removal).recover},
	},
}

func recallRemoval(m *machine, _ journal.Intent) (*removal, error) {
	return &removal{machine: m, thorough: true}, nil
}

func (x *removal) remove(ctx context.Context) (outcome, error) {
	if err := x.durable(ctx); err != nil { // after a power cut, the removal goes on
		return outcome{}, err
	}
	x.begun = true
	ctx = context.WithoutCancel(ctx)
	if err := x.erase(ctx, x.thorough); err != nil {
		return outcome{}, err
	}
	x.dropHibernation(ctx)
	return outcome{gone: true}, nil
}

func (x *removal) undo(ctx context.Context, err error) error {
	if x.begun {
		x.fail(ctx, opRemove, x.record().Reason, err)
	}
	return err
}

// recover removes the VM.
func (x *removal) recover(ctx context.Context) (next string, err error) {
	if _, err := x.remove(ctx); err != nil {
		return "", err
	}
	return "", x.forget(ctx)
}

// erase removes everything that m has on this host except its record. It is idempotent. thorough is for a VM whose
// record may be incomplete: a process that nobody watches, NICs that were not recorded.
func (m *machine) erase(ctx context.Context, thorough bool) error {
	if r := m.run.Load(); r != nil {
		if err := r.Kill(ctx); err != nil {
			return err
		}
		m.reclaim(ctx)
	} else if thorough || m.remains.Load() {
		if err := m.reap(ctx); err != nil {
			return err
		}
	}
	if m.record().Spec.Sandbox {
		if err := m.dirs.unshare(m.id); err != nil {
			return err
		}
	}
	nics, err := m.nics.of(ctx, m.record(), thorough)
	if err != nil {
		return err
	}
	if err := m.nics.detach(ctx, nics, true); err != nil {
		return err
	}
	if err := m.detachVolumes(ctx, thorough); err != nil {
		return err
	}
	if r := m.record(); r.Spec.KeepsFirmware() != "" {
		if err := m.dirs.kept.Keep(r, m.dirs.firmware(m.id)); err != nil {
			return err
		}
	}
	return m.dirs.remove(m.id)
}

// dropStale removes the snapshot ref of m, in which m is no longer hibernated.
func (m *machine) dropStale(ctx context.Context, ref string) {
	x, err := m.snapshots.Get(ctx, ref)
	if err != nil || x.Source.VMID != m.id || x.Kept {
		return
	}
	if err := m.removeStored(ctx, x.ID); err != nil {
		m.log.Warn("snapshot of an earlier hibernation not removed", "vm", m.id, "snapshot", x.ID, "err", err)
	}
}

// dropHibernation removes the snapshots in which m is or was hibernated. The snapshot that a VM was cloned from is
// not its own. A snapshot that somebody holds or that was kept (SaveSnapshot) stays.
func (m *machine) dropHibernation(ctx context.Context) {
	if m.snapshots == nil {
		return
	}
	m.dropStale(ctx, hibernation(m.id))
	if r := m.record(); r.Snapshot != "" && r.State != vm.StateRunning {
		m.dropStale(ctx, r.Snapshot)
	}
}
