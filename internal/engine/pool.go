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

// PoolStats is the state of the pool of clones that are kept ready.
type PoolStats struct {
	Entries int    // that are ready
	Memory  int64  // bytes of their guests' memory
	Hits    uint64 // clones that came from the pool
	Misses  uint64 // clones that could have come from the pool, but it had none
}

// shape decides whether clones are interchangeable.
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

// entry is a clone that nobody has requested yet. Its guest has already taken an identity once, so that the code for
// this is translated and in memory; it has no carrier and is paused. It is a VM in everything but the journal and the
// index: it has an ID, and everything that it has on this host is found by it.
type entry struct {
	id   vm.ID
	inst hypervisor.Instance
	rec  vm.Record // with its disks and NICs
}

// template is a shape in which VMs are cloned.
type template struct {
	shape  shape
	memory int64        // bytes of each guest
	spec   vm.CloneSpec // latest request for this shape
	used   time.Time
	ready  []*entry
	failed bool // the last entry could not be made, and no VM was cloned since
}

// pool keeps entries of the most recently used templates, as many as its memory allows. It only decides; it starts
// nothing.
type pool struct {
	size   int   // entries of each template; 0: no pool
	memory int64 // bytes for all guests together

	mu           sync.Mutex
	templates    map[shape]*template
	filling      *filling
	working      bool          // a goroutine fills the pool
	leaving      chan struct{} // closed when the latest surplus has been removed; nil: there is none
	hits, misses uint64
}

// filling is an entry that is being made.
type filling struct {
	of     *template
	spec   vm.CloneSpec // latest request when this began
	cancel func()
	done   chan struct{} // closed when the entry is in the pool, or nothing of it is left
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

// used records that a VM was cloned as spec says, from the pool or not. It reports whether the caller must start to
// fill the pool.
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

// next returns what to do: the entries that no longer fit, and the template that lacks an entry. If there is neither,
// nobody fills the pool from then on.
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

// begin records that an entry of t is being made. It returns nil if nobody wants it any more.
func (p *pool) begin(t *template, cancel func()) *filling {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.templates[t.shape] != t {
		return nil
	}
	p.filling = &filling{of: t, spec: t.spec, cancel: cancel, done: make(chan struct{})}
	return p.filling
}

// end adds the entry that was made, nil if it could not be made. It returns an entry that nobody wants any more.
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

// leave records that surplus is about to be removed. Preconditions: mu is held; the surplus before it has been
// removed.
func (p *pool) leave(surplus []*entry) {
	if len(surplus) > 0 {
		p.leaving = make(chan struct{})
	}
}

// left records that the surplus of next or end has been removed.
func (p *pool) left() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leaving != nil {
		close(p.leaving)
		p.leaving = nil
	}
}

// drop removes the templates of a snapshot, "" for all. It returns their entries; the entry that is being made, after
// cancelling it; and a channel that closes when the surplus, of any snapshot, has been removed. The last two may be
// nil.
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
