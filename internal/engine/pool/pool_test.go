package pool

import (
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// The most recently used templates get the memory of the pool.
func TestPoolOrder(t *testing.T) {
	p := New(Config{Size: 2, Memory: 5 << 20}, nil)
	clone := func(snapshot string, mib int64) {
		r := vm.Record{Snapshot: snapshot}
		r.Spec.Memory = mib << 20
		p.Used(r, vm.CloneSpec{Snapshot: snapshot}, false)
	}
	// settle fills and evicts until there is nothing to do, and returns how many entries each snapshot has.
	settle := func() map[string]int {
		for {
			fill, surplus := p.next()
			p.left()
			if fill == nil && len(surplus) == 0 {
				break
			}
			if fill != nil {
				if f := p.begin(fill, func() {}); f != nil {
					p.end(f, &Entry{})
				}
			}
		}
		n := map[string]int{}
		for s, t := range p.templates {
			n[s.snapshot] = len(t.ready)
		}
		return n
	}
	for _, tt := range []struct {
		snapshot string
		mib      int64
		want     map[string]int
	}{
		{"a", 2, map[string]int{"a": 2}},
		{"b", 1, map[string]int{"b": 2, "a": 1}},
		{"c", 1, map[string]int{"c": 2, "b": 2}},
		{"huge", 6, map[string]int{"c": 2, "b": 2}},
		{"a", 2, map[string]int{"a": 2, "c": 1}},
	} {
		clone(tt.snapshot, tt.mib)
		got := settle()
		if len(got) != len(tt.want) {
			t.Errorf("after %s there is %v, want %v", tt.snapshot, got, tt.want)
		}
		for s, n := range tt.want {
			if got[s] != n {
				t.Errorf("after %s there is %v, want %v", tt.snapshot, got, tt.want)
			}
		}
	}
	if s := p.Stats(); s.Entries != 3 || s.Memory != 5<<20 || s.Misses != 5 {
		t.Errorf("the pool is %+v", s)
	}
	entries, _, _ := p.drop("a")
	if len(entries) != 2 || p.Take(vm.Record{Snapshot: "a"}) != nil || p.Take(vm.Record{Snapshot: "c"}) == nil {
		t.Error("the wrong entries were dropped")
	}
}

// The removal of a snapshot waits for entries that are being removed for lack of room.
func TestPoolSurplus(t *testing.T) {
	p := New(Config{Size: 1, Memory: 1 << 20}, nil)
	for _, snapshot := range []string{"a", "b"} {
		r := vm.Record{Snapshot: snapshot}
		r.Spec.Memory = 1 << 20
		p.Used(r, vm.CloneSpec{Snapshot: snapshot}, false)
		fill, surplus := p.next()
		if fill == nil || fill.shape.snapshot != snapshot {
			t.Fatalf("after %s there is %+v to do", snapshot, fill)
		}
		if snapshot == "a" {
			p.end(p.begin(fill, func() {}), &Entry{})
		} else if len(surplus) != 1 {
			t.Fatalf("%d entries are surplus, want that of a", len(surplus))
		}
	}
	_, _, leaving := p.drop("a")
	select {
	case <-leaving:
		t.Error("an entry that is being removed is not waited for")
	default:
	}
	p.left()
	<-leaving
	if _, _, leaving := p.drop("a"); leaving != nil {
		t.Error("an entry that has gone is waited for")
	}
}

// A VM whose disks have other limits does not get the process of one that is kept ready.
func TestPoolLimits(t *testing.T) {
	p := New(Config{Size: 1, Memory: 1 << 20}, nil)
	r := vm.Record{Snapshot: "a", Spec: vm.Spec{DiskRate: vm.DiskRate{Ops: 100}}}
	p.Used(r, vm.CloneSpec{Snapshot: "a"}, false)
	fill, _ := p.next()
	p.end(p.begin(fill, func() {}), &Entry{})
	other := r
	other.Spec.DiskRate.Ops = 50
	if p.Take(other) != nil || p.Take(r) == nil {
		t.Error("the wrong VM got the process")
	}
}
