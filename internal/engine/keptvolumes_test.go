package engine_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// keptRig is a rig with a VM that writes to the volume data.
func keptRig(t *testing.T, opts ...func(*rig)) *rig {
	t.Helper()
	r := newRig(t, opts...)
	if _, err := r.Volumes().Import(t.Context(), volume.Spec{Name: "data", Size: 1 << 20}, bytes.NewReader([]byte("one")), nil); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(t.Context(), attachedSpec("web")))
	r.await("web", "ready", ready)
	return r
}

// path returns where the bytes of a volume are that a VM writes to.
func (r *rig) path(ctx context.Context, ref string) string {
	r.t.Helper()
	v, err := r.world.Volumes().Get(ctx, ref)
	if err == nil {
		_, d, failed := r.world.Volumes().Attach(ctx, ref, v.Writer(), volume.Mode{}) // again
		if err = failed; err == nil {
			return d.Path
		}
	}
	r.t.Fatal(err)
	return ""
}

// content returns the first bytes of a volume.
func (r *rig) content(ctx context.Context, ref string) string {
	r.t.Helper()
	all, err := os.ReadFile(r.path(ctx, ref))
	if err != nil {
		r.t.Fatal(err)
	}
	return string(bytes.TrimRight(all, "\x00"))
}

// rewrite changes the first bytes of the volume data.
func (r *rig) rewrite(ctx context.Context, text string) {
	r.t.Helper()
	f, err := os.OpenFile(r.path(ctx, "data"), os.O_WRONLY, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = f.WriteAt([]byte(text), 0)
	if err := errors.Join(err, f.Close()); err != nil {
		r.t.Fatal(err)
	}
}

// The snapshot of a VM has its volumes as they were at that instant. Each clone has volumes of its own with that content.
func TestSnapshotWithVolumes(t *testing.T) {
	r, ctx := keptRig(t), t.Context()
	source := r.data(ctx)
	x, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	if err != nil {
		t.Fatal(err)
	}
	if len(x.Volumes) != 1 || x.Volumes[0].Volume != "disk" || x.Volumes[0].Serial != volume.Serial(source.ID) {
		t.Fatalf("the snapshot has the volumes %+v", x.Volumes)
	}
	r.rewrite(ctx, "two")
	a := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	cold := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "cold", Cold: true}))
	for _, rec := range []vm.Record{a, cold} {
		i := slices.IndexFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume })
		if len(rec.Attached) != 1 || i < 0 || rec.Spec.Volumes[0].Disk.Ref != string(rec.Attached[0].ID) || rec.Attached[0].ID == source.ID {
			t.Fatalf("clone %s has %+v, disks %+v", rec.Spec.Name, rec.Attached, rec.Disks)
		}
		id := rec.Attached[0].ID
		if v, err := r.Volumes().Get(ctx, string(id)); err != nil || v.Writer() != rec.ID || v.For != string(rec.ID) {
			t.Errorf("the volume of clone %s: %+v, %v", rec.Spec.Name, v, err)
		}
		if got := r.content(ctx, string(id)); got != "one" {
			t.Errorf("the volume of clone %s holds %q", rec.Spec.Name, got)
		}
		want := volume.Serial(source.ID) // that its guest knows
		if rec.Spec.Name == "cold" {
			want = volume.Serial(id)
		}
		if rec.Attached[0].Serial != want || rec.Disks[i].Serial != want {
			t.Errorf("the serial of clone %s is %s, on its disk %s, want %s", rec.Spec.Name, rec.Attached[0].Serial, rec.Disks[i].Serial, want)
		}
	}
	if got := r.content(ctx, "data"); got != "two" {
		t.Errorf("the source's volume holds %q", got)
	}
	r.await("cold", "ready", ready)
	if got := r.world.Guest(cold.ID).Identity().VolumeSerials["disk"]; got != cold.Attached[0].Serial {
		t.Errorf("the guest of the cold clone was told the serial %q", got)
	}
	r.restart()
	r.must(r.Stop(ctx, "a", 0))
	r.must(r.Start(ctx, "a"))

	one := string(x.Volumes[0].Snapshot)
	r.refused("remove a part of the snapshot", errdefs.FailedPrecondition, r.Volumes().DeleteSnapshot(ctx, one))
	if err := r.Remove(ctx, "a", true); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Volumes().Get(ctx, string(a.Attached[0].ID)); err != nil {
		t.Errorf("the volume of a removed clone: %v", err)
	}
	if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Volumes().GetSnapshot(ctx, one); !errdefs.IsNotFound(err) {
		t.Errorf("the part of a removed snapshot: %v", err)
	}
}

// What cannot be kept or copied is refused, and nothing is left of it.
func TestSnapshotsWithVolumesThatAreRefused(t *testing.T) {
	var fault atomic.Value
	fault.Store("")
	r, ctx := keptRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == fault.Load() {
				return errdefs.Preconditionf("fault at %s", call)
			}
			return nil
		}
	}), t.Context()
	fault.Store("volumes.Snapshot") // as of a file system that cannot do that
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	r.refused("save with a store that cannot copy what a VM writes to", errdefs.FailedPrecondition, err)
	fault.Store("driver.Save done")
	if _, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err == nil {
		t.Error("saved")
	}
	fault.Store("driver.Launch")
	nothing := func(what string, want int) {
		t.Helper()
		snaps, err := r.Volumes().Snapshots(ctx)
		all, failed := r.Volumes().List(ctx)
		if err != nil || failed != nil || len(snaps) != want || len(all) != 1 {
			t.Errorf("%s: snapshots %+v, volumes %+v, %v, %v", what, snaps, all, err, failed)
		}
	}
	nothing("after refused saves", 0)
	x, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}); err == nil {
		t.Error("cloned")
	}
	nothing("after a failed clone", 1)
	fault.Store("")

	_, err = r.Restore(ctx, "web", "gold")
	r.refused("restore a VM with volumes", errdefs.FailedPrecondition, err)
	_, err = r.world.Snapshots().Update(ctx, "gold", func(x *snapshot.Snapshot) { x.Published = []string{vm.Everyone} })
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Clone(vm.OnBehalf(ctx, vm.Owner{Namespace: "dev"}), vm.CloneSpec{Snapshot: "gold", Name: "a"})
	r.refused("another namespace's clone", errdefs.FailedPrecondition, err)
	if err := r.world.Volumes().DeleteSnapshot(ctx, string(x.Volumes[0].Snapshot)); err != nil {
		t.Fatal(err)
	}
	_, err = r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"})
	r.refused("clone without the content of the volume", errdefs.NotFound, err)
	nothing("after refused clones", 0)
}

// A guest whose volumes cannot be copied at once is neither frozen nor paused.
func TestSaveIsRefusedBeforeTheGuestIsPaused(t *testing.T) {
	var calls []string
	var mu sync.Mutex
	r, ctx := keptRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			mu.Lock()
			defer mu.Unlock()
			if call == "agent.Freeze" || !strings.HasPrefix(call, "agent.") { // the session with the guest makes the others at any time
				calls = append(calls, call)
			}
			if call == "volumes.CheckLive" {
				return errdefs.Preconditionf("the file system cannot do that")
			}
			return nil
		}
	}), t.Context()
	mu.Lock()
	calls = nil
	mu.Unlock()
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold", Quiesce: true})
	r.refused("save a VM whose volume cannot be copied at once", errdefs.FailedPrecondition, err)
	if err == nil || !strings.Contains(err.Error(), "volume disk cannot be copied at once, and its guest would wait for the copy; stop the VM first") ||
		!strings.Contains(err.Error(), "the file system cannot do that") {
		t.Errorf("the error is %v", err)
	}
	mu.Lock()
	if d := diff.Of([]string{"volumes.CheckLive"}, calls); d != "" {
		t.Errorf("calls (-want +got):\n%s", d)
	}
	mu.Unlock()
	r.must(r.Stop(ctx, "web", 0))
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil { // nobody waits
		t.Errorf("save the stopped VM: %v", err)
	}
}

// The next start removes the parts of snapshots that do not exist.
func TestPartsOfNoSnapshot(t *testing.T) {
	r, ctx := keptRig(t), t.Context()
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Volumes().Snapshot(ctx, "data", volume.Spec{Name: "mine"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.world.Volumes().Snapshot(ctx, "data", volume.Spec{Name: "lost", For: string(vm.NewID())}); err != nil {
		t.Fatal(err)
	}
	r.restart()
	r.must(r.Inspect(ctx, "web"))
	snaps, err := r.Volumes().Snapshots(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var got []bool
	for _, x := range snaps {
		got = append(got, x.For != "")
	}
	if d := diff.Of([]bool{false, true}, got); d != "" {
		t.Errorf("%s: %+v", d, snaps)
	}
}
