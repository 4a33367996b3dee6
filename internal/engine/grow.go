package engine

import (
	"context"
	"encoding/json"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Resize makes a running VM as large as to says, up to the growth of its hardware. The VM keeps that size when it starts again.
// Idempotent.
// Errors: NotFound, InvalidArgument, FailedPrecondition when the VM does not run or cannot have that size while it runs, Unsupported for a driver
// that cannot do it, Unavailable. After an error the VM may have a part of it, which its record says.
func (v sizeVerbs) Resize(caller context.Context, ref string, to vm.Size) (vm.Record, error) {
	return v.operate(caller, opGrow, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.grow(ctx, to)
	})
}

func (m *machine) grow(ctx context.Context, to vm.Size) (vm.Record, error) {
	r := m.record()
	if r.Spec.Size() == to {
		return r, nil
	}
	if _, err := r.Spec.Grown(to); err != nil {
		return r, err
	}
	if r.State != vm.StateRunning {
		return r, errdefs.Preconditionf("it does not run (%s), so it cannot grow", r.State)
	}
	if err := awake(r); err != nil {
		return r, err
	}
	if _, err := m.resizer(); err != nil {
		return r, err
	}
	args, _ := json.Marshal(to) // numbers always encode
	return growOperation.run(ctx, m, &growth{machine: m, to: to}, args)
}

// resizer returns what changes the size of the running guest of m.
func (m *machine) resizer() (hypervisor.Resizer, error) {
	run := m.run.Load()
	if run == nil {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	resizer, ok := hypervisor.As[hypervisor.Resizer](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot change the size of a running VM", m.record().Driver)
	}
	return resizer, nil
}

// growth gives a running VM more CPUs and memory. Its record has what the hypervisor has given the guest, because saved state resumes only
// with that. Nothing is taken away if a part fails.
type growth struct {
	*machine
	to vm.Size
}

var growOperation = operation[*growth]{
	name: opGrow, told: true, recall: recallGrowth,
	steps: []step[*growth]{{word: stepGrow, run: (*growth).give, undo: (*growth).undo, recover: (*growth).recover, lasting: true}},
}

func recallGrowth(m *machine, in journal.Intent) (*growth, error) {
	g := &growth{machine: m}
	if err := json.Unmarshal(in.Args, &g.to); err != nil || g.to.CPUs < 1 || g.to.Memory < 1 {
		return g, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return g, nil
}

func (g *growth) give(ctx context.Context) (outcome, error) {
	next, err := g.record().Spec.Grown(g.to)
	if err != nil {
		return outcome{}, err
	}
	resizer, err := g.resizer()
	if err != nil {
		return outcome{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, g.cfg.AgentTimeout)
	defer cancel()
	if err := endedProcess(resizer.Grow(ctx, g.to)); err != nil {
		return outcome{}, err
	}
	return outcome{change: func(r *vm.Record) { r.Spec = next }}, nil
}

// undo records what the guest has got before the operation failed.
func (g *growth) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	return g.settleGrown(ctx, cause)
}

func (g *growth) settleGrown(ctx context.Context, cause error) error {
	change := same
	if resizer, err := g.resizer(); err == nil {
		has, err := resizer.Size(ctx)
		next, also := g.record().Spec.Grown(has)
		switch {
		case err == nil && also == nil:
			change = func(r *vm.Record) { r.Spec = next }
		case !errdefs.IsNotFound(err):
			g.log.Warn("size of a vm that has not grown is not known", "vm", g.id, "err", err)
		}
	}
	g.settleFailed(ctx, opGrow, change)
	return cause
}

// recover goes on with a VM that runs. Another one boots in its old size.
func (g *growth) recover(ctx context.Context) (next string, err error) {
	runs, err := g.readopt(ctx)
	if err != nil {
		return "", err
	}
	if runs {
		return stepGrow, nil
	}
	return "", g.settle(ctx, same)
}
