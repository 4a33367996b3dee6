package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// What to do about saved state that does not resume on this node.
const (
	remedyClone   = "clone it on a node that matches, or clone it cold"
	remedySandbox = "resume it on a node that matches"
	remedyWake    = "make this node as it was then and wake the VM, or save a snapshot of the VM and clone that cold"
	remedyRestore = "make this node as it was then, restore another snapshot, or clone this one cold"
)

// resumable refuses saved state that cannot resume here, and returns the accelerator with which it can. Only the program that saved it can read it. An
// emulated guest stays emulated, even if something better is available now. A refusal names both programs, and ends with remedy.
// Errors: FailedPrecondition, Unavailable if that program does not work here now.
func (ds drivers) resumable(ctx context.Context, x snapshot.Snapshot, accel vm.Accel, remedy string) (vm.Accel, error) {
	d := ds[x.Hypervisor]
	teller, ok := hypervisor.As[hypervisor.MachineTeller](d)
	if !ok {
		return accel, errdefs.Preconditionf("it was saved by %s, which this node does not have; %s; %s", savedBy(x), ds.programs(ctx), remedy)
	}
	_, err := d.Probe(ctx)
	var host vm.Machine
	if err == nil {
		host, err = teller.Machine(ctx, accel)
	}
	if errdefs.IsUnavailable(err) {
		return accel, fmt.Errorf("it was saved by %s, which does not work on this node: %w; %s; %s", savedBy(x), err, ds.programs(ctx), remedy)
	}
	if err != nil {
		return accel, err
	}
	if err = x.Machine.Resumes(host); err == nil {
		return accel, nil
	}
	if accel == vm.AccelAuto && x.Machine.Accel == vm.AccelTCG && host.Accel != vm.AccelTCG {
		return ds.resumable(ctx, x, vm.AccelTCG, remedy)
	}
	return accel, fmt.Errorf("%w; %s", err, remedy)
}

// savedBy names the program that saved x.
func savedBy(x snapshot.Snapshot) string {
	m := x.Machine
	m.Driver = x.Hypervisor
	return m.Program()
}

// programs says for a message which work here.
func (ds drivers) programs(ctx context.Context) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(ds)) {
		teller, ok := hypervisor.As[hypervisor.MachineTeller](ds[name])
		if !ok || !ds.usable(ctx, name) {
			continue
		}
		if m, err := teller.Machine(ctx, vm.AccelAuto); err == nil {
			all = append(all, m.Program())
		}
	}
	if len(all) == 0 {
		return "no hypervisor works here"
	}
	return "what works here is " + list(all)
}
