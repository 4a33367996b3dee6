package journaltest

import (
	"context"

	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Point is a place at which Faulty calls its hook.
type Point struct {
	Method string // Begin, Step, Settle, Forget, Update or Sync
	After  bool   // the change is already in the journal
	ID     vm.ID
	Op     string // of Begin
	Step   string // of Begin and Step
}

// Faulty is a Journal that calls Hook before and after each change. The hook may end the process, to test how the next
// process recovers, or return an error. With an error before the change, nothing is written; with one after it, the
// change is stored and the caller does not know.
type Faulty struct {
	journal.Journal
	Hook func(Point) error
}

func (f Faulty) around(p Point, change func() error) error {
	if err := f.Hook(p); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	p.After = true
	return f.Hook(p)
}

// Begin implements journal.Journal.
func (f Faulty) Begin(ctx context.Context, in journal.Intent, r vm.Record) (out vm.Record, err error) {
	err = f.around(Point{Method: "Begin", ID: r.ID, Op: in.Op, Step: in.Step}, func() (err error) {
		out, err = f.Journal.Begin(ctx, in, r)
		return err
	})
	return out, err
}

// Step implements journal.Journal.
func (f Faulty) Step(ctx context.Context, id vm.ID, step string, r vm.Record) (out vm.Record, err error) {
	err = f.around(Point{Method: "Step", ID: id, Step: step}, func() (err error) {
		out, err = f.Journal.Step(ctx, id, step, r)
		return err
	})
	return out, err
}

// Settle implements journal.Journal.
func (f Faulty) Settle(ctx context.Context, r vm.Record) (out vm.Record, err error) {
	err = f.around(Point{Method: "Settle", ID: r.ID}, func() (err error) {
		out, err = f.Journal.Settle(ctx, r)
		return err
	})
	return out, err
}

// Update implements journal.Journal.
func (f Faulty) Update(ctx context.Context, r vm.Record) (out vm.Record, err error) {
	err = f.around(Point{Method: "Update", ID: r.ID}, func() (err error) {
		out, err = f.Journal.Update(ctx, r)
		return err
	})
	return out, err
}

// Forget implements journal.Journal.
func (f Faulty) Forget(ctx context.Context, id vm.ID) error {
	return f.around(Point{Method: "Forget", ID: id}, func() error { return f.Journal.Forget(ctx, id) })
}

// Sync implements journal.Journal.
func (f Faulty) Sync(ctx context.Context) error {
	return f.around(Point{Method: "Sync"}, func() error { return f.Journal.Sync(ctx) })
}
