package engine_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// waiting returns the running guests that belong to no VM.
func (r *rig) waiting(ctx context.Context) []vm.ID {
	r.t.Helper()
	left, err := r.world.Leftovers()
	if err != nil {
		r.t.Fatal(err)
	}
	all, err := r.List(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	var ids []vm.ID
	for _, l := range left {
		id, ok := strings.CutPrefix(l, "procs/")
		if ok && !slices.ContainsFunc(all, func(v vm.Record) bool { return string(v.ID) == id }) {
			ids = append(ids, vm.ID(id))
		}
	}
	return ids
}

func TestPool(t *testing.T) {
	r, ctx := newRig(t, func(r *rig) { r.cfg.PoolSize = 1 }), t.Context()
	source, _ := r.source()
	x := r.saved("gold")
	fill := func() vm.ID {
		t.Helper()
		if err := filled(ctx, r); err != nil {
			t.Fatal(err)
		}
		ids := r.waiting(ctx)
		if len(ids) != 1 {
			t.Fatalf("in the pool: %v", ids)
		}
		return ids[0]
	}
	a := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	r.await("a", "ready", ready)
	first := fill()
	if s := r.Pool(); s.Hits != 0 || s.Misses != 1 || s.Memory != x.Memory {
		t.Errorf("the pool is %+v", s)
	}
	rehearsed := r.world.Guest(first).Self()
	if !rehearsed.Paused || !rehearsed.Down || rehearsed.MAC == source.NICs[0].MAC {
		t.Errorf("in the pool is %+v", rehearsed)
	}
	if _, err := r.Inspect(ctx, string(first)); !errdefs.IsNotFound(err) {
		t.Errorf("what is in the pool can be seen: %v", err)
	}

	b := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "b", Labels: map[string]string{"k": "v"}}))
	if b.ID != first || b.Spec.Hostname != "b" || b.Spec.Labels["k"] != "v" || !b.Cloned || b.Snapshot != x.ID || r.disk(b.ID) != "one." {
		t.Errorf("from the pool comes %+v", b)
	}
	b = r.await("b", "ready", ready)
	g := r.world.Guest(b.ID)
	if got := r.volume(b.ID); got != "one" {
		t.Errorf("its volume holds %q", got)
	}
	if self := g.Self(); self.Hostname != "b" || self.MAC != b.NICs[0].MAC || self.MAC == a.NICs[0].MAC || self.Down || self.Paused || self.MachineID == rehearsed.MachineID {
		t.Errorf("it is %+v", self)
	}
	g.Print(1)
	r.logs("b", "line 3\n")
	if s := r.Pool(); s.Hits != 1 {
		t.Errorf("the pool is %+v", s)
	}

	second := fill()
	if c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", NICs: []vm.NICSpec{{MAC: "02:00:00:00:00:99"}}})); c.ID == second {
		t.Errorf("with another interface came %+v", c)
	}
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "b"})
	wantClass(t, "a name that is taken", err, errdefs.AlreadyExists)
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "d"})) // the pool serves the latest templates
	third := fill()

	r.world.Guest(third).End(hypervisor.Exit{Signal: 9, Code: -1})
	e := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold"})) // instead of one that has died
	if e.ID == third || e.Spec.Name != "cocoon-clone-"+string(e.ID) || e.Spec.Hostname != e.Spec.Name {
		t.Errorf("cloned %+v", e)
	}
	r.await(string(e.ID), "ready", ready)
	fill()
	e = r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold"}))
	if e.Spec.Name != "cocoon-clone-"+string(e.ID) || e.Spec.Hostname != e.Spec.Name {
		t.Errorf("from the pool comes %+v", e)
	}

	fill()
	r.restart() // the VMs survive it, the pool does not
	if ids := r.waiting(ctx); len(ids) > 0 {
		t.Errorf("left of the pool: %v", ids)
	}
	r.await("b", "ready", ready)
	r.must(r.Stop(ctx, "b", 0))
	again := r.must(r.Start(ctx, "b"))
	if again.NICs[0].MAC != b.NICs[0].MAC || again.NICs[0].IP != b.NICs[0].IP {
		t.Errorf("it had %+v and has %+v", b.NICs, again.NICs)
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "f"}))
	fill()
	if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
		t.Fatal(err)
	}
	if ids := r.waiting(ctx); len(ids) > 0 || r.Pool().Entries != 0 {
		t.Errorf("of a snapshot that is gone there are %v, %+v", ids, r.Pool())
	}
	r.clearAll()
}

// A snapshot whose clones cannot be prepared is retried with the next clone, and not before.
func TestPoolThatCannotBeFilled(t *testing.T) {
	tried := make(chan struct{}, 100)
	r, ctx := newRig(t, func(r *rig) {
		r.cfg.PoolSize = 1
		r.world.Fault = func(call string) error {
			if call == "driver.Pause" {
				tried <- struct{}{}
				return errdefs.Unavailablef("no")
			}
			return nil
		}
	}), t.Context()
	r.source()
	r.saved("gold")
	for _, name := range []string{"a", "b"} {
		r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: name}))
		<-tried
		r.await(name, "ready", ready)
	}
	r.stop()
	if len(tried) > 0 {
		t.Errorf("it was tried %d times more", len(tried))
	}
}
