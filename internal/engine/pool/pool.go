// Package pool keeps clones of snapshots ready, so that a clone need not wait until its guest has resumed. It decides
// which entries there are and has them made and removed; what an entry consists of is the affair of its Maker.
package pool

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Stats is the state of the pool of clones that are kept ready.
type Stats struct {
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
	rate             vm.DiskRate
	nics             string
}

func shapeOf(r vm.Record) shape {
	return shape{r.Snapshot, r.Driver, r.Spec.Accel, r.Boot, r.Spec.Storage, r.Spec.DiskRate, fmt.Sprintf("%#v", r.Spec.NICs)}
}

// Entry is a clone that nobody has requested yet. Its guest has already taken an identity once, so that the code for
// this is translated and in memory; it has no carrier and is paused. It is a VM in everything but the journal and the
// index: it has an ID, and everything that it has on this host is found by it.
type Entry struct {
	ID   vm.ID
	Inst hypervisor.Instance
	Rec  vm.Record // with its disks and NICs
}

// template is a shape in which VMs are cloned.
type template struct {
	shape  shape
	memory int64        // bytes of each guest
	spec   vm.CloneSpec // latest request for this shape
	used   time.Time
	ready  []*Entry
	failed bool // the last entry could not be made, and no VM was cloned since
}

// Config is how much the pool may keep.
type Config struct {
	Size   int           // entries of each template; 0: no pool
	Memory int64         // bytes for all guests together
	Pause  time.Duration // from a clone until the pool is refilled, so that callers waiting for a clone come first
	Log    *slog.Logger
}

// Maker makes and removes entries.
type Maker interface {
	// Make makes an entry of a snapshot as spec says, except for its name. If it fails, nothing remains.
	Make(ctx context.Context, snapshot string, spec vm.CloneSpec) (*Entry, error)
	// Discard ends an entry and removes what it has, whatever becomes of ctx.
	Discard(ctx context.Context, en *Entry)
}

// Pool keeps entries of the most recently used templates, as many as its memory allows. It is safe for concurrent use.
type Pool struct {
	cfg   Config
	maker Maker

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

// New returns an empty pool.
func New(cfg Config, maker Maker) *Pool {
	return &Pool{cfg: cfg, maker: maker, templates: map[shape]*template{}}
}

// Enabled reports whether the pool may have entries at all.
func (p *Pool) Enabled() bool { return p.cfg.Size > 0 }

// Stats returns the state of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{Hits: p.hits, Misses: p.misses}
	for _, t := range p.templates {
		s.Entries += len(t.ready)
		s.Memory += int64(len(t.ready)) * t.memory
	}
	return s
}

// Take returns an entry that r, which is about to be cloned, may become; nil if there is none.
func (p *Pool) Take(r vm.Record) *Entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.templates[shapeOf(r)]
	if t == nil || len(t.ready) == 0 {
		return nil
	}
	en := t.ready[0]
	t.ready = t.ready[1:]
	return en
}

// Used records that a VM was cloned as spec says, from the pool or not. It reports whether the caller must start
// Fill.
func (p *Pool) Used(r vm.Record, spec vm.CloneSpec, hit bool) bool {
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
func (p *Pool) next() (fill *template, surplus []*Entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := make([]*template, 0, len(p.templates))
	for _, t := range p.templates {
		order = append(order, t)
	}
	slices.SortFunc(order, func(a, b *template) int { return cmp.Compare(b.used.UnixNano(), a.used.UnixNano()) })
	left := p.cfg.Memory
	for _, t := range order {
		room := int(min(int64(p.cfg.Size), left/max(t.memory, 1)))
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
func (p *Pool) begin(t *template, cancel func()) *filling {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.templates[t.shape] != t {
		return nil
	}
	p.filling = &filling{of: t, spec: t.spec, cancel: cancel, done: make(chan struct{})}
	return p.filling
}

// end adds the entry that was made, nil if it could not be made. It returns an entry that nobody wants any more.
func (p *Pool) end(f *filling, en *Entry) (surplus []*Entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filling = nil
	switch {
	case en == nil:
		f.of.failed = true
	case p.templates[f.of.shape] == f.of:
		f.of.ready = append(f.of.ready, en)
	default:
		surplus = []*Entry{en}
	}
	p.leave(surplus)
	return surplus
}

// leave records that surplus is about to be removed. Preconditions: mu is held; the surplus before it has been
// removed.
func (p *Pool) leave(surplus []*Entry) {
	if len(surplus) > 0 {
		p.leaving = make(chan struct{})
	}
}

// left records that the surplus of next or end has been removed.
func (p *Pool) left() {
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
func (p *Pool) drop(snapshot string) (entries []*Entry, made *filling, leaving <-chan struct{}) {
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

// Fill makes the missing entries of the pool, one after the other, until none is missing or ctx ends.
func (p *Pool) Fill(ctx context.Context) {
	process.Pause(p.cfg.Pause, ctx.Done(), nil)
	for ctx.Err() == nil {
		t, surplus := p.next()
		p.discard(ctx, surplus)
		p.left()
		if t != nil {
			p.fillOne(ctx, t)
		} else if len(surplus) == 0 {
			return
		}
	}
}

func (p *Pool) fillOne(ctx context.Context, t *template) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := p.begin(t, cancel)
	if f == nil {
		return
	}
	defer close(f.done)
	began := time.Now()
	en, err := p.maker.Make(ctx, t.shape.snapshot, f.spec)
	if err != nil {
		if ctx.Err() == nil {
			p.cfg.Log.Warn("clone for the pool not made", "snapshot", t.shape.snapshot, "err", err)
		}
		en = nil
	} else {
		p.cfg.Log.Debug("clone made for the pool", "vm", en.ID, "snapshot", t.shape.snapshot, "dur", time.Since(began))
	}
	p.discard(ctx, p.end(f, en))
	p.left()
}

// Empty removes the entries of a snapshot, "" for all, so that nothing holds it.
func (p *Pool) Empty(ctx context.Context, snapshot string) {
	entries, made, leaving := p.drop(snapshot)
	if made != nil {
		<-made.done
	}
	if leaving != nil {
		<-leaving
	}
	p.discard(ctx, entries)
}

func (p *Pool) discard(ctx context.Context, entries []*Entry) {
	for _, en := range entries {
		p.maker.Discard(ctx, en)
	}
}

// Resume resumes the guest of an entry.
func (en *Entry) Resume(ctx context.Context) error {
	pauser, ok := hypervisor.As[hypervisor.Pauser](en.Inst)
	if !ok {
		return errdefs.Unsupportedf("its driver cannot resume a paused guest")
	}
	return pauser.Resume(ctx)
}
