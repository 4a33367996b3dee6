package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Stop asks the guest to power off, by its agent or ACPI, and kills it after grace (negative: that of the spec, zero:
// at once). Stopping a VM that does not run is no error. If ctx ends first, the guest has been asked and may still
// stop.
func (e *Engine) Stop(caller context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return e.stopVM(caller, ref, grace)
}

func (n *node) stopVM(caller context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return n.operate(caller, opStop, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		r := m.record()
		switch r.State {
		case vm.StateRunning:
		case vm.StateCreated, vm.StateStopped, vm.StateHibernated:
			return r, nil
		default:
			return r, broken(r)
		}
		s := &stop{machine: m, grace: graceOf(r, grace)}
		return stopOperation.run(ctx, m, s, s.args())
	})
}

// graceOf is how long the guest of r gets to stop.
func graceOf(r vm.Record, asked time.Duration) time.Duration {
	if asked < 0 {
		return r.Spec.StopGrace
	}
	return asked
}

// stop ends the process of a VM.
type stop struct {
	*machine
	grace time.Duration
	ended bool // the process has ended
	left  bool // by an earlier process of the engine: nobody may have cleaned up
}

var stopOperation = operation[*stop]{
	name: opStop, told: true, recall: recallStop,
	steps: []step[*stop]{
		{word: stepShutdown, run: (*stop).shutDown, undo: (*stop).undo, recover: (*stop).recover, lasting: true},
	},
}

// stopArgs are the journal arguments of stop and restart.
type stopArgs struct {
	Grace time.Duration `json:"grace"` // nanoseconds
}

func (s *stop) args() []byte {
	b, _ := json.Marshal(stopArgs{s.grace}) // a struct of one number always encodes
	return b
}

// recallStop returns an unfinished stop with the rest of its grace.
func recallStop(m *machine, in journal.Intent) (*stop, error) {
	var args stopArgs
	if err := json.Unmarshal(in.Args, &args); err != nil {
		m.log.Warn("arguments of unfinished operation not readable", "vm", m.id, "op", in.Op, "err", err)
	}
	return &stop{machine: m, grace: max(args.Grace-time.Since(in.Began), 0), left: true}, nil
}

// shutDown ends the process.
func (s *stop) shutDown(ctx context.Context) (outcome, error) {
	how := ending{asked: true}
	if r := s.run.Load(); r != nil {
		var err error
		if how, err = s.halt(ctx, r); err != nil {
			return outcome{}, err
		}
	} else if s.left { // it has ended, and nobody cleaned up after it
		if err := s.reap(ctx); err != nil {
			return outcome{}, err
		}
	}
	s.reclaim(ctx)
	s.ended = true
	at := now()
	return outcome{change: func(r *vm.Record) {
		stopped(r, how, at)
		if how.killed && s.grace > 0 {
			r.Message = fmt.Sprintf("it did not stop within %s and was killed", s.grace)
		}
	}}, nil
}

// undo leaves a VM that could not be stopped as it is. What recovery could not clean up is left to the next one.
func (s *stop) undo(ctx context.Context, err error) error {
	switch {
	case s.ended:
		s.fail(ctx, opStop, vm.ReasonStopped, err)
	case s.run.Load() != nil:
		s.settleFailed(ctx, opStop, same)
	}
	return err
}

func (s *stop) recover(ctx context.Context) (next string, err error) {
	return stepShutdown, s.reattach(ctx)
}

// halt ends the process r. Its error is that of ctx, or says that the process cannot be killed.
func (s *stop) halt(ctx context.Context, r *run) (ending, error) {
	r.Asked.Store(true)
	how := ending{asked: true}
	if s.grace > 0 && s.record().Paused == vm.PausedAtStart {
		s.grace = 0 // it has not run, so there is nothing that it could end in order
	}
	s.noReboot(ctx, r)
	if s.grace > 0 {
		if err := s.wakeUp(ctx, r); err != nil {
			return how, err
		}
		limit := s.grace
		if r.link.OurAgent() { // it uses the whole grace before it powers off
			limit += s.cfg.StopMargin
		}
		asking, cancel := context.WithTimeout(ctx, limit)
		s.ask(asking, r)
		cancel()
	}
	if !r.Over() {
		if err := ctx.Err(); err != nil {
			return how, err
		}
		how.killed = true
		if err := r.Kill(ctx); err != nil {
			return how, err
		}
	}
	how.exit = r.Exit()
	return how, nil
}

// wakeUp lets a paused guest run, so that it can power off. If it cannot be resumed, it is killed in the end.
func (s *stop) wakeUp(ctx context.Context, r *run) error {
	if s.record().Paused == "" {
		return nil
	}
	if _, err := s.unpause(ctx); err != nil && ctx.Err() == nil && !r.Over() {
		s.log.Warn("paused guest not resumed to power off", "vm", s.id, "err", err)
	}
	return ctx.Err()
}

// ask tells the guest to power off and waits for it until ctx ends. The agent is asked as soon as it is connected.
// Until then, and if it refuses, ask uses the power button.
func (s *stop) ask(ctx context.Context, r *run) {
	began := time.Now()
	pressed, told := false, false
	for {
		agent, _, changed := r.link.Peek()
		if agent != nil && !told {
			told = agent.Poweroff(ctx, max(s.grace-time.Since(began), 0)) == nil
		}
		if !told && !pressed {
			pressed = true
			if err := r.Inst.Shutdown(ctx); err != nil {
				s.log.Debug("shutdown signal not sent to guest", "vm", s.id, "err", err)
			}
		}
		select {
		case <-r.Ended():
			return
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
