package engine

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// aftermath removes the earlier state of a VM whose guest has resumed: the last step of wake and restore.
type aftermath struct {
	answered bool // the guest has answered
	cleaned  bool // and the earlier state is removed
}

// clean removes the earlier state of m: the snapshot id that it was hibernated in, "" for none, and files in its
// folder.
func (a *aftermath) clean(ctx context.Context, m *machine, id string, files ...string) (outcome, error) {
	if err := m.durable(ctx); err != nil { // until then, the VM may still be in its earlier state after a power cut
		return outcome{}, err
	}
	m.tidy(files...)
	m.dropSlept(ctx, id)
	a.cleaned = true
	return outcome{}, nil
}

// cleanUnsettled is clean for when the journal did not take that it begins. Then the operation is settled first: a
// crash before the rest leaves something behind, but loses nothing. If the journal fails again, the next operation or
// recovery does it.
func (a *aftermath) cleanUnsettled(ctx context.Context, m *machine, id string, files ...string) error {
	if err := m.settle(ctx, same); err != nil {
		m.log.Error("vm runs again, but the journal did not record it", "vm", m.id, "err", err)
		return nil
	}
	_, err := a.clean(ctx, m, id, files...)
	return err
}

// undo leaves the operation of m open if the earlier state could not be removed: the next operation or recovery does
// that.
func (a *aftermath) undo(m *machine, err error) error {
	if !a.cleaned {
		return err
	}
	m.log.Error("vm runs again, but its operation is still open in the journal", "vm", m.id, "err", err)
	return nil
}

// dropSlept removes the snapshot id that m was hibernated in, "" for none. A snapshot that was kept stays.
func (m *machine) dropSlept(ctx context.Context, id string) {
	if id == "" {
		return
	}
	if x, err := m.snapshots.Get(ctx, id); err == nil && x.Kept {
		return
	}
	if err := m.removeStored(context.WithoutCancel(ctx), id); err != nil && !errdefs.IsNotFound(err) {
		m.log.Warn("hibernation snapshot of a running vm not removed", "vm", m.id, "snapshot", id, "err", err)
	}
}

// damaged adds to err what to do, if err says that the files of x are damaged.
func damaged(x snapshot.Snapshot, err error) error {
	if !errdefs.Is(err, errdefs.DataLoss) {
		return err
	}
	return fmt.Errorf("snapshot %s is damaged: %w; it is not deleted; get another copy of it from a registry or a backup, or use another snapshot", x.Name, err)
}

// unusable records that m cannot be woken because of err, if that is permanent. It changes nothing else.
func (m *machine) unusable(ctx context.Context, err error) (vm.Record, error) {
	r := m.record()
	if !errdefs.Is(err, errdefs.DataLoss) {
		return r, err
	}
	if x, known := m.snapshots.Get(ctx, r.Snapshot); known == nil {
		err = damaged(x, err)
	}
	if _, failed := m.update(ctx, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonDataLoss, err.Error() }); failed != nil {
		m.log.Error("damage of the saved state not recorded", "vm", m.id, "err", failed)
	}
	return m.record(), err
}

// hibernation is the name of the snapshot in which a VM is hibernated if the caller gives no other.
func hibernation(id vm.ID) string { return "hibernate-" + string(id) }
