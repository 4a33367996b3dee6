package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// stopArgs are the journal arguments of stop and restart.
type stopArgs struct {
	Grace time.Duration `json:"grace"` // nanoseconds
}

// Stop asks the guest to power off, by its agent or ACPI, and kills it after grace (negative: that of the spec, zero:
// at once). Stopping a VM that does not run is no error. If ctx ends first, the guest has been asked and may still
// stop.
func (e *Engine) Stop(caller context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return e.operate(caller, opStop, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		r := m.record()
		switch r.State {
		case vm.StateRunning:
		case vm.StateCreated, vm.StateStopped, vm.StateHibernated:
			return r, nil
		default:
			return r, broken(r)
		}
		args := argsOf(r, grace)
		if err := e.open(ctx, m, opStop, stepShutdown, args.json()); err != nil {
			return r, err
		}
		return e.stop(ctx, m, args.Grace, e.journal.Settle)
	})
}

// Restart stops a VM as Stop does, if it runs, and starts it.
func (e *Engine) Restart(caller context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return e.operate(caller, opRestart, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		r := m.record()
		if r.State != vm.StateRunning {
			return e.start(ctx, m)
		}
		if err := e.startable(r); err != nil {
			return r, err
		}
		args := argsOf(r, grace)
		if err := e.open(ctx, m, opRestart, stepShutdown, args.json()); err != nil {
			return r, err
		}
		return e.restart(ctx, m, args.Grace)
	})
}

func (e *Engine) restart(ctx context.Context, m *machine, grace time.Duration) (vm.Record, error) {
	if r, err := e.stop(ctx, m, grace, e.step(stepLaunch)); err != nil {
		return r, err
	}
	return e.bootUp(ctx, m, stepLaunch)
}

func argsOf(r vm.Record, grace time.Duration) stopArgs {
	if grace < 0 {
		grace = r.Spec.StopGrace
	}
	return stopArgs{Grace: grace}
}

func (a stopArgs) json() []byte {
	b, _ := json.Marshal(a) // a struct of one number always encodes
	return b
}

// stop ends the process of m under the open intent and records that with done. If Run ends meanwhile, the intent
// stays open: the next Run finishes it.
func (e *Engine) stop(ctx context.Context, m *machine, grace time.Duration, done put) (vm.Record, error) {
	r := m.run.Load()
	how := ending{asked: true}
	if r != nil {
		var err error
		if how, err = e.halt(ctx, r, grace); err != nil {
			if e.life.serving.Err() != nil {
				return m.record(), err
			}
			if _, settled := e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {}); settled != nil {
				e.log.Error("vm not stopped, and its operation not settled", "vm", m.id, "err", settled)
			}
			return m.record(), err
		}
	}
	e.reclaim(ctx, m, r)
	at := now()
	rec, err := e.commit(ctx, m, done, func(r *vm.Record) {
		stopped(r, how, at)
		if how.killed && grace > 0 {
			r.Message = fmt.Sprintf("it did not stop within %s and was killed", grace)
		}
	})
	if err != nil {
		e.fail(ctx, m, vm.ReasonStopped, err)
	}
	return rec, err
}

// halt ends the process of r. Its error is that of ctx, or says that the process cannot be killed.
func (e *Engine) halt(ctx context.Context, r *run, grace time.Duration) (ending, error) {
	r.asked.Store(true)
	how := ending{asked: true}
	if grace > 0 {
		limit := grace
		if r.link != nil && r.link.kind == vm.ImageOCI { // our own agent uses the whole grace before it powers off
			limit += e.cfg.StopMargin
		}
		asking, cancel := context.WithTimeout(ctx, limit)
		e.ask(asking, r, grace)
		cancel()
	}
	if !r.over() {
		if err := ctx.Err(); err != nil {
			return how, err
		}
		how.killed = true
		if err := kill(ctx, r); err != nil {
			return how, err
		}
	}
	how.exit = r.exit
	return how, nil
}

// kill ends the process of r and waits until it is known to have ended.
func kill(ctx context.Context, r *run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if err := r.inst.Kill(ctx); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	select {
	case <-r.ended:
		return nil
	case <-ctx.Done():
		return errdefs.Unavailablef("the process was killed but its end was not noticed within %s", undo.Limit)
	}
}

// ask tells the guest to power off and waits for it until ctx ends. The agent is asked as soon as it is connected.
// Until then, and if it refuses, ask uses the power button.
func (e *Engine) ask(ctx context.Context, r *run, grace time.Duration) {
	began := time.Now()
	pressed, told := false, false
	for {
		agent, _, changed := r.link.peek()
		if agent != nil && !told {
			told = agent.Poweroff(ctx, max(grace-time.Since(began), 0)) == nil
		}
		if !told && !pressed {
			pressed = true
			if err := r.inst.Shutdown(ctx); err != nil {
				e.log.Debug("power button not pressed", "vm", r.id, "err", err)
			}
		}
		select {
		case <-r.ended:
			return
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
