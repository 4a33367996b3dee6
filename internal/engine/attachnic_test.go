package engine_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// plugNIC attaches the VM web to the network lab.
func plugNIC(ctx context.Context, r *rig) error {
	_, err := r.AttachNIC(ctx, "web", vm.NICSpec{Network: "lab"})
	return err
}

func unplugNIC(ctx context.Context, r *rig) error {
	_, err := r.DetachNIC(ctx, "web", "lab")
	return err
}

// nicScripts attach a VM to a network, and detach it.
func nicScripts() map[string]script {
	start := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, spec("web"))
		return errors.Join(err, until(ctx, r, ready))
	}
	create := func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, spec("web")); return err }
	disk := func(ctx context.Context, r *rig) error { _, err := r.Launch(ctx, cloud()); return err }
	then := func(all ...func(context.Context, *rig) error) func(context.Context, *rig) error {
		return func(ctx context.Context, r *rig) error {
			for _, one := range all {
				if err := one(ctx, r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	night := func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err }
	morning := func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err }
	running, created, asleep := []vm.State{vm.StateRunning}, []vm.State{vm.StateCreated}, []vm.State{vm.StateRunning, vm.StateHibernated}
	return map[string]script{
		"attach NIC":                  {before: start, act: plugNIC, after: running},
		"detach NIC":                  {before: then(start, plugNIC), act: unplugNIC, after: running},
		"attach NIC to a disk guest":  {before: disk, act: plugNIC, after: running},
		"detach NIC of a disk guest":  {before: then(disk, plugNIC), act: unplugNIC, after: running},
		"attach NIC to a stopped VM":  {before: create, act: plugNIC, after: created},
		"detach NIC of a stopped VM":  {before: then(create, plugNIC), act: unplugNIC, after: created},
		"hibernate with attached NIC": {before: then(start, plugNIC), act: night, after: asleep},
		"wake with attached NIC":      {before: then(start, plugNIC, night), act: morning, after: asleep},
	}
}

// hasNICs checks that a running VM has exactly the interfaces on its record, and that its guest knows of no others.
func (r *rig) hasNICs(rec vm.Record, where string) {
	r.t.Helper()
	if len(rec.NICs) != len(rec.Spec.NICs) || len(rec.Moving) > 0 {
		r.t.Errorf("%s: the record has the interfaces %+v of %+v, moving %v", where, rec.NICs, rec.Spec.NICs, rec.Moving)
	}
	if rec.State != vm.StateRunning {
		return
	}
	want := map[int]string{}
	var macs []string
	for i, n := range rec.NICs {
		macs = append(macs, n.MAC)
		if i > 0 {
			want[vm.PlaceOf(rec.NICs, i)] = n.MAC
		}
	}
	g := r.world.Guest(rec.ID)
	same := func(a, b string) bool { return a == b || rec.Cloned } // the world's agent tells a clone its first address only
	if have := g.NICs(); !maps.EqualFunc(have, want, same) {
		r.t.Errorf("%s: the guest has the interfaces %v, on record are %v", where, have, want)
	}
	if rec.ImageType != vm.ImageOCI || !rec.AgentReady || rec.Paused != "" || rec.Resume != nil || g.Self().Resumed > 0 {
		return
	}
	r.eventually("the guest is told of its interfaces "+where, func() bool {
		var told []string
		for _, n := range g.Identity().NICs {
			told = append(told, n.MAC)
		}
		return slices.Equal(told, macs)
	})
}

// A VM keeps an interface that it was given, whatever happens to it and to the daemon.
func TestAttachNIC(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := spec("web")
	s.NICs = []vm.NICSpec{{}, {Network: "net"}, {}}
	r.must(r.Launch(ctx, s))
	r.await("web", "ready", ready)
	has := func(what string, width int, networks ...string) vm.Record {
		t.Helper()
		rec := r.must(r.Inspect(ctx, "web"))
		var have []string
		for i, n := range rec.NICs {
			if n.IP == "" || n.Network != rec.Spec.NICs[i].Network && rec.Spec.NICs[i].Network != "" {
				t.Errorf("%s: interface %d is %+v", what, i, n)
			}
			have = append(have, n.Network)
		}
		if d := diff.Of(networks, have); d != "" || rec.Spec.BootNICs != width {
			t.Errorf("%s: it booted with %d, and has\n%s", what, rec.Spec.BootNICs, d)
		}
		r.hasNICs(rec, what)
		return rec
	}
	has("launched", 0, "net", "net", "net")
	for range 2 { // again is no error
		if err := plugNIC(ctx, r); err != nil {
			t.Fatal(err)
		}
		has("attached", 3, "net", "net", "net", "lab")
	}
	_, err := r.AttachNIC(ctx, "web", vm.NICSpec{Network: "lab", MAC: "02:00:00:00:00:99"})
	r.refused("another address", errdefs.AlreadyExists, err)
	_, err = r.AttachNIC(ctx, "web", vm.NICSpec{Network: "none"})
	r.refused("no such network", errdefs.InvalidArgument, err)
	second := has("refused", 3, "net", "net", "net", "lab").NICs[1].MAC
	r.must(r.DetachNIC(ctx, "web", second))
	rec := has("one from the middle is gone", 3, "net", "net", "lab")
	if places := []int{rec.Spec.Place(1), rec.Spec.Place(2)}; !slices.Equal(places, []int{2, 3}) {
		t.Errorf("the others are in the places %v", places)
	}
	_, err = r.DetachNIC(ctx, "web", second)
	r.refused("detach it again", errdefs.NotFound, err)
	_, err = r.DetachNIC(ctx, "web", rec.NICs[0].MAC)
	r.refused("detach the first", errdefs.InvalidArgument, err)
	r.restart()
	r.await("web", "ready again", ready)
	has("after a restart of the daemon", 3, "net", "net", "lab")
	address := rec.NICs[2].IP
	r.must(r.Hibernate(ctx, "web", ""))
	r.refused("detach it from a hibernated VM", errdefs.FailedPrecondition, unplugNIC(ctx, r))
	r.must(r.Wake(ctx, "web"))
	r.await("web", "ready after the night", ready)
	has("woken", 3, "net", "net", "lab")
	if err := save(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "copy"}))
	r.hasNICs(r.await("copy", "ready", ready), "a clone")
	r.must(r.Restore(ctx, "web", "gold"))
	r.await("web", "ready after the restore", ready)
	if rec = has("restored", 3, "net", "net", "lab"); rec.NICs[2].IP != address {
		t.Errorf("its address was %s, and is %s", address, rec.NICs[2].IP)
	}
	if err := unplugNIC(ctx, r); err != nil {
		t.Fatal(err)
	}
	has("detached", 3, "net", "net")
	_, err = r.Restore(ctx, "web", "gold")
	r.refused("a guest with another interface", errdefs.FailedPrecondition, err)
	r.must(r.Stop(ctx, "web", 0))
	if err := plugNIC(ctx, r); err != nil {
		t.Fatal(err)
	}
	has("attached while stopped", 0, "net", "net", "lab")
	r.must(r.Start(ctx, "web"))
	r.await("web", "ready once more", ready)
	rec = has("started", 0, "net", "net", "lab")
	if rec.Spec.Place(1) != 2 || rec.Spec.Place(2) != 1 {
		t.Errorf("places: %+v", rec.Spec.NICs)
	}
	r.must(r.Stop(ctx, "web", 0))
	if err := unplugNIC(ctx, r); err != nil {
		t.Fatal(err)
	}
	has("detached while stopped", 0, "net", "net")
	if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "copy"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	r.clean()
}

// A namespace chooses no hardware address on a link with other machines, as for the interfaces of a new VM, and a VM without any interface gets none.
func TestAttachNICRefuses(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	db := r.must(r.Launch(r.as("prod"), spec("db")))
	r.await(string(db.ID), "ready", ready)
	chosen := vm.NICSpec{Network: "lab", MAC: "02:00:00:00:00:99"}
	_, err := r.AttachNIC(r.as("prod"), "db", chosen)
	r.refused("an address of a namespace", errdefs.FailedPrecondition, err)
	chosen.MAC = "03:00:00:00:00:99"
	_, err = r.AttachNIC(ctx, "prod/db", chosen)
	r.refused("a multicast address", errdefs.InvalidArgument, err)
	bare := spec("bare")
	bare.NICs = nil
	r.must(r.Launch(ctx, bare))
	_, err = r.AttachNIC(ctx, "bare", vm.NICSpec{Network: "lab"})
	r.refused("a VM without an interface", errdefs.FailedPrecondition, err)
	r.await("bare", "ready", ready)
	r.must(r.Pause(ctx, "prod/db"))
	_, err = r.AttachNIC(ctx, "prod/db", vm.NICSpec{Network: "lab"})
	r.refused("a paused VM", errdefs.FailedPrecondition, err)
	for _, name := range []string{"prod/db", "bare"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	r.clean()
}

// After an error the VM is as before. If its guest does not give back the interface, the VM keeps it until somebody detaches it.
func TestAttachNICFails(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var failing atomic.Value
	failing.Store([]string(nil))
	fail := func(calls ...string) { failing.Store(calls) }
	r.world.Fault = func(call string) error {
		if slices.Contains(failing.Load().([]string), call) {
			return errdefs.Unavailablef("it does not answer")
		}
		return nil
	}
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	for _, call := range []string{"network.Attach", "network.Attach done", "driver.PlugNIC", "driver.PlugNIC done", "agent.Setup"} {
		fail(call)
		r.refused("with an error of "+call, errdefs.Unavailable, plugNIC(ctx, r))
		fail()
		rec := r.await("web", "ready", ready)
		if len(rec.NICs) != 1 {
			t.Errorf("after an error of %s: %+v", call, rec.NICs)
		}
		r.hasNICs(rec, call)
	}
	fail("driver.PlugNIC done", "driver.UnplugNIC")
	if err := plugNIC(ctx, r); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "keeps the interface") {
		t.Errorf("an interface that cannot be taken back: %v", err)
	}
	fail()
	_, err := r.Hibernate(ctx, "web", "")
	r.refused("hibernate what has half an interface", errdefs.FailedPrecondition, err)
	if err := plugNIC(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.hasNICs(r.must(r.Inspect(ctx, "web")), "attached in the end")
	for _, call := range []string{"driver.UnplugNIC", "driver.UnplugNIC done", "network.Detach", "network.Release done"} {
		fail(call)
		r.refused("detach with an error of "+call, errdefs.Unavailable, unplugNIC(ctx, r))
		if rec := r.must(r.Inspect(ctx, "web")); len(rec.NICs) != 2 {
			t.Errorf("after an error of %s: %+v", call, rec.NICs)
		}
	}
	fail()
	if err := unplugNIC(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.hasNICs(r.must(r.Inspect(ctx, "web")), "detached in the end")
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
