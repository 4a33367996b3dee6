package engine

import (
	"context"
	"slices"

	"cocoonstack.io/cocoon/internal/engine/pool"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// watchBatch is how many events a watcher takes from the journal at a time.
const watchBatch = 256

// Inspect returns the record of a VM.
func (e *Engine) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	if err := e.life.ready(ctx); err != nil {
		return vm.Record{}, err
	}
	m, err := e.vms.find(ctx, ref)
	if err != nil {
		return vm.Record{}, err
	}
	return m.record().Clone(), nil
}

// List returns all records that the owner in ctx may see, sorted by name.
func (e *Engine) List(ctx context.Context) ([]vm.Record, error) {
	if err := e.life.ready(ctx); err != nil {
		return nil, err
	}
	all := e.vms.all()
	out := make([]vm.Record, 0, len(all))
	for _, m := range all {
		if m.named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, m.record().Clone())
		}
	}
	return out, nil
}

// ImageInUse reports whether a VM or a snapshot depends on the image. In doubt, such as before recovery has finished,
// it returns true.
func (e *Engine) ImageInUse(digest string) bool {
	select {
	case <-e.life.recovered:
	default:
		return true
	}
	if slices.ContainsFunc(e.vms.all(), func(m *machine) bool { return standsOn(m.record(), digest) }) {
		return true
	}
	for _, id := range e.strays.ids() {
		row, err := e.kept(id)
		if err != nil || standsOn(row.Record, digest) { // its disks are unknown, or they depend on this image
			return true
		}
	}
	if e.snapshots == nil {
		return false
	}
	saved, err := e.snapshots.List(e.life.serving)
	return err != nil || slices.ContainsFunc(saved, func(x snapshot.Snapshot) bool { return x.ImageDigest == digest || standsOn(x.Record, digest) })
}

// Watch calls fn with every change after the revision that the owner in the context may see, until ctx ends or fn
// fails, and returns that error. With a negative revision every existing VM comes first, as ADDED. A slow fn delays
// nobody else. If it falls behind what the journal keeps, or the revision is older than that, the error is
// FailedPrecondition: watch again from -1.
func (e *Engine) Watch(caller context.Context, after int64, fn func(vm.Event) error) error {
	if err := e.life.ready(caller); err != nil {
		return err
	}
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	tell := func(ev vm.Event) error {
		if !named(ev.Record).VisibleTo(vm.Behalf(caller)) {
			return nil
		}
		return fn(ev)
	}
	if after < 0 {
		var present []vm.Record
		present, after = e.snapshot()
		for _, r := range present {
			if err := tell(vm.Event{Type: vm.EventAdded, Revision: r.Revision, Record: r}); err != nil {
				return err
			}
		}
	}
	for {
		changed := e.journal.Changed()
		events, err := e.journal.Events(ctx, after, watchBatch)
		if ctx.Err() != nil {
			return e.life.ended(caller, ctx.Err())
		}
		if err != nil {
			return err
		}
		for _, event := range events {
			if err := tell(event); err != nil {
				return err
			}
			after = event.Revision
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return e.life.ended(caller, ctx.Err())
		}
	}
}

// snapshot returns all records and the revision at which exactly these existed.
func (e *Engine) snapshot() ([]vm.Record, int64) {
	e.vms.gate.Lock()
	defer e.vms.gate.Unlock()
	all := e.vms.all()
	out := make([]vm.Record, 0, len(all))
	for _, m := range all {
		out = append(out, m.record().Clone())
	}
	return out, e.journal.Revision()
}

// running returns the VM of ref and its process.
func (n *node) running(ctx context.Context, ref string) (*machine, *run, error) {
	if err := n.life.ready(ctx); err != nil {
		return nil, nil, err
	}
	m, err := n.vms.find(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	r := m.run.Load()
	if r == nil || r.Over() {
		return nil, nil, errdefs.Preconditionf("vm %s is not running (%s); start it first", m.name(), m.record().State)
	}
	return m, r, nil
}

// PoolStats is the state of the pool of clones that are kept ready.
type PoolStats = pool.Stats

// Pool returns the state of the pool of clones.
func (e *Engine) Pool() PoolStats { return e.pool.Stats() }

// StrayCount returns how many VMs are kept aside.
func (e *Engine) StrayCount() int { return len(e.strays.ids()) }
