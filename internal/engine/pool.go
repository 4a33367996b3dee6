package engine

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// PoolStats is how the pool of clones that are kept ready is doing.
type PoolStats struct {
	Entries int    // that wait
	Memory  int64  // bytes of their guests' memory
	Hits    uint64 // clones that came from the pool
	Misses  uint64 // clones that could have, had there been one
}

// shape is what decides whether clones can take each other's place.
type shape struct {
	snapshot, driver string
	accel            vm.Accel
	boot             vm.Boot
	storage          int64
	nics             string
}

func shapeOf(r vm.Record) shape {
	return shape{r.Snapshot, r.Driver, r.Spec.Accel, r.Boot, r.Spec.Storage, fmt.Sprintf("%q", r.Spec.NICs)}
}

// entry is a clone that nobody has asked for yet. Its guest has been itself once, so that what this takes is translated
// and in memory; it has no carrier and stands still. It is a VM in all but the journal and the index: it has an id, and
// all that it has on this host is found by it.
type entry struct {
	id   vm.ID
	inst hypervisor.Instance
	rec  vm.Record // with its disks and interfaces
}

// template is a shape that VMs are cloned in.
type template struct {
	shape  shape
	memory int64        // bytes of each guest
	spec   vm.CloneSpec // that asked for it last
	used   time.Time
	ready  []*entry
	failed bool // the last entry could not be made, and no VM was cloned since
}

// pool keeps entries of the templates that were used last, as many as its memory allows. It decides and starts nothing.
type pool struct {
	size   int   // entries of each template; 0: no pool
	memory int64 // bytes that all guests may have

	mu           sync.Mutex
	templates    map[shape]*template
	filling      *filling
	working      bool          // somebody fills the pool
	leaving      chan struct{} // closed when the surplus that was found last is gone; nil: there is none
	hits, misses uint64
}

// filling is an entry that is being made.
type filling struct {
	of     *template
	spec   vm.CloneSpec // that asked for it last when this was begun
	cancel func()
	done   chan struct{} // closed when it is in the pool, or nothing of it is left
}

func newPool(size int, memory int64) pool {
	return pool{size: size, memory: memory, templates: map[shape]*template{}}
}

func (p *pool) stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := PoolStats{Hits: p.hits, Misses: p.misses}
	for _, t := range p.templates {
		s.Entries += len(t.ready)
		s.Memory += int64(len(t.ready)) * t.memory
	}
	return s
}

// take returns an entry of a shape, nil if there is none.
func (p *pool) take(s shape) *entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.templates[s]
	if t == nil || len(t.ready) == 0 {
		return nil
	}
	en := t.ready[0]
	t.ready = t.ready[1:]
	return en
}

// used notes that a VM was cloned as spec says, from the pool or not. It reports whether the caller must have the pool
// filled.
func (p *pool) used(r vm.Record, spec vm.CloneSpec, hit bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if hit {
		p.hits++
	} else {
		p.misses++
	}
	s := shapeOf(r)
	t := p.templates[s]
	if t == nil {
		t = &template{shape: s, memory: r.Spec.Memory}
		p.templates[s] = t
	}
	t.spec, t.used, t.failed = spec, time.Now(), false
	if p.working {
		return false
	}
	p.working = true
	return true
}

// next says what there is to do: entries for which there is no room any more, and the template of which one is missing.
// When there is neither, nobody fills the pool from then on.
func (p *pool) next() (fill *template, surplus []*entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := make([]*template, 0, len(p.templates))
	for _, t := range p.templates {
		order = append(order, t)
	}
	slices.SortFunc(order, func(a, b *template) int { return cmp.Compare(b.used.UnixNano(), a.used.UnixNano()) })
	left := p.memory
	for _, t := range order {
		room := int(min(int64(p.size), left/max(t.memory, 1)))
		left -= int64(room) * t.memory
		if len(t.ready) > room {
			surplus = append(surplus, t.ready[room:]...)
			t.ready = t.ready[:room]
		}
		if room == 0 {
			delete(p.templates, t.shape)
		}
		if fill == nil && !t.failed && len(t.ready) < room {
			fill = t
		}
	}
	p.working = fill != nil || len(surplus) > 0
	p.leave(surplus)
	return fill, surplus
}

// begin notes that an entry of t is being made. It returns nil when nobody wants it any more.
func (p *pool) begin(t *template, cancel func()) *filling {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.templates[t.shape] != t {
		return nil
	}
	p.filling = &filling{of: t, spec: t.spec, cancel: cancel, done: make(chan struct{})}
	return p.filling
}

// end takes the entry that was made, nil if it could not be. It returns one that nobody wants any more.
func (p *pool) end(f *filling, en *entry) (surplus []*entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filling = nil
	switch {
	case en == nil:
		f.of.failed = true
	case p.templates[f.of.shape] == f.of:
		f.of.ready = append(f.of.ready, en)
	default:
		surplus = []*entry{en}
	}
	p.leave(surplus)
	return surplus
}

// leave notes that surplus is about to be removed. Preconditions: mu is held; the surplus before it has left.
func (p *pool) leave(surplus []*entry) {
	if len(surplus) > 0 {
		p.leaving = make(chan struct{})
	}
}

// left notes that the surplus of next or end has been removed.
func (p *pool) left() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leaving != nil {
		close(p.leaving)
		p.leaving = nil
	}
}

// drop gives up the templates of a snapshot, "" for all. It returns their entries, the one that is being made, whose maker
// has been told, and what is closed when the surplus, of whichever snapshot, has left; nil for neither.
func (p *pool) drop(snapshot string) (entries []*entry, made *filling, leaving <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s, t := range p.templates {
		if snapshot == "" || s.snapshot == snapshot {
			entries = append(entries, t.ready...)
			delete(p.templates, s)
		}
	}
	if f := p.filling; f != nil && (snapshot == "" || f.of.shape.snapshot == snapshot) {
		made = f
		f.cancel()
	}
	return entries, made, p.leaving
}
