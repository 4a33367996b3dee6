package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Start starts a VM that does not run. Starting a running VM is no error.
func (e *Engine) Start(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opStart, ref, e.start)
}

// operate runs act on the VM of ref when its turn comes.
func (e *Engine) operate(caller context.Context, op, ref string, act func(context.Context, *machine) (vm.Record, error)) (vm.Record, error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	m, release, err := e.take(ctx, ref)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, err)
	}
	defer release()
	began := time.Now()
	r, err := act(vm.OnBehalf(ctx, m.record().Owner), m) // what is made from a VM belongs to the owner of the VM, whoever asked
	if err == nil {
		err = e.durable(ctx)
	}
	if err != nil {
		return r.Clone(), e.life.ended(caller, fmt.Errorf("%s vm %s: %w", op, m.name(), err))
	}
	e.log.Info("vm operated on", "vm", m.id, "op", op, "dur", time.Since(began))
	return r.Clone(), nil
}

func (e *Engine) start(ctx context.Context, m *machine) (vm.Record, error) {
	r := m.record()
	switch r.State {
	case vm.StateRunning:
		return r, nil
	case vm.StateHibernated:
		return e.wake(ctx, m)
	case vm.StateCreated, vm.StateStopped:
	default:
		return r, broken(r)
	}
	if err := e.startable(r); err != nil {
		return r, err
	}
	if err := e.open(ctx, m, opStart, stepNetwork, nil); err != nil {
		return r, err
	}
	return e.bootUp(ctx, m, stepLaunch)
}

// startable refuses a start that would fail anyway, before anything changes.
func (e *Engine) startable(r vm.Record) error {
	if _, err := e.driver(r.Driver); err != nil {
		return err
	}
	_, err := e.boot(r.Spec, r.ImageType)
	return err
}

// bootUp attaches and starts m under the open intent, and settles the intent in every case.
func (e *Engine) bootUp(ctx context.Context, m *machine, step string) (vm.Record, error) {
	var back undo.Stack
	r, err := e.attachAndBoot(ctx, m, step, &back)
	if err == nil {
		e.shorten(ctx, m)
		return r, nil
	}
	if undone := back.Run(ctx); undone != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w; remove the VM", undone))
		e.fail(ctx, m, vm.ReasonStartFailed, err)
		return m.record(), err
	}
	// The VM is as before, but the record says what happened.
	r, failed := e.commit(ctx, m, e.journal.Settle, func(r *vm.Record) {
		r.Reason, r.Message = vm.ReasonStartFailed, err.Error()
	})
	if failed != nil {
		err = errors.Join(err, failed)
		e.fail(ctx, m, vm.ReasonStartFailed, err)
	}
	return r, err
}

func (e *Engine) attachAndBoot(ctx context.Context, m *machine, step string, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	boot, err := e.boot(r.Spec, r.ImageType) // the path of the kernel may have changed
	if err != nil {
		return r, err
	}
	if err := e.makeDirs(m.id); err != nil { // a reboot of the host removes the runtime folder
		return r, err
	}
	nics, err := e.attach(ctx, r, back, false)
	if err != nil {
		return r, err
	}
	disks, err := e.seed(ctx, r, nics)
	if err != nil {
		return r, err
	}
	if _, err := e.commit(ctx, m, e.step(step), func(r *vm.Record) {
		r.Boot, r.NICs, r.Disks = boot, nics, disks
		r.Resume, r.Cloned = nil, false // a guest that boots has no identity of another VM
	}); err != nil {
		return r, err
	}
	return e.bootVM(ctx, m, back)
}

// bootVM boots m as its record says, settles the intent and watches the process from then on.
func (e *Engine) bootVM(ctx context.Context, m *machine, back *undo.Stack) (vm.Record, error) {
	return e.launchProcess(ctx, m, m.record(), launchOptions{log: m.log.Begin, done: e.journal.Settle}, back)
}

// launchOptions says how a process starts and what is recorded about it.
type launchOptions struct {
	ready    func() error         // waits for what must exist before the process is recorded; may be nil
	inst     hypervisor.Instance  // already running; nil: one is launched
	incoming *hypervisor.Incoming // saved state to resume from; nil: it boots
	log      func() error         // begins the log, or continues it
	change   func(*vm.Record)     // what else the process changes in the record; may be nil
	done     put
}

// launchProcess starts the process of m as r says, records it and watches it. r may be newer than m's record.
func (e *Engine) launchProcess(ctx context.Context, m *machine, r vm.Record, f launchOptions, back *undo.Stack) (vm.Record, error) {
	d, err := e.driver(r.Driver)
	if err != nil {
		return m.record(), err
	}
	if err := f.log(); err != nil {
		return m.record(), err
	}
	back.Push(func(context.Context) error { m.finishLogs(); return nil })
	inst := f.inst
	if inst == nil {
		plan := planOf(r, e.runDir(m.id))
		plan.Incoming = f.incoming
		if inst, err = d.Launch(ctx, plan); err != nil {
			return m.record(), err
		}
		back.Push(func(ctx context.Context) error { return errors.Join(inst.Kill(ctx), inst.Close()) })
	}
	if f.ready != nil {
		if err := f.ready(); err != nil {
			return m.record(), err
		}
	}
	if err := e.born(m.id); err != nil {
		return m.record(), err
	}
	handle, pid, at := inst.Handle(), inst.PID(), now()
	r, err = e.commit(ctx, m, e.synced(f.done), func(r *vm.Record) {
		started(r, handle, pid, at)
		if f.inst == nil && f.incoming == nil {
			r.Containers = eachContainer(r.Containers, again)
		}
		if f.change != nil {
			f.change(r)
		}
	})
	if err != nil {
		return r, err
	}
	e.attend(m, inst)
	return r, nil
}

// broken explains why r can only be removed.
func broken(r vm.Record) error {
	return errdefs.Preconditionf("it is in state %s (%s); remove it", r.State, r.Message)
}
