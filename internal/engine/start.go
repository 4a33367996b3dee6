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

// Start starts a VM that does not run. Starting one that runs is no error.
func (e *Engine) Start(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opStart, ref, e.start)
}

// operate runs act on the VM of ref in its turn.
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
	r, err := act(vm.OnBehalf(ctx, m.record().Owner), m) // whoever asked: what is made of a VM belongs to whom the VM does
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

// startable refuses what would fail anyhow, before anything is changed.
func (e *Engine) startable(r vm.Record) error {
	if _, err := e.driver(r.Driver); err != nil {
		return err
	}
	_, err := e.boot(r.Spec, r.ImageType)
	return err
}

// bootUp plugs and starts m under the intent that is open, and settles it whatever happens.
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
	// It is as it was before, with a word on what happened.
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
	boot, err := e.boot(r.Spec, r.ImageType) // where the kernel is may have changed since
	if err != nil {
		return r, err
	}
	if err := e.makeDirs(m.id); err != nil { // the runtime folder is gone after a reboot of the host
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
		r.Resume, r.Cloned = nil, false // what boots is nobody else's
	}); err != nil {
		return r, err
	}
	return e.bootVM(ctx, m, back)
}

// bootVM boots m as its record says, settles the intent and attends to it from then on.
func (e *Engine) bootVM(ctx context.Context, m *machine, back *undo.Stack) (vm.Record, error) {
	return e.launchProcess(ctx, m, m.record(), launchOptions{log: m.log.Begin, done: e.journal.Settle}, back)
}

// launchOptions is how a process comes to be and what is written down of it.
type launchOptions struct {
	ready    func() error         // waits for what has to be there before it is written down; may be nil
	inst     hypervisor.Instance  // that runs already; nil: one is launched
	incoming *hypervisor.Incoming // nil: it boots
	log      func() error         // begins the log, or goes on with it
	change   func(*vm.Record)     // that the process makes to the record besides being there; may be nil
	done     put
}

// launchProcess starts the process of m as r says, which may be ahead of its record, writes it down and attends to it.
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

// broken says why nothing can be done with r but removing it.
func broken(r vm.Record) error {
	return errdefs.Preconditionf("it is in state %s (%s); remove it", r.State, r.Message)
}
