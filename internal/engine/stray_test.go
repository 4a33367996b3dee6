package engine_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/records"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// loseJournal removes the journal of a stopped engine, and with mark also the file that says how far it had come.
func (r *rig) loseJournal(mark bool) {
	r.t.Helper()
	for _, suffix := range []string{"", "-wal", "-shm", ".mark"} {
		if suffix == ".mark" && !mark {
			continue
		}
		if err := os.Remove(filepath.Join(r.dir, "state", "journal.db"+suffix)); err != nil && !os.IsNotExist(err) {
			r.t.Fatal(err)
		}
	}
}

// forgetful starts an engine that accepts the journal as it is.
func (r *rig) forgetful() {
	r.t.Helper()
	r.file.Older = true
	r.start()
	r.file.Older = false
}

// TestUnknownIsKeptAside makes an engine forget its VMs, one of which runs: nothing of them is ended or removed until
// somebody asks for it.
func TestUnknownIsKeptAside(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("web")))
	db := r.must(r.Create(ctx, spec("db")))
	r.must(r.Launch(ctx, spec("other")))
	web, other := r.await("web", "ready", ready), r.await("other", "ready", ready)
	r.stop()
	before := leftovers(t, r.dir, r.world)

	for _, mark := range []bool{false, true} {
		r.loseJournal(mark)
		if err := r.try(); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "--rebuild") || !strings.Contains(err.Error(), "--older-journal") {
			t.Fatalf("an empty journal is taken: %v", err)
		}
		if now := leftovers(t, r.dir, r.world); !slices.Equal(now, before) {
			t.Fatalf("there is %v, before %v", now, before)
		}
	}
	r.forgetful()
	if now := leftovers(t, r.dir, r.world); !slices.Equal(now, before) {
		t.Errorf("there is %v, before %v", now, before)
	}
	all, err := r.Strays(ctx)
	if err != nil || len(all) != 3 || r.StrayCount() != 3 {
		t.Fatalf("kept aside: %+v, %v", all, err)
	}
	for _, s := range all {
		i := slices.IndexFunc([]vm.Record{web, db, other}, func(rec vm.Record) bool { return rec.ID == s.ID })
		if i < 0 {
			t.Fatalf("who is %+v?", s)
		}
		rec := []vm.Record{web, db, other}[i]
		if s.Name != rec.Spec.Name || s.State != rec.State || !slices.Equal(s.Taps, []string{rec.NICs[0].Tap}) || len(s.Dirs) != 2 {
			t.Errorf("%+v is said of %+v", s, rec)
		}
		if running := rec.State == vm.StateRunning; running != slices.Equal(s.PIDs, []int{rec.PID}) {
			t.Errorf("%s has processes %v", s.Name, s.PIDs)
		}
	}
	if !r.ImageInUse("sha256:demo") || r.ImageInUse("sha256:other") {
		t.Error("images of unknown VMs are not told")
	}
	wantClass(t, "reset", r.Reset(ctx), errdefs.FailedPrecondition)
	wantClass(t, "remove nobody", r.RemoveStray(ctx, "nobody"), errdefs.NotFound)

	adopted := r.must(r.AdoptStray(ctx, string(web.ID), ""))
	if adopted.State != vm.StateRunning || adopted.PID != web.PID || adopted.NICs[0].IP != web.NICs[0].IP {
		t.Errorf("adopted, compared with before: %s", diff.Of(web, adopted))
	}
	r.await("web", "ready", ready)
	r.must(r.Create(ctx, spec("db")))
	_, err = r.AdoptStray(ctx, string(db.ID), "")
	wantClass(t, "adopt a name that is taken", err, errdefs.AlreadyExists)
	r.must(r.AdoptStray(ctx, string(db.ID)[:8], "db2"))
	r.must(r.Start(ctx, "db2"))
	if err := r.RemoveStray(ctx, string(other.ID)); err != nil {
		t.Fatal(err)
	}
	if r.world.Guest(other.ID) != nil && r.StrayCount() != 0 {
		t.Error("it is there still")
	}
	r.restart()
	if rec := r.must(r.Inspect(ctx, "web")); rec.State != vm.StateRunning || rec.PID != web.PID {
		t.Errorf("after a restart it is %+v", rec)
	}
	if err := r.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// Folders that are empty, from a creation that never ended, or half removed are no VMs.
func TestProvenGarbageGoes(t *testing.T) {
	r := newRig(t)
	r.stop()
	for _, dir := range []string{"state/vms", "run/vms"} {
		for _, id := range []vm.ID{vm.NewID(), vm.NewID()} {
			if err := os.MkdirAll(filepath.Join(r.dir, dir, string(id)), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	unborn, gone := string(vm.NewID()), ".gone-"+string(vm.NewID())
	for _, name := range []string{unborn + "/unborn", unborn + "/cow", gone + "/cow"} {
		path := filepath.Join(r.dir, "state/vms", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	r.forgetful()
	r.clean()
	if all, err := r.Strays(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("kept aside: %+v, %v", all, err)
	}
}

// TestRebuild deletes the journal under twenty VMs in all states: all come back, and the running ones never stop.
func TestRebuild(t *testing.T) {
	var broken atomic.Bool
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if broken.Load() && call == "network.Release" {
				return errors.New("broken")
			}
			return nil
		}
	})
	ctx := t.Context()
	for i := range 20 {
		name := fmt.Sprintf("vm-%02d", i)
		if i%5 == 0 {
			r.must(r.Create(ctx, spec(name)))
			continue
		}
		r.must(r.Launch(ctx, spec(name)))
		r.await(name, "ready", ready)
		switch i % 5 {
		case 2:
			r.must(r.Stop(ctx, name, 0))
		case 3:
			r.must(r.Hibernate(ctx, name, ""))
		}
	}
	broken.Store(true)
	if err := r.Remove(ctx, "vm-02", true); err == nil {
		t.Fatal("it was removed")
	}
	broken.Store(false)
	before, err := r.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	states := map[vm.State]int{}
	for _, rec := range before {
		states[rec.State]++
	}
	if len(before) != 20 || len(states) != 5 {
		t.Fatalf("there are %d VMs in states %v", len(before), states)
	}
	r.stop()
	r.loseJournal(true)
	if err := r.try(); !errdefs.Is(err, errdefs.DataLoss) {
		t.Fatalf("an empty journal is taken: %v", err)
	}
	state := filepath.Join(r.dir, "state")
	rows, rest, err := records.Scan(filepath.Join(state, "vms"))
	if err != nil || len(rest) > 0 {
		t.Fatal(rest, err)
	}
	made, err := sqlite.Rebuild(ctx, sqlite.Config{Path: filepath.Join(state, "journal.db")}, rows)
	if err != nil || made.Rows != 20 || len(made.Left) > 0 {
		t.Fatalf("made %+v, %v", made, err)
	}
	r.start()
	after, err := r.List(ctx)
	if err != nil || len(after) != len(before) {
		t.Fatalf("%d VMs are back, %v", len(after), err)
	}
	for i, was := range before {
		is := after[i]
		if is.ID != was.ID || is.Spec.Name != was.Spec.Name || is.State != was.State || is.PID != was.PID || is.Snapshot != was.Snapshot ||
			fmt.Sprint(is.NICs) != fmt.Sprint(was.NICs) || fmt.Sprint(is.Disks) != fmt.Sprint(was.Disks) {
			t.Errorf("%s, compared with before: %s", was.Spec.Name, diff.Of(was, is))
		}
		if g := r.world.Guest(was.ID); was.State == vm.StateRunning && (g == nil || g.PID() != was.PID) {
			t.Errorf("%s has stopped", was.Spec.Name)
		}
		if was.State == vm.StateHibernated {
			r.must(r.Wake(ctx, was.Spec.Name))
		}
		if was.State == vm.StateStopped || was.State == vm.StateCreated {
			r.must(r.Start(ctx, was.Spec.Name))
		}
	}
	if err := r.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A journal that is older than the record of a VM is refused: a backup, or one whose log is missing.
func TestOlderJournal(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	r.stop()
	path := filepath.Join(r.dir, "state", "journal.db")
	backup, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r.start()
	db := r.must(r.Launch(ctx, spec("db")))
	r.await("db", "ready", ready)
	r.stop()
	if err := os.WriteFile(path, backup, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.try(); !errdefs.Is(err, errdefs.DataLoss) {
			t.Fatalf("it is taken: %v", err)
		}
		_ = os.Remove(path + ".mark") // the records alone prove it
	}
	r.forgetful()
	all, err := r.Strays(ctx)
	if err != nil || len(all) != 1 || all[0].ID != db.ID {
		t.Fatalf("kept aside: %+v, %v", all, err)
	}
	if g := r.world.Guest(db.ID); g == nil || g.PID() != db.PID {
		t.Error("it was ended")
	}
	r.must(r.AdoptStray(ctx, string(db.ID), ""))
	r.restart() // with a journal that must not be refused
	if rec := r.must(r.Inspect(ctx, "db")); rec.State != vm.StateRunning || rec.PID != db.PID {
		t.Errorf("it is %+v", rec)
	}
	if err := r.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// TestLostLeases removes the leases of a network while the engine is down: those of stopped VMs come back, too.
func TestLostLeases(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	for _, name := range []string{"asleep", "stopped", "running"} {
		r.must(r.Launch(ctx, spec(name)))
		r.await(name, "ready", ready)
	}
	r.must(r.Hibernate(ctx, "asleep", ""))
	r.must(r.Stop(ctx, "stopped", 0))
	leases := filepath.Join(r.dir, "world", "leases")
	names := func() (all []string) {
		entries, err := os.ReadDir(leases)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			all = append(all, e.Name())
		}
		return all
	}
	before := names()
	r.stop()
	if err := errors.Join(os.RemoveAll(leases), os.Mkdir(leases, 0o700)); err != nil {
		t.Fatal(err)
	}
	r.start()
	if now := names(); len(before) != 3 || !slices.Equal(now, before) {
		t.Errorf("addresses %v are held, before %v", now, before)
	}
	if err := r.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A volume stays attached to an unknown VM until that VM is removed. It is released when nothing is left of the VM, as after a power cut.
func TestVolumesOfUnknownVMs(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	rec := r.must(r.Launch(ctx, attachedSpec("web")))
	if _, err := r.world.Volumes().Create(ctx, volume.Spec{Name: "lost", Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.world.Volumes().Attach(ctx, "lost", vm.NewID(), volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.loseJournal(true)
	r.forgetful()
	if all, err := r.Strays(ctx); err != nil || len(all) != 1 || all[0].ID != rec.ID {
		t.Fatalf("kept aside: %+v, %v", all, err)
	}
	if lost, err := r.Volumes().Get(ctx, "lost"); err != nil || len(lost.Attachments) > 0 {
		t.Errorf("attached to a VM of which nothing is left: %+v, %v", lost.Attachments, err)
	}
	if v := r.data(ctx); v.Writer() != rec.ID {
		t.Errorf("attached to an unknown VM: %+v", v.Attachments)
	}
	if err := r.RemoveStray(ctx, string(rec.ID)); err != nil {
		t.Fatal(err)
	}
	if v := r.data(ctx); len(v.Attachments) > 0 {
		t.Errorf("attached to a removed VM: %+v", v.Attachments)
	}
	r.clean()
}
