package engine_test

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func dumpTo(ctx context.Context, r *rig, ref string) error {
	return r.DumpMemory(ctx, "web", ref, "web.dump")
}

func dumpScripts() map[string]script {
	before := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, cloud())
		return errors.Join(err, createData(ctx, r))
	}
	act := func(ctx context.Context, r *rig) error { return dumpTo(ctx, r, "data") }
	return map[string]script{"dump": {before: before, act: act, after: []vm.State{vm.StateRunning}}}
}

// contents returns the bytes of the volume data.
func (r *rig) contents(ctx context.Context) []byte {
	r.t.Helper()
	var b bytes.Buffer
	if err := r.Volumes().Export(ctx, "data", &b); err != nil {
		r.t.Fatal(err)
	}
	return b.Bytes()
}

// A dump takes a volume that is free, and gives it back.
func TestDumpMemory(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var clocks atomic.Int32
	r.world.Fault = func(call string) error {
		if call == "agent.SetClock" {
			clocks.Add(1)
		}
		return nil
	}
	r.refused("no such VM", errdefs.NotFound, dumpTo(ctx, r, "data"))
	rec := r.must(r.Launch(ctx, cloud()))
	r.refused("no such volume", errdefs.NotFound, dumpTo(ctx, r, "data"))
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "..", "a/b", ".hidden", "lost+found", "a b"} {
		r.refused("a file called "+name, errdefs.InvalidArgument, r.DumpMemory(ctx, "web", "data", name))
	}
	for range 2 { // the second dump replaces the first
		if err := dumpTo(ctx, r, "data"); err != nil {
			t.Fatal(err)
		}
		if b := r.contents(ctx); !bytes.Contains(b, []byte(rec.ID)) || !bytes.Contains(b, []byte("web.dump")) {
			t.Error("the volume lacks the dump")
		}
		if v := r.data(ctx); len(v.Attachments) > 0 {
			t.Errorf("the volume is kept: %+v", v.Attachments)
		}
	}
	r.eventually("the guest gets the time that it has missed", func() bool { return clocks.Load() >= 2 })
	r.must(r.Pause(ctx, "web"))
	if err := dumpTo(ctx, r, "data"); err != nil {
		t.Errorf("of a paused VM: %v", err)
	}
	r.must(r.Unpause(ctx, "web"))

	// A volume that is in use, or holds anything else, stays as it is.
	r.must(r.AttachVolume(ctx, "web", vm.VolumeUse{Ref: "data"}, ""))
	r.refused("a volume of the VM", errdefs.FailedPrecondition, dumpTo(ctx, r, "data"))
	r.must(r.DetachVolume(ctx, "web", "data"))
	before := bytes.Repeat([]byte("mine"), 1<<18)
	if _, err := r.Volumes().Import(ctx, volume.Spec{Name: "other"}, bytes.NewReader(before), nil); err != nil {
		t.Fatal(err)
	}
	r.refused("a volume with something else", errdefs.FailedPrecondition, dumpTo(ctx, r, "other"))
	var after bytes.Buffer
	if err := r.Volumes().Export(ctx, "other", &after); err != nil || !bytes.Equal(before, after.Bytes()) {
		t.Errorf("what was on it has changed: %v", err)
	}
	theirs := vm.OnBehalf(ctx, vm.Owner{Namespace: "prod"})
	r.must(r.Launch(theirs, cloud()))
	r.refused("a volume of somebody else", errdefs.NotFound, r.DumpMemory(theirs, "web", "data", "x"))
	r.refused("the same, for the operator", errdefs.NotFound, r.DumpMemory(ctx, "prod/web", "data", "x"))
	if err := r.Remove(theirs, "web", true); err != nil {
		t.Fatal(err)
	}

	r.must(r.Stop(ctx, "web", 0))
	r.refused("of a stopped VM", errdefs.FailedPrecondition, dumpTo(ctx, r, "data"))
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A dump that fails leaves the VM as it was, and the volume free.
func TestDumpMemoryFails(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var fail atomic.Bool
	r.world.Fault = func(call string) error {
		if fail.Load() && call == "driver.DumpMemory half" {
			return errdefs.Unavailablef("QEMU ended the dump")
		}
		return nil
	}
	r.must(r.Launch(ctx, cloud()))
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	fail.Store(true)
	r.refused("a failed dump", errdefs.Unavailable, dumpTo(ctx, r, "data"))
	if v, rec := r.data(ctx), r.must(r.Inspect(ctx, "web")); len(v.Attachments) > 0 || rec.State != vm.StateRunning {
		t.Errorf("%+v, %s", v.Attachments, rec.State)
	}
	fail.Store(false)
	if err := dumpTo(ctx, r, "data"); err != nil {
		t.Error(err)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
