package engine

import (
	"context"
	"errors"

	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// opSetLink names the operation in messages. The journal has no intent for it. The engine writes the wanted link into the spec first, then tells the
// hypervisor, and then writes that the device has it. Recovery does the rest where the two differ; see settleLinks.
const opSetLink = "set link"

// SetLink sets the link of an interface of a VM down, or up, until it is told otherwise, over restarts of the VM and of the engine. ref is the network
// of the interface, or its hardware address; the first interface is no exception. A guest that runs sees the change at once. While the link is down,
// no packet passes. It is no error if the link is so already.
// Errors: NotFound, InvalidArgument if several interfaces are on the network, FailedPrecondition, Unsupported. After an error the link is as before.
func (v nicVerbs) SetLink(caller context.Context, vmRef, ref string, down bool) (vm.Record, error) {
	return v.operate(caller, opSetLink, vmRef, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.setLink(ctx, ref, down)
	})
}

// linkTaken returns r with the link of its i-th interface down.
func linkTaken(r vm.Record, i int) vm.Record {
	r.Spec = r.Spec.WithLink(i, true)
	return r.WithLink(i, true)
}

func (m *machine) setLink(ctx context.Context, ref string, down bool) (vm.Record, error) {
	r := m.record()
	i, err := r.Spec.NICBy(ref, r.NICs)
	if err != nil {
		return r, err
	}
	was := r.Spec.NICs[i].LinkDown
	if was == down && r.NICs[i].LinkDown == down {
		return r, nil
	}
	if r.State == vm.StateError {
		return r, broken(r)
	}
	if down {
		if err := m.possible(ctx, linkTaken(r, i)); err != nil {
			return r, err
		}
	}
	want := func(down bool) func(*vm.Record) { return func(r *vm.Record) { r.Spec = r.Spec.WithLink(i, down) } }
	if r.State != vm.StateRunning {
		return m.update(ctx, func(r *vm.Record) { want(down)(r); *r = r.WithLink(i, down) })
	}
	if _, err := m.linker(); err != nil {
		return r, err
	}
	if r, err = m.update(ctx, want(down)); err != nil {
		return r, err
	}
	if err := m.relink(ctx, i); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
		defer cancel()
		_, undone := m.update(ctx, func(r *vm.Record) { want(was)(r); *r = r.WithLink(i, down) }) // which the guest may have
		if undone == nil && m.runs() {
			undone = m.relink(ctx, i)
		}
		return m.record(), errors.Join(endedProcess(err), undone)
	}
	return m.record(), nil
}
