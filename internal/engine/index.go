package engine

import (
	"context"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
)

// indexed is what an index finds, a VM.
type indexed interface {
	comparable
	key() string // the form of its name that is unique on the node
	named() vm.Named
}

// index finds VMs. It is a cache of the journal that the engine maintains itself, because it is the only writer.
type index[M indexed] struct {
	// gate is held for reading during a change of the journal and of the index. Whoever holds it for writing sees
	// that both agree.
	gate sync.RWMutex

	queue    keylock.Locks[vm.ID] // of operations on each VM
	settling sync.Map             // IDs of committed snapshots that a VM is in although its record does not say so yet

	mu    sync.RWMutex
	byID  map[vm.ID]M
	names map[string]vm.ID // by key: VMs in byID and those that are being created
}

func newIndex[M indexed]() *index[M] {
	return &index[M]{byID: map[vm.ID]M{}, names: map[string]vm.ID{}}
}

// reserve reserves a name, as indexed.key returns it, for id, or returns AlreadyExists.
func (x *index[M]) reserve(key string, id vm.ID) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, taken := x.names[key]; taken {
		return vm.VMs.Taken(key)
	}
	x.names[key] = id
	return nil
}

// unreserve frees a name whose VM was not created.
func (x *index[M]) unreserve(key string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.names, key)
}

func (x *index[M]) add(m M) {
	x.mu.Lock()
	defer x.mu.Unlock()
	id := m.named().ID
	x.byID[id] = m
	x.names[m.key()] = id
}

func (x *index[M]) remove(m M) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.byID, m.named().ID)
	delete(x.names, m.key())
}

func (x *index[M]) get(id vm.ID) M {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.byID[id]
}

// all returns every VM, sorted by name.
func (x *index[M]) all() []M {
	x.mu.RLock()
	out := make([]M, 0, len(x.byID))
	for _, m := range x.byID {
		out = append(out, m)
	}
	x.mu.RUnlock()
	slices.SortFunc(out, func(a, b M) int { return strings.Compare(a.named().Name, b.named().Name) })
	return out
}

// find resolves a reference on behalf of the owner in ctx; see vm.Kind.Match. A VM of another owner is NotFound.
func (x *index[M]) find(ctx context.Context, ref string) (none M, _ error) {
	if ref == "" {
		return none, errdefs.Invalidf("no VM given; give its name, its id or a unique prefix of its id")
	}
	who := vm.Behalf(ctx)
	x.mu.RLock()
	defer x.mu.RUnlock()
	if m, ok := x.byID[vm.ID(ref)]; ok && m.named().VisibleTo(who) {
		return m, nil
	}
	if m, ok := x.byID[x.names[who.Qualify(ref)]]; ok {
		return m, nil
	}
	id, err := vm.VMs.Match(who, ref, func(yield func(vm.Named) bool) {
		for _, m := range x.byID {
			if !yield(m.named()) {
				return
			}
		}
	})
	return x.byID[id], err // the zero value, if there is an error
}

// take finds the VM of ref and waits for its turn.
func (x *index[M]) take(ctx context.Context, ref string) (m M, release func(), err error) {
	if m, err = x.find(ctx, ref); err != nil {
		return m, nil, err
	}
	id := m.named().ID
	if release, err = x.queue.Lock(ctx, id); err != nil {
		return m, nil, err
	}
	if x.get(id) != m { // removed while we waited
		release()
		return m, nil, vm.VMs.Missing(vm.Behalf(ctx), ref)
	}
	return m, release, nil
}
