package engine_test

import (
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// overlays returns the disks that the engine made in the folder of a VM.
func (r *rig) overlays(id vm.ID) (out []string) {
	r.t.Helper()
	entries, err := os.ReadDir(r.dir + "/state/vms/" + string(id))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "top-") || strings.HasPrefix(e.Name(), "disks-") {
			out = append(out, e.Name())
		}
	}
	return out
}

// TestWakeRemovesDisk: the first wake of a VM removes its old raw disk. The VM runs on a copy of the saved one.
func TestWakeRemovesDisk(t *testing.T) {
	r := newRig(t, func(r *rig) {
		if err := r.world.RawOnly(); err != nil {
			t.Fatal(err)
		}
	})
	ctx := t.Context()
	was := writable(t, r.must(r.Launch(ctx, spec("web")))).Path
	r.await("web", "ready", ready)
	r.must(r.Hibernate(ctx, "web", ""))
	now := writable(t, r.must(r.Wake(ctx, "web"))).Path
	if _, err := os.Stat(was); now == was || !os.IsNotExist(err) {
		t.Errorf("the VM has the disk %s, and its first one %s is there: %v", now, was, err)
	}
}

// TestInterruptedWakeRemovesDisk: the same, if the first wake ends in a power cut before the guest has answered.
func TestInterruptedWakeRemovesDisk(t *testing.T) {
	r, mute := mute(t, 20*time.Second)
	if err := r.world.RawOnly(); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	web := r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	r.must(r.Hibernate(ctx, "web", ""))
	mute.Store(true)
	done := make(chan error, 1)
	go func() { _, err := r.Wake(ctx, "web"); done <- err }()
	r.await("web", "running", func(v vm.Record) bool { return v.State == vm.StateRunning })
	r.stop()
	wantClass(t, "wake", <-done, errdefs.Unavailable)
	r.world.Guest(web.ID).End(hypervisor.Exit{Signal: 9, Code: -1})
	mute.Store(false)
	r.start()
	if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateHibernated {
		t.Fatalf("after it: %+v", now)
	}
	if _, err := os.Stat(writable(t, web).Path); !os.IsNotExist(err) {
		t.Errorf("its first disk is there: %v", err)
	}
	r.must(r.Wake(ctx, "web"))
}

func writable(t *testing.T, r vm.Record) vm.Disk {
	t.Helper()
	at := slices.IndexFunc(r.Disks, func(d vm.Disk) bool { return !d.ReadOnly })
	if at < 0 {
		t.Fatalf("no disk of %+v can be written to", r)
	}
	return r.Disks[at]
}

func TestHibernateAndWake(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, g := r.source()
	self := g.Self()
	slept := r.must(r.Hibernate(ctx, "web", ""))
	if slept.State != vm.StateHibernated || slept.PID != 0 || slept.Handle != nil || slept.Reason != vm.ReasonHibernated || slept.AgentReady || slept.Snapshot == "" {
		t.Errorf("hibernated %+v", slept)
	}
	if again := r.must(r.Hibernate(ctx, "web", "")); again.Revision != slept.Revision {
		t.Error("it was hibernated twice")
	}
	if got := r.overlays(rec.ID); len(got) != 0 {
		t.Errorf("overlays are left: %v", got)
	}
	if stopped := r.must(r.Stop(ctx, "web", 0)); stopped.State != vm.StateHibernated {
		t.Errorf("stopped %+v", stopped)
	}
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "x", Quiesce: true})
	wantClass(t, "freeze a hibernated VM", err, errdefs.FailedPrecondition)
	wantClass(t, "remove what it is in", r.RemoveSnapshot(ctx, slept.Snapshot), errdefs.FailedPrecondition)
	want := []string{"leases/" + rec.NICs[0].IP, "run/vms/" + string(rec.ID), "snapshots/" + slept.Snapshot, "state/vms/" + string(rec.ID)}
	if left := leftovers(t, r.dir, r.world); !slices.Equal(left, want) {
		t.Errorf("hibernated, the VM has %v, want %v", left, want)
	}
	r.restart()
	if left := leftovers(t, r.dir, r.world); !slices.Contains(left, "leases/"+rec.NICs[0].IP) {
		t.Errorf("hibernated, it has lost its address by a restart of the daemon: there is %v", left)
	}
	if err := os.RemoveAll(r.dir + "/run/vms/" + string(rec.ID)); err != nil { // as after a reboot
		t.Fatal(err)
	}
	if err := r.UpdateVolume(ctx, "web", "conf", content("two")); err != nil {
		t.Fatal(err)
	}
	woken := r.must(r.Wake(ctx, "web"))
	if woken.State != vm.StateRunning || nicOf(woken) != nicOf(rec) || woken.Snapshot != "" || woken.Restarts != rec.Restarts || !woken.StartedAt.Equal(rec.StartedAt) || woken.Cloned {
		t.Errorf("woken, compared with before: %s", diff.Of(rec, woken))
	}
	r.await("web", "ready", ready)
	g = r.world.Guest(rec.ID)
	now := g.Self()
	self.Resumed = 1
	if d := diff.Of(self, now); d != "" || r.volume(rec.ID) != "two" {
		t.Errorf("awake its volume holds %q, %s", r.volume(rec.ID), d)
	}
	if _, err := r.world.Snapshots().Get(ctx, slept.Snapshot); !errdefs.IsNotFound(err) {
		t.Errorf("its snapshot is there still (%v)", err)
	}
	r.write(g, "two.")
	g.Print(1)
	r.logs("web", "line 1\nline 2\nline 3\n")
	r.must(r.Wake(ctx, "web"))

	slept = r.must(r.Hibernate(ctx, "web", "night")) // again, with another name
	woken = r.must(r.Start(ctx, "web"))              // this wakes it, too
	if woken.State != vm.StateRunning || r.disk(rec.ID) != "one.two." || len(r.overlays(rec.ID)) != 2 {
		t.Errorf("woken %+v, its disk holds %q, overlays %v", woken, r.disk(rec.ID), r.overlays(rec.ID))
	}
	r.await("web", "ready", ready)
	r.must(r.Restart(ctx, "web", 0))
	if r.disk(rec.ID) != "one.two." {
		t.Errorf("booted anew its disk holds %q", r.disk(rec.ID))
	}
	r.await("web", "ready", ready)
	r.must(r.Hibernate(ctx, "web", ""))
	r.clearAll() // its snapshot goes with it
	_ = slept
}

func nicOf(r vm.Record) string { return r.NICs[0].MAC + " " + r.NICs[0].IP + " " + r.NICs[0].Tap }

func TestHibernateRefusals(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.saved("gold")
	_, err := r.Hibernate(ctx, "web", "gold")
	wantClass(t, "name taken", err, errdefs.AlreadyExists)
	_, err = r.Wake(ctx, "nope")
	wantClass(t, "wake nobody", err, errdefs.NotFound)
	r.must(r.Stop(ctx, "web", 0))
	_, err = r.Hibernate(ctx, "web", "")
	wantClass(t, "hibernate a stopped VM", err, errdefs.FailedPrecondition)
	_, err = r.Wake(ctx, "web")
	wantClass(t, "wake a stopped VM", err, errdefs.FailedPrecondition)
	r.clearAll("gold")
}

// TestHibernateFails at each of its acts: the guest continues as before, or the hibernation succeeds after all.
func TestHibernateFails(t *testing.T) {
	for _, call := range []string{
		"snapshots.Create", "snapshots.Overlay", "driver.Save", "driver.Save done", "snapshots.Link", "snapshots.Commit", "driver.Kill",
	} {
		t.Run(call, func(t *testing.T) {
			var broken atomic.Bool
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(name string) error {
					if name == call && broken.Load() {
						return errdefs.Exhaustedf("fault at %s", name)
					}
					return nil
				}
			})
			ctx := t.Context()
			rec, g := r.source()
			broken.Store(true)
			_, err := r.Hibernate(ctx, "web", "")
			wantClass(t, "hibernate", err, errdefs.ResourceExhausted)
			broken.Store(false)
			if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateRunning || !now.AgentReady || now.PID != rec.PID {
				t.Errorf("after that, compared with before: %s", diff.Of(rec, now))
			}
			if g.Self().Paused {
				t.Error("its guest is paused")
			}
			if all, err := r.world.Snapshots().List(ctx); err != nil || len(all) != 0 {
				t.Errorf("snapshots are left: %+v, %v", all, err)
			}
			r.write(g, "two.")
			r.must(r.Hibernate(ctx, "web", ""))
			r.must(r.Wake(ctx, "web"))
			r.await("web", "ready", ready)
			if got := r.disk(rec.ID); got != "one.two." {
				t.Errorf("its disk holds %q", got)
			}
			r.clearAll()
		})
	}
}

// TestWakeFails at each of its acts: the VM stays hibernated and can be woken.
func TestWakeFails(t *testing.T) {
	for _, call := range []string{"network.Attach", "snapshots.Overlay", "driver.Launch", "driver.Launch done", "driver.Machine"} {
		t.Run(call, func(t *testing.T) {
			var broken atomic.Bool
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(name string) error {
					if name == call && broken.Load() {
						return errdefs.Unavailablef("fault at %s", name)
					}
					return nil
				}
			})
			ctx := t.Context()
			rec, _ := r.source()
			slept := r.must(r.Hibernate(ctx, "web", ""))
			broken.Store(true)
			_, err := r.Wake(ctx, "web")
			wantClass(t, "wake", err, errdefs.Unavailable)
			now := r.must(r.Inspect(ctx, "web"))
			if now.State != vm.StateHibernated || now.Snapshot != slept.Snapshot || call != "driver.Machine" && (now.Reason != vm.ReasonWakeFailed || now.Message == "") {
				t.Errorf("after that it is %+v", now)
			}
			if got := r.overlays(rec.ID); len(got) != 0 {
				t.Errorf("overlays are left: %v", got)
			}
			broken.Store(false)
			r.must(r.Wake(ctx, "web"))
			if now := r.await("web", "ready", ready); now.Reason != "" || r.disk(rec.ID) != "one." {
				t.Errorf("awake it is %+v", now)
			}
			r.clearAll()
		})
	}
}

// TestWakeElsewhere refuses a machine on which the memory cannot resume.
func TestWakeElsewhere(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.must(r.Hibernate(ctx, "web", ""))
	r.world.Machine = vm.Machine{Driver: "fake", Version: "2", Type: "m2", Arch: "any", Accel: vm.AccelTCG, CPU: "max"}
	_, err := r.Wake(ctx, "web")
	wantClass(t, "wake", err, errdefs.FailedPrecondition)
	if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateHibernated {
		t.Errorf("after that it is %+v", now)
	}
	r.world.Machine = vm.Machine{Driver: "fake", Version: "1", Type: "m1", Arch: "any", Accel: vm.AccelKVM, CPU: "max"}
	if now := r.must(r.Wake(ctx, "web")); now.Spec.Accel != vm.AccelAuto { // it stays emulated; a VM that boots does not
		t.Errorf("awake it is %+v", now)
	}
	r.clearAll()
}

// TestHibernatedClone is told its identity when it wakes, if it was not told before.
func TestHibernatedClone(t *testing.T) {
	var deaf atomic.Bool
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == "agent.Resumed" && deaf.Load() {
				return errdefs.Unavailablef("fault")
			}
			return nil
		}
	})
	ctx := t.Context()
	r.source()
	r.saved("gold")
	deaf.Store(true)
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	r.must(r.Hibernate(ctx, "a", ""))
	woken := r.must(r.Wake(ctx, "a"))
	if !woken.Cloned || woken.Itself() {
		t.Errorf("woken %+v", woken)
	}
	deaf.Store(false)
	r.await("a", "ready", ready)
	if self := r.world.Guest(c.ID).Self(); self.Hostname != "a" || self.MAC != c.NICs[0].MAC || self.MachineID != c.Resume.MachineID || self.Down {
		t.Errorf("it is %+v", self)
	}
	r.must(r.Hibernate(ctx, "a", "")) // now it does not need to be told again
	r.must(r.Wake(ctx, "a"))
	r.await("a", "ready", ready)
	if self := r.world.Guest(c.ID).Self(); self.MachineID != c.Resume.MachineID || self.Resumed != 2 {
		t.Errorf("it is %+v", self)
	}
	r.clearAll("gold")
}

// restoreGold restores the VM of rec from the snapshot "gold". At the time of that snapshot, the guest had written "one" and
// two lines.
func (r *rig) restoreGold(what string, rec vm.Record, g *enginetest.Guest) {
	r.t.Helper()
	if g != nil {
		r.write(g, "later.")
		g.Print(5)
	}
	got := r.must(r.Restore(r.t.Context(), "web", "gold"))
	if got.State != vm.StateRunning || got.Snapshot != "" || got.Cloned || nicOf(got) != nicOf(rec) {
		r.t.Errorf("%s: restored, compared with before: %s", what, diff.Of(rec, got))
	}
	r.await("web", "ready", ready)
	if self := r.world.Guest(rec.ID).Self(); r.disk(rec.ID) != "one." || self.Lines != 2 || self.Down || self.Hostname != "web" {
		r.t.Errorf("%s: it is %+v, its disk holds %q", what, self, r.disk(rec.ID))
	}
	if got := r.overlays(rec.ID); len(got) != 1 {
		r.t.Errorf("%s: its folder has %v", what, got)
	}
	r.world.Guest(rec.ID).Print(1)
	r.logs("web", "line 3\n")
}

func TestRestore(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, g := r.source()
	x := r.saved("gold")
	r.restoreGold("running", rec, g)
	r.must(r.Stop(ctx, "web", 0))
	r.restoreGold("stopped", rec, nil)
	r.write(r.world.Guest(rec.ID), "asleep.")
	r.must(r.Hibernate(ctx, "web", ""))
	r.restoreGold("hibernated", rec, nil)
	if all, err := r.world.Snapshots().List(ctx); err != nil || len(all) != 1 {
		t.Errorf("there are %d snapshots, %v", len(all), err)
	}
	slept := r.must(r.Hibernate(ctx, "web", ""))
	if got := r.must(r.Restore(ctx, "web", slept.Snapshot)); got.State != vm.StateRunning { // this wakes it
		t.Errorf("restored %+v", got)
	}
	r.must(r.Stop(ctx, "web", 0))
	r.saved("disks")
	r.must(r.Start(ctx, "web"))
	r.write(r.world.Guest(rec.ID), "later.")
	if got := r.must(r.Restore(ctx, "web", "disks")); got.State != vm.StateRunning || r.disk(rec.ID) != "one." || got.Resume != nil {
		t.Errorf("restored %+v, its disk holds %q", got, r.disk(rec.ID))
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	_, err := r.Restore(ctx, "a", "gold")
	wantClass(t, "restore to another's", err, errdefs.FailedPrecondition)
	_, err = r.Restore(ctx, "a", "nope")
	wantClass(t, "restore to nothing", err, errdefs.NotFound)
	_, _ = c, x
	r.clearAll("gold", "disks")
}

// TestRestoreFails at each of its acts: the VM keeps its earlier disks.
func TestRestoreFails(t *testing.T) {
	for call, want := range map[string]vm.State{
		"snapshots.Disks": vm.StateRunning, "driver.Kill": vm.StateRunning,
		"network.Attach": vm.StateStopped, "driver.Launch": vm.StateStopped, "driver.Launch done": vm.StateStopped,
	} {
		t.Run(call, func(t *testing.T) {
			var broken atomic.Bool
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(name string) error {
					if name == call && broken.Load() {
						return errdefs.Unavailablef("fault at %s", name)
					}
					return nil
				}
			})
			ctx := t.Context()
			rec, g := r.source()
			r.saved("gold")
			r.write(g, "two.")
			broken.Store(true)
			_, err := r.Restore(ctx, "web", "gold")
			wantClass(t, "restore", err, errdefs.Unavailable)
			broken.Store(false)
			now := r.must(r.Inspect(ctx, "web"))
			if now.State != want {
				t.Errorf("after that it is %+v", now)
			}
			r.must(r.Start(ctx, "web"))
			if got := r.disk(rec.ID); got != "one.two." {
				t.Errorf("its disk holds %q", got)
			}
			if got := r.overlays(rec.ID); len(got) != 1 {
				t.Errorf("its folder has %v", got)
			}
			r.must(r.Restore(ctx, "web", "gold"))
			if got := r.disk(rec.ID); got != "one." {
				t.Errorf("its disk holds %q", got)
			}
			r.clearAll("gold")
		})
	}
}

// TestWakeWithOtherMACs wakes a VM whose network is made by others, which gave it another NIC after a restart of the
// host.
func TestWakeWithOtherMACs(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, g := r.source()
	id := g.Self().MachineID
	r.must(r.Hibernate(ctx, "web", ""))
	r.stop()
	if err := os.Remove(r.world.Dir + "/leases/" + rec.NICs[0].IP); err != nil {
		t.Fatal(err)
	}
	r.world.Net = 11
	r.start()
	woken := r.must(r.Wake(ctx, "web"))
	if woken.NICs[0].MAC == rec.NICs[0].MAC {
		t.Errorf("woken, compared with before: %s", diff.Of(rec, woken))
	}
	now := r.await("web", "ready", ready)
	if self := r.world.Guest(rec.ID).Self(); self.MAC != now.NICs[0].MAC || self.Down || self.MachineID != id || self.Hostname != "web" {
		t.Errorf("it is %+v, its record %+v", self, now)
	}
	r.must(r.Hibernate(ctx, "web", ""))
	r.must(r.Wake(ctx, "web"))
	r.await("web", "ready", ready)
	r.clearAll()
}

// A save of a hibernated VM keeps the snapshot that the VM is in: it stays when the VM is removed, or wakes.
func TestHibernatedStateIsKept(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	slept := r.must(r.Hibernate(ctx, "web", "night"))
	labels := map[string]string{"a": "b"}
	kept, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "web:hibernate", Labels: labels})
	if err != nil || kept.ID != slept.Snapshot || kept.Name != "web:hibernate" || kept.Labels["a"] != "b" || !kept.Live {
		t.Fatalf("kept %+v, %v", kept, err)
	}
	if again, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "web:hibernate", Labels: labels}); err != nil || again.ID != kept.ID {
		t.Errorf("kept again: %s, %v", again.ID, err)
	}
	wantClass(t, "remove what it is in", r.RemoveSnapshot(ctx, kept.ID), errdefs.FailedPrecondition)
	r.restart()
	r.must(r.Wake(ctx, "web"))
	r.await("web", "ready", ready)
	if _, err := r.world.Snapshots().Get(ctx, kept.ID); err != nil {
		t.Errorf("the kept snapshot is gone after the wake: %v", err)
	}
	r.must(r.Hibernate(ctx, "web", "again"))
	if kept, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "last"}); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(ctx, "web", false); err != nil {
		t.Fatal(err)
	}
	clone := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: kept.ID, Name: "web"}))
	r.await("web", "ready", ready)
	if r.disk(clone.ID) != "one." {
		t.Errorf("its disk holds %q", r.disk(clone.ID))
	}
	if err := r.RemoveSnapshot(ctx, kept.ID); err != nil {
		t.Error(err)
	}
}
