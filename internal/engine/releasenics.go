package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// opReleaseNICs names the operation in messages. The journal has no intent for it: to release an interface again does nothing, and the record
// has the interfaces until all are released.
const opReleaseNICs = "release nics"

// ReleaseNICs gives the interfaces of a sandbox that does not run back to their networks, with their addresses. The sandbox never starts
// again. It is no error if it has none any more.
// Errors: NotFound, FailedPrecondition if it runs or is no sandbox, those of the networks.
func (v nicVerbs) ReleaseNICs(caller context.Context, ref string) (vm.Record, error) {
	return v.operate(caller, opReleaseNICs, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		r := m.record()
		switch {
		case !r.Spec.Sandbox:
			return r, errdefs.Preconditionf("it is no sandbox, and keeps its interfaces until it is removed")
		case r.State == vm.StateRunning:
			return r, errdefs.Preconditionf("it is running; stop it first")
		case len(r.NICs) == 0:
			return r, nil
		}
		if err := m.nics.detach(context.WithoutCancel(ctx), r.NICs, true); err != nil {
			return r, err
		}
		return m.update(ctx, func(r *vm.Record) { r.NICs = nil })
	})
}
