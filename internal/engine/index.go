package engine

import (
	"context"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// index finds VMs. It is a cache of the journal that the engine maintains itself, because it is the only writer.
type index struct {
	// gate is held for reading during a change of the journal and of the index. Whoever holds it for writing sees
	// that both agree.
	gate sync.RWMutex

	queue    queue    // of operations on each VM
	settling sync.Map // IDs of committed snapshots that a VM is in although its record does not say so yet

	mu    sync.RWMutex
	byID  map[vm.ID]*machine
	names map[string]vm.ID // by key: VMs in byID and those that are being created
}

func newIndex() *index {
	return &index{byID: map[vm.ID]*machine{}, names: map[string]vm.ID{}}
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
		return nil, errdefs.Invalidf("no VM given; give its name, its id or a unique prefix of its id")
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

// take finds the VM of ref and waits for its turn.
func (x *index) take(ctx context.Context, ref string) (m *machine, release func(), err error) {
	m, err = x.find(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	if release, err = x.queue.acquire(ctx, m.id); err != nil {
		return nil, nil, err
	}
	if x.get(m.id) != m { // removed while we waited
		release()
		return nil, nil, errdefs.NotFoundf("VM %q no longer exists", ref)
	}
	return m, release, nil
}
