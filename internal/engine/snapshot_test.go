package engine_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

func (r *rig) saved(name string) snapshot.Snapshot {
	r.t.Helper()
	x, err := r.SaveSnapshot(r.t.Context(), "web", vm.SaveSpec{Name: name})
	if err != nil {
		r.t.Fatal(err)
	}
	return x
}

// source launches the VM "web", which has its identity and has written "one" to its disk and two lines to its log.
func (r *rig) source() (vm.Record, *enginetest.Guest) {
	r.t.Helper()
	r.must(r.Launch(r.t.Context(), withVolumes()))
	rec := r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	g.Print(2)
	r.write(g, "one.")
	return rec, g
}

func (r *rig) write(g *enginetest.Guest, text string) {
	r.t.Helper()
	if err := g.Write(text); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) disk(id vm.ID) string {
	r.t.Helper()
	text, err := r.world.Guest(id).Disk()
	if err != nil {
		r.t.Fatal(err)
	}
	return text
}

// clearAll removes all VMs and the named snapshots, and fails if anything remains.
func (r *rig) clearAll(snapshots ...string) {
	r.t.Helper()
	for _, s := range snapshots {
		if err := r.RemoveSnapshot(r.t.Context(), s); err != nil {
			r.t.Error(err)
		}
	}
	if err := r.Reset(r.t.Context()); err != nil {
		r.t.Error(err)
	}
	r.clean()
}

func TestSaveAndClone(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, g := r.source()
	x := r.saved("gold")
	if !x.Live || x.Source.VMID != rec.ID || x.CPU != rec.Spec.CPUs || x.NIC[0].MAC != rec.NICs[0].MAC || x.NIC[0].Tap != "" || x.Machine.Type != "m1" || x.Pause == 0 {
		t.Errorf("saved %+v", x)
	}
	if x.Record.PID != 0 || x.Record.Handle != nil || x.Record.Spec.Labels != nil || x.Record.Disks[0].Path != "" {
		t.Errorf("a clone would inherit %+v", x.Record)
	}
	if g.Self().Paused || g.Self().Lines != 2 {
		t.Errorf("after the save the guest is %+v", g.Self())
	}
	r.write(g, "two.")
	g.Print(1)
	now := r.must(r.Inspect(ctx, "web"))
	if len(now.SnapshotIDs) != 1 || now.SnapshotIDs[0] != x.ID || !now.AgentReady {
		t.Errorf("the record says %+v", now)
	}
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "a second snapshot of that name", err, errdefs.AlreadyExists)

	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a", Labels: map[string]string{"k": "v"}}))
	if c.Snapshot != x.ID || !c.Cloned || c.Spec.Labels["k"] != "v" || c.NICs[0].IP == rec.NICs[0].IP || c.Spec.Hostname != "a" {
		t.Errorf("cloned %+v", c)
	}
	if got := r.disk(c.ID); got != "one." {
		t.Errorf("the clone's disk holds %q", got)
	}
	c = r.await("a", "ready", ready)
	cg := r.world.Guest(c.ID)
	self := cg.Self()
	if self.Hostname != "a" || self.MAC != c.NICs[0].MAC || len(self.MachineID) != 32 || self.Down || self.Lines != 2 || self.Resumed != 1 {
		t.Errorf("the clone is %+v", self)
	}
	if c.Resume != nil || c.Message != "" {
		t.Errorf("the clone's record says %+v", c)
	}
	if r.volume(c.ID) != "one" { // the first content of the source's volume
		t.Errorf("the clone's volume holds %q", r.volume(c.ID))
	}
	cg.Print(1)
	r.logs("a", "line 3\n")
	r.logs("web", "line 1\nline 2\nline 3\n")
	r.write(cg, "three.")
	if got := r.disk(rec.ID); got != "one.two." {
		t.Errorf("the source's disk holds %q", got)
	}

	r.restart() // what the clone knows and where its log begins survive the daemon
	r.await("a", "ready", ready)
	r.logs("a", "line 3\n")
	r.must(r.Stop(ctx, "a", 0))
	c = r.must(r.Start(ctx, "a"))
	if c.Cloned || c.Resume != nil || r.disk(c.ID) != "one.three." {
		t.Errorf("started anew it is %+v, its disk holds %q", c, r.disk(c.ID))
	}
	r.await("a", "ready", ready)

	if !r.ImageInUse("sha256:demo") || r.ImageInUse("sha256:other") {
		t.Error("image use is wrong")
	}
	y := r.saved("second") // on top of the first
	d := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "second"}))
	if d.Spec.Name != "cocoon-clone-"+string(d.ID) || r.disk(d.ID) != "one.two." {
		t.Errorf("cloned %+v, its disk holds %q", d, r.disk(d.ID))
	}
	if err := r.RemoveSnapshot(ctx, y.ID); err != nil {
		t.Fatal(err)
	}
	r.await("web", "without that snapshot", func(v vm.Record) bool { return len(v.SnapshotIDs) == 1 })
	if got := r.disk(d.ID); got != "one.two." {
		t.Errorf("after its snapshot went the clone's disk holds %q", got)
	}
	r.clearAll("gold")
}

// logs waits until the log of ref is want.
func (r *rig) logs(ref, want string) {
	r.t.Helper()
	var got string
	done := fmt.Errorf("done")
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	err := r.Logs(ctx, ref, guest.LogOptions{Tail: -1, Follow: true}, func(e guest.LogEntry) error {
		if got += string(e.Data); len(got) >= len(want) {
			return done
		}
		return nil
	})
	if got != want {
		r.t.Errorf("the log of %s is %q, want %q (%v)", ref, got, want, err)
	}
}

func TestSaveStopped(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, _ := r.source()
	r.must(r.Stop(ctx, "web", 0))
	x := r.saved("disks")
	if x.Live || x.Hypervisor != "fake" || len(x.Disks) != 1 {
		t.Errorf("saved %+v", x)
	}
	r.must(r.Start(ctx, "web"))
	r.write(r.world.Guest(rec.ID), "two.")
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "disks", Name: "a", CPUs: 4, NICs: []vm.NICSpec{{}, {}}}))
	if c.Cloned || c.Spec.CPUs != 4 || len(c.NICs) != 2 || r.disk(c.ID) != "one." {
		t.Errorf("cloned %+v, its disk holds %q", c, r.disk(c.ID))
	}
	c = r.await("a", "ready", ready)
	if self := r.world.Guest(c.ID).Self(); self.Hostname != "a" || len(self.MachineID) != 32 || r.volume(c.ID) != "one" {
		t.Errorf("the clone is %+v", self)
	}
	r.clearAll("disks")
}

func TestCloneRefusals(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	x := r.saved("gold")
	for name, tt := range map[string]struct {
		change func(*vm.CloneSpec)
		want   errdefs.Class
		says   string
	}{
		"unknown snapshot": {func(s *vm.CloneSpec) { s.Snapshot = "nope" }, errdefs.NotFound, "nope"},
		"nothing":          {func(s *vm.CloneSpec) { s.Snapshot = "" }, errdefs.InvalidArgument, "snapshot or a folder"},
		"both":             {func(s *vm.CloneSpec) { s.FromDir = "/x" }, errdefs.InvalidArgument, "snapshot or a folder"},
		"relative folder":  {func(s *vm.CloneSpec) { s.Snapshot, s.FromDir = "", "x" }, errdefs.InvalidArgument, "absolute"},
		"name taken":       {func(s *vm.CloneSpec) { s.Name = "web" }, errdefs.AlreadyExists, "web"},
		"bad name":         {func(s *vm.CloneSpec) { s.Name = "a/b" }, errdefs.InvalidArgument, "a/b"},
		"other CPUs":       {func(s *vm.CloneSpec) { s.CPUs = 8 }, errdefs.FailedPrecondition, "cold"},
		"other memory":     {func(s *vm.CloneSpec) { s.Memory = 8 << 30 }, errdefs.FailedPrecondition, "cold"},
		"more interfaces":  {func(s *vm.CloneSpec) { s.NICs = make([]vm.NICSpec, 2) }, errdefs.FailedPrecondition, "interfaces"},
		"other network":    {func(s *vm.CloneSpec) { s.NICs = []vm.NICSpec{{Network: "x"}} }, errdefs.InvalidArgument, "network"},
		"smaller disk":     {func(s *vm.CloneSpec) { s.Storage = 1 << 30 }, errdefs.InvalidArgument, "shrink"},
	} {
		s := vm.CloneSpec{Snapshot: "gold", Name: "a"}
		tt.change(&s)
		_, err := r.Clone(ctx, s)
		wantClass(t, name, err, tt.want)
		if err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v does not say %q", name, err, tt.says)
		}
	}
	for name, tt := range map[string]struct {
		change func(*snapshot.Snapshot)
		want   errdefs.Class
		says   string
	}{
		"other hypervisor": {func(x *snapshot.Snapshot) { x.Hypervisor = "bhyve" }, errdefs.FailedPrecondition, "bhyve"},
		"other machine":    {func(x *snapshot.Snapshot) { x.Machine.Type, x.Machine.Arch = "m2", "z80" }, errdefs.FailedPrecondition, "z80"},
		"image gone":       {func(x *snapshot.Snapshot) { x.ImageDigest = "sha256:gone" }, errdefs.NotFound, "sha256:gone"},
	} {
		was := x
		if _, err := r.world.Snapshots().Update(ctx, "gold", tt.change); err != nil {
			t.Fatal(err)
		}
		_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"})
		wantClass(t, name, err, tt.want)
		if err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v does not say %q", name, err, tt.says)
		}
		if _, err := r.world.Snapshots().Update(ctx, "gold", func(x *snapshot.Snapshot) { *x = was }); err != nil {
			t.Fatal(err)
		}
	}
	if all, _ := r.List(ctx); len(all) != 1 {
		t.Errorf("there are %d VMs", len(all))
	}
	// A machine on which the memory cannot resume boots the disks.
	if _, err := r.world.Snapshots().Update(ctx, "gold", func(x *snapshot.Snapshot) { x.Hypervisor = "bhyve" }); err != nil {
		t.Fatal(err)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a", Cold: true, Memory: 2 << 30, Storage: 20 << 30}))
	if c.Cloned || c.Spec.Memory != 2<<30 || c.Spec.Storage != 20<<30 || c.Driver != "fake" {
		t.Errorf("cloned %+v", c)
	}
	r.clearAll("gold")
}

// TestCloneWithALargerDisk is told of it, also by a daemon that started later.
func TestCloneWithALargerDisk(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.saved("gold")
	same := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "same"}))
	r.await("same", "ready", ready)
	if self := r.world.Guest(same.ID).Self(); self.Larger != "" || self.Storage != 0 {
		t.Errorf("a disk like the source's has grown: %+v", self)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a", Storage: 20 << 30}))
	r.restart()
	r.await("a", "ready", ready)
	if self := r.world.Guest(c.ID).Self(); self.Larger != image.SerialCOW || self.Storage != 20<<30 {
		t.Errorf("the clone is %+v", self)
	}
	r.must(r.Hibernate(ctx, "a", ""))
	r.must(r.Wake(ctx, "a"))
	r.await("a", "ready", ready)
	if self := r.world.Guest(c.ID).Self(); self.Larger != "" || self.Storage != 0 {
		t.Errorf("woken, it is told again: %+v", self)
	}
	r.clearAll("gold")
}

func TestCloneFromDir(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.saved("gold")
	h, err := r.world.Snapshots().Hold(ctx, "gold")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "out")
	if err := r.world.Snapshots().ExportDir(ctx, h, dir); err != nil {
		t.Fatal(err)
	}
	wantClass(t, "remove what is held", r.RemoveSnapshot(ctx, "gold"), errdefs.FailedPrecondition)
	h.Release()
	if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
		t.Fatal(err)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{FromDir: dir, Name: "a"}))
	if r.disk(c.ID) != "one." {
		t.Errorf("its disk holds %q", r.disk(c.ID))
	}
	r.await("a", "ready", ready)
	source := r.must(r.Inspect(ctx, "web"))
	other := vm.CloneSpec{FromDir: dir, Name: "b", CPUs: 8, Memory: 8 << 30, NICs: []vm.NICSpec{{}}}
	_, err = r.Clone(ctx, other)
	wantClass(t, "other sizes", err, errdefs.FailedPrecondition)
	other.Keep = vm.Keep{Size: true, NICs: true}
	if b := r.must(r.Clone(ctx, other)); b.Spec.CPUs != source.Spec.CPUs || b.Spec.Memory != source.Spec.Memory || len(b.NICs) != len(source.NICs) {
		t.Errorf("clone that keeps its size: %+v", b.Spec)
	}
	other.NICs, other.Name = make([]vm.NICSpec, 2), "c"
	_, err = r.Clone(ctx, other)
	wantClass(t, "two examples of an interface", err, errdefs.InvalidArgument)
	r.clearAll()
}

// TestManyClones clones one snapshot many times at once: each clone has its own identity.
func TestManyClones(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.saved("gold")
	const many = 16
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() {
			if _, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: fmt.Sprint("c", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ids := map[string]bool{}
	for i := range many {
		c := r.await(fmt.Sprint("c", i), "ready", ready)
		self := r.world.Guest(c.ID).Self()
		if self.Hostname != c.Spec.Name || self.MAC != c.NICs[0].MAC || ids[self.MachineID] {
			t.Errorf("clone %d is %+v", i, self)
		}
		ids[self.MachineID] = true
	}
	r.clearAll("gold")
}

func TestQuiesce(t *testing.T) {
	var frozen []bool
	var broken, late atomic.Bool
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == "driver.Save" && broken.Load() {
				return errdefs.Unavailablef("fault")
			}
			if call == "agent.Setup" && late.Load() {
				<-time.After(100 * time.Millisecond)
			}
			if call == "driver.Save done" {
				for _, rec := range value(r.List(r.t.Context())) {
					frozen = append(frozen, r.world.Guest(rec.ID).Self().Frozen)
				}
			}
			return nil
		}
	})
	ctx := t.Context()
	rec, g := r.source()
	x, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "still", Quiesce: true})
	if err != nil || !x.Quiesced || len(frozen) != 1 || !frozen[0] || g.Self().Frozen {
		t.Errorf("saved %+v, %v; frozen meanwhile %v, afterwards %v", x, err, frozen, g.Self().Frozen)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "still", Name: "a"}))
	r.await("a", "ready", ready)
	if r.world.Guest(c.ID).Self().Frozen {
		t.Error("the clone is frozen still")
	}
	broken.Store(true)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "again", Quiesce: true})
	wantClass(t, "a save that fails", err, errdefs.Unavailable)
	if g.Self().Frozen || g.Self().Paused {
		t.Errorf("after a failed save the guest is %+v", g.Self())
	}
	broken.Store(false)
	r.must(r.Launch(ctx, vm.Spec{Name: "mute", Image: "disk"}))
	_, err = r.SaveSnapshot(ctx, "mute", vm.SaveSpec{Name: "mute", Quiesce: true})
	wantClass(t, "quiesce without agent", err, errdefs.FailedPrecondition)
	late.Store(true)
	r.restart()
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "anew", Quiesce: true}); err != nil {
		t.Errorf("before the engine has reached the guest again: %v", err)
	}
	_ = rec
	r.clearAll("still", "anew")
}

// TestSettle: a guest settles before others resume from its state, and is saved even if it cannot settle.
func TestSettle(t *testing.T) {
	var settled, saved atomic.Int32
	var broken atomic.Bool
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			switch {
			case call == "agent.Settle" && broken.Load():
				return errdefs.Unavailablef("fault")
			case call == "agent.Settle done":
				settled.Add(1)
			case call == "driver.Save":
				saved.Store(settled.Load())
			}
			return nil
		}
	})
	ctx := t.Context()
	r.source()
	for n, quiesce := range []bool{false, true} {
		if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: fmt.Sprint("gold", n), Quiesce: quiesce}); err != nil || saved.Load() != int32(n+1) {
			t.Errorf("quiesce %v: %v; settled %d times before it was saved", quiesce, err, saved.Load())
		}
	}
	broken.Store(true)
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold2"}); err != nil {
		t.Errorf("a guest that does not settle: %v", err)
	}
	broken.Store(false)
	before := settled.Load()
	r.must(r.Hibernate(ctx, "web", "night"))
	if settled.Load() != before {
		t.Error("a guest settled for a hibernation, from which it alone goes on")
	}
	r.must(r.Wake(ctx, "web"))
	r.clearAll("gold0", "gold1", "gold2")
}

func value[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestCloneThatIsRefused by its guest is neither ready nor ended: its state may be the only copy.
func TestCloneThatIsRefused(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.source()
	r.saved("gold")
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a", Hostname: "refused"}))
	c := r.await("a", "told of", func(v vm.Record) bool { return strings.Contains(v.Message, "not taken") })
	if c.AgentReady || c.State != vm.StateRunning || !r.world.Guest(c.ID).Self().Down {
		t.Errorf("the clone is %+v", c)
	}
	r.clearAll("gold")
}
