package engine

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// own gives a record from before owners existed, and the snapshots of its VM, the owner that its labels name.
func (n *node) own(ctx context.Context, r vm.Record) (vm.Record, error) {
	if !r.Owner.Operator() || n.cfg.OwnerOf == nil {
		return r, nil
	}
	owner := n.cfg.OwnerOf(r.Spec.Labels)
	if owner.Operator() {
		return r, nil
	}
	ids := slices.Clone(r.SnapshotIDs)
	if r.State == vm.StateHibernated {
		ids = append(ids, r.Snapshot)
	}
	for _, id := range ids {
		if n.snapshots == nil {
			break
		}
		_, err := n.snapshots.Update(ctx, id, func(x *snapshot.Snapshot) {
			if x.Source.VMID == r.ID && x.Owner.Operator() {
				x.Owner = owner
			}
		})
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.Is(err, errdefs.DataLoss) {
			return r, fmt.Errorf("set the owner of snapshot %s of vm %s: %w", id, r.ID, err)
		}
	}
	r.Owner = owner
	owned, err := n.journal.Update(ctx, r)
	if err != nil {
		return r, fmt.Errorf("set the owner of vm %s: %w", r.ID, err)
	}
	n.log.Info("vm of an earlier release has an owner now", "vm", r.ID, "namespace", owner.Namespace)
	return owned, nil
}

// recover recovers m, whose unfinished operation is in (nil: none), and releases it, which the caller holds. A long
// operation continues in a worker. A VM that cannot be recovered goes to StateError with the reason; the others
// continue.
func (m *machine) recover(ctx context.Context, in *journal.Intent, release func()) {
	op := opAdopt
	var rest func(context.Context) error
	var err error
	if in == nil {
		if err = m.adopt(ctx); err == nil {
			m.tidy() // an operation may have been interrupted right after it was settled
		}
	} else {
		op = in.Op
		m.log.Info("unfinished operation", "vm", m.id, "op", op, "step", in.Step)
		if o := operationOf(*in); o != nil {
			rest, err = o.recover(ctx, m, *in)
		} else {
			err = errdefs.Unsupportedf("this version of Cocoon does not know the operation %q", op)
		}
	}
	if rest == nil {
		defer release()
	}
	if err != nil && ctx.Err() == nil {
		m.log.Error("vm not recovered", "vm", m.id, "op", op, "err", err)
		m.fail(ctx, op, m.record().Reason, fmt.Errorf("%s: %w", op, err))
	}
	if rest == nil {
		return
	}
	m.life.spawn(func(ctx context.Context) {
		defer release()
		ctx, cancel := m.life.bound(ctx)
		defer cancel()
		if err := rest(ctx); err != nil && m.life.serving.Err() == nil {
			m.log.Error("unfinished operation failed", "vm", m.id, "op", op, "err", err)
		}
	})
}

// unplugDown removes the NICs of VMs that do not run and that no operation is about to start.
func (n *node) unplugDown(ctx context.Context, busy func(vm.ID) bool) {
	for _, m := range n.vms.all() {
		r := m.record()
		down := r.State == vm.StateStopped || r.State == vm.StateCreated || r.State == vm.StateHibernated
		if !down || busy(m.id) {
			continue
		}
		if err := n.nics.detach(ctx, r.NICs, false); err != nil {
			n.log.Warn("interfaces of vm not removed", "vm", m.id, "err", err)
		}
	}
}
