package engine

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/engine/proclog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine is one VM in memory. Whoever holds it in the queue may operate on it; anybody may read rec and run.
type machine struct {
	id  vm.ID
	log *proclog.Log

	containers map[string]*proclog.Log // logs of the containers, by name

	rec atomic.Pointer[vm.Record] // as in the journal; a record is replaced, never modified
	run atomic.Pointer[run]       // nil unless its process runs

	remains atomic.Bool // its last process may have ended without cleanup

	write   sync.Mutex // held for each change of the record: observations run in parallel with operations
	self    turn       // held while a resumed guest gets its identity, and while a save reads it
	volumes turn       // held while volumes are sent to the guest
}

// turn admits one holder at a time. A caller waits no longer than its context.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) take(ctx context.Context) (leave func(), err error) {
	select {
	case t <- struct{}{}:
		return sync.OnceFunc(func() { <-t }), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

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

// index finds VMs. It is a cache of the journal that the engine maintains itself, because it is the only writer.
type index struct {
	// gate is held for reading during a change of the journal and of the index. Whoever holds it for writing sees
	// that both agree.
	gate sync.RWMutex

	mu    sync.RWMutex
	byID  map[vm.ID]*machine
	names map[string]vm.ID // by key: VMs in byID and those that are being created
}

func newIndex() index {
	return index{byID: map[vm.ID]*machine{}, names: map[string]vm.ID{}}
}

// reserve reserves a name, as machine.key returns it, for id, or returns AlreadyExists.
func (x *index) reserve(key string, id vm.ID) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, taken := x.names[key]; taken {
		return errdefs.Existsf("a VM called %q exists already; choose another name or remove it first", key)
	}
	x.names[key] = id
	return nil
}

// unreserve frees a name whose VM was not created.
func (x *index) unreserve(key string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.names, key)
}

func (x *index) add(m *machine) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.byID[m.id] = m
	x.names[m.key()] = m.id
}

func (x *index) remove(m *machine) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.byID, m.id)
	delete(x.names, m.key())
}

func (x *index) get(id vm.ID) *machine {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.byID[id]
}

// all returns every VM, sorted by name.
func (x *index) all() []*machine {
	x.mu.RLock()
	out := make([]*machine, 0, len(x.byID))
	for _, m := range x.byID {
		out = append(out, m)
	}
	x.mu.RUnlock()
	slices.SortFunc(out, func(a, b *machine) int { return strings.Compare(a.name(), b.name()) })
	return out
}

// reference is how requests refer to VMs.
var reference = vm.Kind{Noun: "VM", List: "cocoon vm list"}

// find resolves a reference on behalf of the owner in ctx; see vm.Kind.Match. A VM of another owner is NotFound.
func (x *index) find(ctx context.Context, ref string) (*machine, error) {
	if ref == "" {
		return nil, errdefs.Invalidf("name a VM, by name, id or unique prefix of its id")
	}
	who := vm.Behalf(ctx)
	x.mu.RLock()
	defer x.mu.RUnlock()
	if m := x.byID[vm.ID(ref)]; m != nil && m.named().VisibleTo(who) {
		return m, nil
	}
	if m := x.byID[x.names[who.Qualify(ref)]]; m != nil {
		return m, nil
	}
	id, err := reference.Match(who, ref, func(yield func(vm.Named) bool) {
		for _, m := range x.byID {
			if !yield(m.named()) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return x.byID[id], nil
}

// put is a journal method that stores a record.
type put func(context.Context, vm.Record) (vm.Record, error)

// open begins an operation on an existing VM. Preconditions: m is held, so that an intent that is already open is one
// that could not be settled, and nobody works on it.
func (e *Engine) open(ctx context.Context, m *machine, op, step string, args []byte) error {
	same := func(*vm.Record) {}
	_, err := e.commit(ctx, m, e.begin(op, step, args), same)
	if errdefs.Is(err, errdefs.Conflict) {
		if _, err = e.commit(ctx, m, e.journal.Settle, same); err == nil {
			_, err = e.commit(ctx, m, e.begin(op, step, args), same)
		}
	}
	return err
}

func (e *Engine) begin(op, step string, args []byte) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) {
		in := journal.Intent{ID: r.ID, Op: op, Step: step, Args: args, Began: r.UpdatedAt}
		return e.journal.Begin(ctx, in, r)
	}
}

func (e *Engine) step(step string) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) { return e.journal.Step(ctx, r.ID, step, r) }
}

// commit changes the record of m in the journal and in memory. change gets a copy with shared slices and maps: it
// must replace them. The caller's cancellation does not reach the journal: what was done is recorded.
func (e *Engine) commit(ctx context.Context, m *machine, with put, change func(*vm.Record)) (vm.Record, error) {
	m.write.Lock()
	defer m.write.Unlock()
	r := m.record()
	change(&r)
	r.UpdatedAt = now()
	e.index.gate.RLock()
	defer e.index.gate.RUnlock()
	r, err := with(context.WithoutCancel(ctx), r)
	if err != nil {
		return m.record(), err
	}
	m.rec.Store(&r)
	return r, nil
}

// insert is the first commit of a new VM.
func (e *Engine) insert(ctx context.Context, m *machine, with put) error {
	e.index.gate.RLock()
	defer e.index.gate.RUnlock()
	r, err := with(ctx, m.record())
	if err != nil {
		// If the change was stored all the same, it must not stay: nobody will come back to it.
		_ = e.journal.Forget(context.WithoutCancel(ctx), m.id)
		return err
	}
	m.rec.Store(&r)
	e.index.add(m)
	return nil
}

// forget removes m from the journal and from memory.
func (e *Engine) forget(ctx context.Context, m *machine) error {
	m.write.Lock()
	defer m.write.Unlock()
	e.index.gate.RLock()
	defer e.index.gate.RUnlock()
	if err := e.journal.Forget(context.WithoutCancel(ctx), m.id); err != nil {
		return err
	}
	e.index.remove(m)
	return nil
}

// take finds the VM of ref and waits for its turn.
func (e *Engine) take(ctx context.Context, ref string) (m *machine, release func(), err error) {
	m, err = e.index.find(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	if release, err = e.queue.acquire(ctx, m.id); err != nil {
		return nil, nil, err
	}
	if e.index.get(m.id) != m { // removed while we waited
		release()
		return nil, nil, errdefs.NotFoundf("no VM is called %q any more", ref)
	}
	return m, release, nil
}

// now has no monotonic part and no zone, so that a record is the same before and after the journal.
func now() time.Time { return time.Now().UTC().Round(0) }
