package engine_test

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// A guest that runs uses the new size of its volume at once, and others when they wake or start. The answer says which.
func TestGrowVolume(t *testing.T) {
	const mib = 1 << 20
	var fault atomic.Value
	fault.Store("")
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == fault.Load() {
				return errdefs.Unavailablef("fault at %s", call)
			}
			return nil
		}
	}), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	v := r.data(ctx)
	grow := func(what string, size int64, waits string) {
		t.Helper()
		got, err := r.Volumes().Grow(ctx, "data", size)
		if err != nil || got.Size != size {
			t.Fatalf("%s: %d bytes, %v", what, got.Size, err)
		}
		if waits == "" && len(got.Waiting) > 0 || waits != "" && (len(got.Waiting) != 1 || !strings.Contains(got.Waiting[0].Reason, waits)) {
			t.Errorf("%s: waiting are %+v, want %q", what, got.Waiting, waits)
		}
	}
	knows := func(what string, disk, fs int64) {
		t.Helper()
		rec := r.must(r.Inspect(ctx, "web"))
		g := r.world.Guest(rec.ID)
		r.eventually(what, func() bool {
			return g.Told()[volume.Serial(v.ID)] == disk && g.Volumes()[rec.Attached[0].Volume].Size == fs
		})
	}
	grow("attached to no VM", 2*mib, "")
	rec := r.must(r.Launch(ctx, attachedSpec("web")))
	r.await("web", "ready", ready)
	if rec.Attached[0].Size != 2*mib {
		t.Errorf("on record are %d bytes", rec.Attached[0].Size)
	}
	for range 2 { // again is no error
		grow("running", 3*mib, "")
		knows("of 3 MiB", 3*mib, 3*mib)
	}
	for _, call := range []string{"driver.GrowDisk", "agent.GrowVolume"} {
		fault.Store(call)
		size := r.data(ctx).Size + mib
		grow("with a fault", size, "fault at "+call)
		fault.Store("")
		if now := r.must(r.Inspect(ctx, "web")).Attached[0].Size; now >= size {
			t.Errorf("after a fault at %s, %d bytes are on record", call, now)
		}
		grow("again", size, "")
		knows("after a fault at "+call, size, size)
	}
	if _, err := r.Volumes().Resize(ctx, "data", mib); !errdefs.IsInvalid(err) {
		t.Errorf("smaller: %v", err)
	}
	r.must(r.Hibernate(ctx, "web", ""))
	grow("hibernated", 6*mib, "woken")
	r.restart()
	r.must(r.Wake(ctx, "web"))
	rec = r.await("web", "ready", ready)
	if larger := r.world.Guest(rec.ID).Self().Larger; larger != rec.Attached[0].Serial || rec.Attached[0].Size != 6*mib || rec.Resume != nil {
		t.Errorf("woken: larger are %q, on record %+v, %+v", larger, rec.Attached, rec.Resume)
	}
	knows("woken", r.world.Guest(rec.ID).Told()[volume.Serial(v.ID)], 6*mib)
	r.must(r.Hibernate(ctx, "web", ""))
	r.must(r.Wake(ctx, "web"))
	if larger := r.world.Guest(rec.ID).Self().Larger; larger != "" {
		t.Errorf("woken without a change: larger are %q", larger)
	}
	r.must(r.Stop(ctx, "web", 0))
	grow("stopped", 7*mib, "stopped")
	if rec = r.must(r.Start(ctx, "web")); rec.Attached[0].Size != 7*mib {
		t.Errorf("started: %+v", rec.Attached)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	reads := attachedSpec("web")
	reads.Volumes[0].Disk.ReadOnly = true
	r.must(r.Launch(ctx, reads))
	grow("read only", 8*mib, "only reads")
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	boots := attachedSpec("web")
	boots.Image, boots.Mounts = "cloud", nil
	rec = r.must(r.Launch(ctx, boots))
	grow("in an image that boots itself", 9*mib, "")
	if told := r.world.Guest(rec.ID).Told(); told[volume.Serial(v.ID)] != 9*mib {
		t.Errorf("it was told %v", told)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A wake that failed after the guest was told of a new size, as one that did not begin, tells it to the next guest.
func TestWakeThatFailsTellsTheSizeAgain(t *testing.T) {
	var fault atomic.Bool
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if fault.Load() && call == "driver.Launch done" {
				return errdefs.Unavailablef("fault at %s", call)
			}
			return nil
		}
	}), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, attachedSpec("web")))
	r.await("web", "ready", ready)
	r.must(r.Hibernate(ctx, "web", ""))
	if _, err := r.Volumes().Grow(ctx, "data", 2<<20); err != nil {
		t.Fatal(err)
	}
	fault.Store(true)
	_, err := r.Wake(ctx, "web")
	r.refused("wake", errdefs.Unavailable, err)
	fault.Store(false)
	rec := r.must(r.Wake(ctx, "web"))
	if larger := strings.Fields(r.world.Guest(rec.ID).Self().Larger); !slices.Equal(larger, []string{rec.Attached[0].Serial}) {
		t.Errorf("larger are %v", larger)
	}
	if rec.State != vm.StateRunning {
		t.Errorf("it is %s", rec.State)
	}
}
