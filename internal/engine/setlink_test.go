package engine_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func setLink(down bool) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		_, err := r.SetLink(ctx, "web", "net", down)
		return err
	}
}

// linkScripts set links of a VM down and up.
func linkScripts() map[string]script {
	start := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, spec("web"))
		return errors.Join(err, until(ctx, r, ready))
	}
	then := func(first, second func(context.Context, *rig) error) func(context.Context, *rig) error {
		return func(ctx context.Context, r *rig) error {
			if err := first(ctx, r); err != nil {
				return err
			}
			return second(ctx, r)
		}
	}
	night := func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err }
	morning := func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err }
	running, asleep := []vm.State{vm.StateRunning}, []vm.State{vm.StateRunning, vm.StateHibernated}
	return map[string]script{
		"set a link down":           {before: start, act: setLink(true), after: running},
		"set a link up":             {before: then(start, setLink(true)), act: setLink(false), after: running},
		"wake with a link down":     {before: then(then(start, setLink(true)), night), act: morning, after: asleep},
		"attach NIC with link down": {before: start, act: plugDown, after: running},
	}
}

func plugDown(ctx context.Context, r *rig) error {
	_, err := r.AttachNIC(ctx, "web", vm.NICSpec{Network: "lab", LinkDown: true})
	return err
}

// hasLinks checks that the guest of a running VM has the links on its record, and that these are the wanted ones.
func (r *rig) hasLinks(rec vm.Record, where string) {
	r.t.Helper()
	want := map[int]bool{}
	for i, n := range rec.NICs {
		if n.LinkDown != rec.Spec.NICs[i].LinkDown {
			r.t.Errorf("%s: interface %d has the link down: %v; it is to be %v", where, i, n.LinkDown, rec.Spec.NICs[i].LinkDown)
		}
		if n.LinkDown {
			want[vm.PlaceOf(rec.NICs, i)] = true
		}
	}
	if rec.State != vm.StateRunning || rec.Resume != nil {
		return
	}
	have := map[int]bool{}
	maps.Copy(have, r.world.Guest(rec.ID).Down())
	if d := diff.Of(want, have); d != "" {
		r.t.Errorf("%s: interfaces of the guest without carrier:\n%s", where, d)
	}
}

// A link stays down, whatever happens to the VM and to the daemon, until it is set up.
func TestSetLink(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := spec("web")
	s.NICs = []vm.NICSpec{{}, {Network: "lab", LinkDown: true}}
	has := func(what string, down ...bool) vm.Record {
		t.Helper()
		rec := r.await("web", "settled "+what, func(rec vm.Record) bool { return rec.State != vm.StateRunning || ready(rec) })
		for i, want := range down {
			if rec.NICs[i].LinkDown != want {
				t.Errorf("%s: the link of interface %d is down: %v", what, i, !want)
			}
		}
		r.hasLinks(rec, what)
		return rec
	}
	r.must(r.Launch(ctx, s))
	rec := has("launched", false, true)
	for range 2 { // again is no error
		r.must(r.SetLink(ctx, "web", rec.NICs[0].MAC, true))
		has("set down", true, true)
	}
	_, err := r.SetLink(ctx, "web", "none", true)
	r.refused("no such interface", errdefs.NotFound, err)
	r.must(r.SetLink(ctx, "web", "lab", false))
	has("set up", true, false)
	r.restart()
	has("after a restart of the daemon", true, false)
	r.must(r.Hibernate(ctx, "web", ""))
	r.must(r.SetLink(ctx, "web", "lab", true))
	has("hibernated", true, true)
	r.must(r.Wake(ctx, "web"))
	has("woken", true, true)
	if err := save(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.SetLink(ctx, "web", "lab", false))
	snap := r.must(r.Inspect(ctx, "web")).SnapshotIDs[0]
	r.must(r.Restore(ctx, "web", snap))
	has("restored", true, false)
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: snap, Name: "copy"}))
	copied := r.await("copy", "ready", ready)
	if !copied.NICs[0].LinkDown || !copied.NICs[1].LinkDown {
		t.Errorf("a clone has %+v", copied.NICs)
	}
	r.hasLinks(copied, "a clone has those of its source")
	r.must(r.Stop(ctx, "web", 0))
	r.must(r.SetLink(ctx, "web", "net", false))
	has("stopped", false, false)
	r.must(r.Start(ctx, "web"))
	has("started", false, false)
	if _, err := r.DetachNIC(ctx, "web", "lab"); err != nil {
		t.Fatal(err)
	}
	if err := plugDown(ctx, r); err != nil {
		t.Fatal(err)
	}
	has("attached with its link down", false, true)
	two := spec("two")
	two.NICs = []vm.NICSpec{{}, {}}
	r.must(r.Launch(ctx, two))
	_, err = r.SetLink(ctx, "two", "net", true)
	r.refused("one of two on a network", errdefs.InvalidArgument, err)
	for _, name := range []string{"web", "copy", "two"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
}

// A link that could not be set is as before.
func TestSetLinkFails(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var failing atomic.Value
	failing.Store("")
	r.world.Fault = func(call string) error {
		if call == failing.Load().(string) {
			failing.Store("") // once
			return errdefs.Unavailablef("it does not answer")
		}
		return nil
	}
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	for _, call := range []string{"driver.SetLink", "driver.SetLink done"} {
		failing.Store(call)
		r.refused("with an error of "+call, errdefs.Unavailable, setLink(true)(ctx, r))
		rec := r.must(r.Inspect(ctx, "web"))
		if rec.NICs[0].LinkDown {
			t.Errorf("after an error of %s: %+v", call, rec.NICs)
		}
		r.hasLinks(rec, call)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// linkless is a driver like those whose guests always have their carriers: it only opens the links of a clone.
type linkless struct{ enginetest.Driver }

func (d linkless) Check(_ context.Context, p hypervisor.Plan) error {
	if slices.ContainsFunc(p.NICs, func(n vm.NIC) bool { return n.LinkDown }) {
		return errdefs.Unsupportedf("it has no interfaces without a carrier; use another driver")
	}
	return nil
}

func (d linkless) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	i, err := d.Driver.Launch(ctx, p)
	if err != nil {
		return nil, err
	}
	saver, _ := hypervisor.As[hypervisor.Snapshotter](i)
	dialer, _ := hypervisor.As[hypervisor.GuestDialer](i)
	pauser, _ := hypervisor.As[hypervisor.Pauser](i)
	linker, _ := hypervisor.As[hypervisor.Linker](i)
	plugger, _ := hypervisor.As[hypervisor.NICPlugger](i)
	return opening{i, saver, dialer, pauser, plugger, linker}, nil
}

type opening struct {
	hypervisor.Instance
	hypervisor.Snapshotter
	hypervisor.GuestDialer
	hypervisor.Pauser
	hypervisor.NICPlugger
	links hypervisor.Linker
}

func (o opening) OpenLink(ctx context.Context, place int) error {
	return o.links.SetLink(ctx, place, true)
}

// A driver that cannot take a carrier says so before anything is changed, whether the VM runs or not. The links of its clones open all the same.
func TestNoLinkDown(t *testing.T) {
	r, ctx := newRig(t, func(r *rig) { r.vmm = linkless{r.world.Driver()} }), t.Context()
	down := spec("down")
	down.NICs = []vm.NICSpec{{LinkDown: true}}
	_, err := r.Launch(ctx, down)
	r.refused("a VM with its link down", errdefs.Unsupported, err)
	r.clean()
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	unchanged := func(what string, act func() error) {
		t.Helper()
		before := r.must(r.Inspect(ctx, "web"))
		err := act()
		r.refused(what, errdefs.Unsupported, err)
		if err != nil && !strings.Contains(err.Error(), "use another driver") {
			t.Errorf("%s: no remedy: %v", what, err)
		}
		if after := r.must(r.Inspect(ctx, "web")); after.Revision != before.Revision {
			t.Errorf("%s: its record was changed: %s", what, diff.Of(before, after))
		}
	}
	unchanged("set the link of a running VM down", func() error { return setLink(true)(ctx, r) })
	unchanged("attach an interface with its link down", func() error { return plugDown(ctx, r) })
	if err := setLink(false)(ctx, r); err != nil {
		t.Errorf("it is up: %v", err)
	}
	if err := save(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: r.must(r.Inspect(ctx, "web")).SnapshotIDs[0], Name: "copy"}))
	r.hasLinks(r.await("copy", "ready", ready), "a clone")
	r.must(r.Stop(ctx, "web", 0))
	unchanged("set the link of a stopped VM down", func() error { return setLink(true)(ctx, r) })
	for _, name := range []string{"web", "copy"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
