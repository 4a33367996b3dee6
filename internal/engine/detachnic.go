package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// DetachNIC takes a further interface from a VM, and releases its addresses. ref is its network or its hardware address. The first interface stays.
// Errors: NotFound (VM; interface, also if it was detached already), InvalidArgument for the first interface, FailedPrecondition if the VM is
// hibernated or paused, Unsupported, Unavailable when the guest does not release it. After an error the VM has the interface, but its guest may
// have lost it: detach it again.
func (v nicVerbs) DetachNIC(caller context.Context, vmRef, ref string) (vm.Record, error) {
	return v.operate(caller, opDetachNIC, vmRef, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.detachNIC(ctx, ref)
	})
}

func (m *machine) detachNIC(ctx context.Context, ref string) (vm.Record, error) {
	r := m.record()
	i, err := r.Spec.NICOn(ref, r.NICs)
	if err != nil {
		return r, err
	}
	if err := m.pluggable(ctx, r); err != nil {
		return r, err
	}
	x := nicArgs{Spec: r.Spec.NICs[i], Place: r.Spec.Place(i)}
	x.Spec.Network = m.nics.name(x.Spec)
	return detachNICOperation.run(ctx, m, &nicDetachment{moving{m, x}}, x.json())
}

// nicDetachment takes an interface from a VM. The guest comes first: it may refuse. The address is released when the interface is gone, and only then
// the record has it no longer.
type nicDetachment struct{ moving }

var detachNICOperation = operation[*nicDetachment]{
	name: opDetachNIC, told: true, recall: recallNICDetachment,
	steps: []step[*nicDetachment]{
		{word: stepLeave, run: (*nicDetachment).leave, undo: (*nicDetachment).undo, recover: (*nicDetachment).recover, lasting: true},
		{word: stepUnplug, run: (*nicDetachment).unplug, undo: (*nicDetachment).undo, recover: (*nicDetachment).recover, lasting: true},
		{word: stepNetwork, run: (*nicDetachment).release, undo: (*nicDetachment).undo, recover: (*nicDetachment).recover, lasting: true},
	},
}

func recallNICDetachment(m *machine, in journal.Intent) (*nicDetachment, error) {
	args, err := nicArgsOf(in)
	return &nicDetachment{moving{m, args}}, err
}

// leave says that nobody expects the interface in the guest any more.
func (x *nicDetachment) leave(context.Context) (outcome, error) {
	if x.record().State != vm.StateRunning {
		return outcome{}, nil
	}
	return outcome{change: func(r *vm.Record) { *r = r.Unsettled(x.Place) }}, nil
}

func (x *nicDetachment) unplug(ctx context.Context) (outcome, error) {
	if !x.runs() {
		return outcome{}, nil
	}
	return outcome{}, x.remove(ctx)
}

func (x *nicDetachment) release(ctx context.Context) (outcome, error) {
	if err := x.durable(ctx); err != nil { // somebody else may have the address as soon as it is free
		return outcome{}, err
	}
	if err := x.free(ctx); err != nil {
		return outcome{}, err
	}
	return outcome{synced: true, change: x.gone, then: x.tell}, nil
}

// tell lets the guest forget the name servers of the interface.
func (x *nicDetachment) tell(ctx context.Context) {
	run := x.run.Load()
	if run == nil || x.record().State != vm.StateRunning {
		return
	}
	if err := run.link.Reconfigure(ctx, x.record(), attachPatience); err != nil && !errdefs.IsFailedPrecondition(err) {
		x.log.Info("guest does not forget the network of an interface that is gone", "vm", x.id, "network", x.Spec.Network, "err", err)
	}
}

// undo leaves the interface with the VM. Its guest may have lost it, or lose it yet.
func (x *nicDetachment) undo(ctx context.Context, cause error) error {
	x.settleFailed(context.WithoutCancel(ctx), opDetachNIC, same)
	return cause
}

// recover goes on where the earlier process of the engine ended.
func (x *nicDetachment) recover(ctx context.Context) (next string, err error) {
	_, err = x.readopt(ctx)
	return stepLeave, err
}
