package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// record is the VM's record; its slices and maps are shared.
func (m *machine) record() vm.Record { return *m.rec.Load() }

// name is the VM's name, which never changes.
func (m *machine) name() string { return m.rec.Load().Spec.Name }

// key is the form of the VM's name that is unique on the node.
func (m *machine) key() string {
	r := m.rec.Load()
	return r.Owner.Qualify(r.Spec.Name)
}

// named is what references to m are matched against.
func (m *machine) named() vm.Named { return named(*m.rec.Load()) }

func named(r vm.Record) vm.Named {
	return vm.Named{ID: r.ID, Name: r.Spec.Name, Owner: r.Owner, Shared: r.Spec.Offered}
}

// put is a journal method that stores a record.
type put func(context.Context, vm.Record) (vm.Record, error)

// same changes nothing in a record.
func same(*vm.Record) {}

// open begins an operation on an existing VM. Preconditions: m is held, so that an intent that is already open is one
// that could not be settled, and nobody works on it.
func (m *machine) open(ctx context.Context, op, step string, args []byte) error {
	_, err := m.commit(ctx, m.begin(op, step, args), same)
	if errdefs.Is(err, errdefs.Conflict) {
		if _, err = m.commit(ctx, m.journal.Settle, same); err == nil {
			_, err = m.commit(ctx, m.begin(op, step, args), same)
		}
	}
	return err
}

func (n *node) begin(op, step string, args []byte) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) {
		in := journal.Intent{ID: r.ID, Op: op, Step: step, Args: args, Began: r.UpdatedAt}
		return n.journal.Begin(ctx, in, r)
	}
}

func (n *node) step(word string) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) { return n.journal.Step(ctx, r.ID, word, r) }
}

// synced wraps with, so that its change survives a power cut when it returns. After an error, the caller undoes the
// change as if the journal had failed after it.
func (n *node) synced(with put) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) {
		r, err := with(ctx, r)
		if err == nil {
			err = n.durable(ctx)
		}
		return r, err
	}
}

// durable returns when what is on record survives a power cut. It runs before an operation returns, and before
// anything is destroyed that only an older record refers to.
func (n *node) durable(ctx context.Context) error {
	return n.journal.Sync(context.WithoutCancel(ctx))
}

// commit changes the record of m in the journal and in memory. change gets a copy with shared slices and maps: it
// must replace them. The caller's cancellation does not reach the journal: what was done is recorded.
func (m *machine) commit(ctx context.Context, with put, change func(*vm.Record)) (vm.Record, error) {
	m.write.Lock()
	defer m.write.Unlock()
	r := m.record()
	change(&r)
	r.UpdatedAt = now()
	m.vms.gate.RLock()
	defer m.vms.gate.RUnlock()
	r, err := with(context.WithoutCancel(ctx), r)
	if err != nil {
		return m.record(), err
	}
	m.rec.Store(&r)
	return r, nil
}

// update is a commit outside of operations.
func (m *machine) update(ctx context.Context, change func(*vm.Record)) (vm.Record, error) {
	return m.commit(ctx, m.journal.Update, change)
}

// settle ends the operation of m with change.
func (m *machine) settle(ctx context.Context, change func(*vm.Record)) error {
	_, err := m.commit(ctx, m.journal.Settle, change)
	return err
}

// settleFailed settles an operation that failed and left the VM as change says. If the journal fails, the intent
// stays: the next operation or recovery settles it.
func (m *machine) settleFailed(ctx context.Context, op string, change func(*vm.Record)) {
	if err := m.settle(ctx, change); err != nil {
		m.log.Error("failed operation is still open in the journal", "vm", m.id, "op", op, "err", err)
	}
}

// settleAssumed settles an operation that left the VM as change says. If the journal fails, the record in memory has
// the change nevertheless, because this is the real state: the next operation or recovery settles it.
func (m *machine) settleAssumed(ctx context.Context, op string, change func(*vm.Record)) error {
	err := m.settle(ctx, change)
	if err != nil {
		m.log.Error("state of vm not recorded in the journal", "vm", m.id, "op", op, "err", err)
		m.assume(change)
	}
	return err
}

// assume changes only the record in memory, because this is the real state, whatever the journal says.
func (m *machine) assume(change func(*vm.Record)) {
	m.write.Lock()
	defer m.write.Unlock()
	r := m.record()
	change(&r)
	m.rec.Store(&r)
}

// fail settles m in StateError. If the journal fails, it still holds the intent: the next recovery handles it, and
// until then the VM can be removed.
func (m *machine) fail(ctx context.Context, op, reason string, cause error) {
	_ = m.settleAssumed(ctx, op, func(r *vm.Record) {
		r.State, r.Reason, r.Message, r.AgentReady = vm.StateError, reason, cause.Error(), false
	})
}

// insert is the first commit of a new VM.
func (m *machine) insert(ctx context.Context, with put) error {
	m.vms.gate.RLock()
	defer m.vms.gate.RUnlock()
	r, err := with(ctx, m.record())
	if err != nil {
		// If the change was stored all the same, it must not stay: nobody will come back to it.
		_ = m.journal.Forget(context.WithoutCancel(ctx), m.id)
		return err
	}
	m.rec.Store(&r)
	m.vms.add(m)
	return nil
}

// forget removes m from the journal and from memory.
func (m *machine) forget(ctx context.Context) error {
	m.write.Lock()
	defer m.write.Unlock()
	m.vms.gate.RLock()
	defer m.vms.gate.RUnlock()
	if err := m.journal.Forget(context.WithoutCancel(ctx), m.id); err != nil {
		return err
	}
	m.vms.remove(m)
	return nil
}

// now has no monotonic part and no zone, so that a record is the same before and after the journal.
func now() time.Time { return time.Now().UTC().Round(0) }

// guestVM is m as the session with its guest sees it.
type guestVM struct{ *machine }

var _ session.VM = guestVM{}

// Record implements session.VM.
func (g guestVM) Record() vm.Record { return g.record() }

// Update implements session.VM.
func (g guestVM) Update(ctx context.Context, change func(*vm.Record)) (vm.Record, error) {
	return g.update(ctx, change)
}

// Durable implements session.VM.
func (g guestVM) Durable(ctx context.Context) error { return g.durable(ctx) }

// VolumeFiles implements session.VM.
func (g guestVM) VolumeFiles(name string) ([]vm.VolumeFile, error) {
	return g.dirs.readVolume(g.id, name)
}
