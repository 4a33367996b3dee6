package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Restart stops a VM as Stop does, if it runs, and starts it.
func (e *Engine) Restart(caller context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return e.operate(caller, opRestart, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		r := m.record()
		if r.State != vm.StateRunning {
			return m.start(ctx)
		}
		if err := m.startable(r); err != nil {
			return r, err
		}
		x := &restart{stop: &stop{machine: m, grace: graceOf(r, grace)}, start: &start{machine: m}}
		return restartOperation.run(ctx, m, x, x.stop.args())
	})
}

// restart is a stop and a start of a VM that runs.
type restart struct {
	stop  *stop
	start *start
}

var restartOperation = operation[*restart]{
	name: opRestart, told: true, recall: recallRestart,
	steps: []step[*restart]{
		{word: stepShutdown, run: (*restart).shutDown, undo: (*restart).undoStop, recover: (*restart).recoverStop, lasting: true},
		{word: stepLaunch, run: (*restart).attach, undo: (*restart).undoStart, recover: (*restart).recoverStart},
		{word: stepLaunch, run: (*restart).launch, undo: (*restart).undoStart, recover: (*restart).recoverStart},
	},
}

func recallRestart(m *machine, in journal.Intent) (*restart, error) {
	s, err := recallStop(m, in)
	return &restart{stop: s, start: &start{machine: m}}, err
}

func (x *restart) shutDown(ctx context.Context) (outcome, error) { return x.stop.shutDown(ctx) }

func (x *restart) undoStop(ctx context.Context, err error) error { return x.stop.undo(ctx, err) }

func (x *restart) recoverStop(ctx context.Context) (next string, err error) {
	return x.stop.recover(ctx)
}

// attach is that of start. What an earlier process of the engine may have launched is ended first.
func (x *restart) attach(ctx context.Context) (outcome, error) {
	if x.stop.left {
		if err := x.stop.reap(ctx); err != nil {
			return outcome{}, err
		}
	}
	return x.start.attach(ctx)
}

func (x *restart) launch(ctx context.Context) (outcome, error) { return x.start.launch(ctx) }

func (x *restart) undoStart(ctx context.Context, err error) error { return x.start.undo(ctx, err) }

// recoverStart starts the VM, which was stopped already. A process that is on record is the new one.
func (x *restart) recoverStart(context.Context) (next string, err error) { return stepLaunch, nil }
