package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Start starts a VM that does not run. Starting a running VM is no error.
func (e *Engine) Start(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opStart, ref, (*machine).start)
}

func (m *machine) start(ctx context.Context) (vm.Record, error) {
	r := m.record()
	switch r.State {
	case vm.StateRunning:
		return r, nil
	case vm.StateHibernated:
		return m.wake(ctx)
	case vm.StateCreated, vm.StateStopped:
	default:
		return r, broken(r)
	}
	if err := netted(r); err != nil {
		return r, err
	}
	if r.BootContainer != "" {
		return r, errdefs.Preconditionf("its guest is its container %s, and starts with that", r.BootContainer)
	}
	return m.startStopped(ctx, r)
}

// startStopped starts m, whose record is r.
func (m *machine) startStopped(ctx context.Context, r vm.Record) (vm.Record, error) {
	if err := m.startable(r); err != nil {
		return r, err
	}
	return startOperation.run(ctx, m, &start{machine: m}, nil)
}

// start boots a VM that has its disks.
type start struct {
	*machine
	back undo.Stack
}

var startOperation = operation[*start]{
	name: opStart, told: true, recall: recallStart,
	steps: []step[*start]{
		{word: stepNetwork, run: (*start).attach, undo: (*start).undo, recover: (*start).recover},
		{word: stepLaunch, run: (*start).launch, undo: (*start).undo, recover: (*start).recover},
	},
}

func recallStart(m *machine, _ journal.Intent) (*start, error) { return &start{machine: m}, nil }

// attach creates the NICs and what depends on them.
func (s *start) attach(ctx context.Context) (outcome, error) {
	r := s.record()
	boot, err := s.bootOf(r.ID, r.Driver, r.Spec, r.ImageType) // the path of the kernel may have changed
	if err != nil {
		return outcome{}, err
	}
	if err := s.dirs.make(s.id); err != nil { // a reboot of the host removes the runtime folder
		return outcome{}, err
	}
	if r.Spec.Sandbox { // the guest that boots has no containers yet
		if err := s.dirs.unshare(s.id); err != nil {
			return outcome{}, err
		}
	}
	sums, err := s.layKernel(ctx, r)
	if err != nil {
		return outcome{}, err
	}
	nics, err := s.nics.attach(ctx, r, &s.back, false)
	if err != nil {
		return outcome{}, err
	}
	disks, err := s.seed(ctx, r, nics)
	if err != nil {
		return outcome{}, err
	}
	if disks, err = s.withHostDisks(r, disks); err != nil {
		return outcome{}, err
	}
	has, err := s.withVolumes(ctx, r, disks, nil)
	if err != nil {
		return outcome{}, err
	}
	return outcome{change: func(r *vm.Record) {
		r.Boot, r.NICs, r.Disks, r.Attached = boot, nics, has.disks, has.attached
		r.KernelSums = sums
		r.Resume, r.Cloned = nil, false // a guest that boots has no identity of another VM
	}}, nil
}

func (s *start) launch(ctx context.Context) (outcome, error) {
	done, err := s.boot(ctx, &s.back)
	watch := done.then
	done.then = func(ctx context.Context) {
		watch(ctx)
		s.shorten(ctx)
	}
	return done, err
}

// undo leaves the VM as it was before, but the record says what happened.
func (s *start) undo(ctx context.Context, err error) error {
	if undone := s.back.Run(ctx); undone != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w; remove the VM", undone))
		s.fail(ctx, opStart, vm.ReasonStartFailed, err)
		return err
	}
	failed := s.settle(ctx, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonStartFailed, err.Error() })
	if failed != nil {
		err = errors.Join(err, failed)
		s.fail(ctx, opStart, vm.ReasonStartFailed, err)
	}
	return err
}

// recover makes the VM as it was before, unless its process is on record.
func (s *start) recover(ctx context.Context) (next string, err error) {
	if len(s.record().Handle) > 0 {
		return "", s.adoptAndSettle(ctx)
	}
	if err := s.reap(ctx); err != nil {
		return "", err
	}
	if err := s.nics.detachAll(ctx, s.record()); err != nil {
		return "", err
	}
	return "", s.settle(ctx, func(r *vm.Record) {
		r.Reason, r.Message = vm.ReasonStartFailed, "its start was interrupted when cocoond ended; start it again"
	})
}
