package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// withCommon is a VM that boots itself and has the volume data beside others that share it, too.
func withCommon(name string) vm.Spec {
	s := attachedSpec(name)
	s.Image, s.Mounts, s.Volumes[0].Disk.Shared = "cloud", nil, true
	return s
}

// Several VMs run with one volume if each says so. Each keeps it and gives it back for itself, over a restart of the daemon, too.
func TestSharedVolume(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	have := func(what string, want ...vm.Record) {
		t.Helper()
		ids := map[vm.ID]volume.Mode{}
		for _, rec := range want {
			ids[rec.ID] = volume.Mode{Shared: true}
		}
		got := map[vm.ID]volume.Mode{}
		for _, a := range r.data(ctx).Attachments {
			got[a.VM] = a.Mode
		}
		if d := diff.Of(ids, got); d != "" {
			t.Errorf("%s: %s", what, d)
		}
	}
	first, second := r.must(r.Launch(ctx, withCommon("first"))), r.must(r.Launch(ctx, withCommon("second")))
	for _, rec := range []vm.Record{first, second} {
		if i := slices.IndexFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume }); i < 0 || !rec.Disks[i].Shared || rec.Disks[i].ReadOnly {
			t.Errorf("%s has the disks %+v", rec.Spec.Name, rec.Disks)
		}
	}
	have("launched", first, second)
	alone := withCommon("alone")
	alone.Volumes[0].Disk.Shared = false
	_, err := r.Launch(ctx, alone)
	r.refused("a VM that does not share it", errdefs.FailedPrecondition, err)
	if err != nil && !strings.Contains(err.Error(), "let each of these VMs share it") {
		t.Errorf("the refusal names no remedy: %v", err)
	}
	mounted := withCommon("mounted")
	mounted.Image, mounted.Mounts = "demo", []vm.Mount{{Volume: "disk", Path: "/data"}}
	_, err = r.Launch(ctx, mounted)
	r.refused("a VM that mounts it", errdefs.InvalidArgument, err)
	have("after the refusals", first, second)

	for what, err := range map[string]error{
		"a snapshot of the VM":     errorOf(r.SaveSnapshot(ctx, "first", vm.SaveSpec{Name: "gold"})),
		"a hibernation":            errorOf(r.Hibernate(ctx, "first", "")),
		"a snapshot of the volume": errorOf(r.Volumes().Snapshot(ctx, "data", volume.Spec{})),
		"a copy of the volume":     errorOf(r.Volumes().Clone(ctx, "data", volume.Spec{})),
		"its deletion":             r.Volumes().Delete(ctx, "data"),
	} {
		r.refused(what, errdefs.FailedPrecondition, err)
	}
	r.restart()
	have("after a restart of the daemon", first, second)
	r.must(r.Stop(ctx, "first", 0))
	r.must(r.Start(ctx, "first"))
	have("one was started again", first, second)

	got, err := r.Volumes().Grow(ctx, "data", 3<<20)
	if err != nil || len(got.Waiting) > 0 {
		t.Errorf("grown: waiting are %+v, %v", got.Waiting, err)
	}
	for _, rec := range []vm.Record{first, second} {
		if told := r.world.Guest(rec.ID).Told(); told[rec.Attached[0].Serial] != 3<<20 {
			t.Errorf("the guest of %s was told %v", rec.Spec.Name, told)
		}
	}
	if err := r.Remove(ctx, "first", true); err != nil {
		t.Fatal(err)
	}
	have("one is removed", second)
	if _, err := r.Volumes().Snapshot(ctx, "data", volume.Spec{Name: "of-one"}); err != nil {
		t.Errorf("a snapshot of what one VM writes to: %v", err)
	}
	if err := r.Remove(ctx, "second", true); err != nil {
		t.Fatal(err)
	}
	have("both are removed")
	if err := r.Volumes().Delete(ctx, "data"); err != nil {
		t.Error(err)
	}
}

// A running VM gets a volume that others share, and gives it back. The name of another owner's volume leads to nothing.
func TestSharedVolumeOfRunningVM(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	first := r.must(r.Launch(ctx, withCommon("first")))
	plain := withCommon("second")
	plain.Volumes = nil
	second := r.must(r.Launch(ctx, plain))
	_, err := r.AttachVolume(ctx, "second", vm.VolumeUse{Ref: "data"}, "")
	r.refused("not shared", errdefs.FailedPrecondition, err)
	for range 2 { // again is no error
		r.must(r.AttachVolume(ctx, "second", vm.VolumeUse{Ref: "data", Shared: true}, ""))
	}
	_, err = r.AttachVolume(ctx, "second", vm.VolumeUse{Ref: "data"}, "")
	r.refused("in another way", errdefs.AlreadyExists, err)
	_, err = r.Launch(r.as("prod"), withCommon("theirs"))
	r.refused("of another owner", errdefs.NotFound, err)
	users := map[vm.ID]bool{}
	for _, a := range r.data(ctx).Attachments {
		users[a.VM] = true
	}
	if d := diff.Of(map[vm.ID]bool{first.ID: true, second.ID: true}, users); d != "" {
		t.Errorf("attached: %s", d)
	}
	r.must(r.DetachVolume(ctx, "second", "data"))
	if v := r.data(ctx); !v.AttachedTo(first.ID) || v.AttachedTo(second.ID) {
		t.Errorf("detached: %+v", v.Attachments)
	}
}

// sharedScripts give and take a volume that another VM shares, and keeps whatever happens.
func sharedScripts() map[string]script {
	beside := func(ctx context.Context, r *rig) error {
		if err := createData(ctx, r); err != nil {
			return err
		}
		_, err := r.Launch(ctx, withCommon("b"))
		return err
	}
	launch := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, withCommon("web"))
		return err
	}
	both := func(ctx context.Context, r *rig) error { return errors.Join(beside(ctx, r), launch(ctx, r)) }
	plain := func(ctx context.Context, r *rig) error {
		s := withCommon("web")
		s.Volumes = nil
		_, err := r.Launch(ctx, s)
		return errors.Join(beside(ctx, r), err)
	}
	attach := func(ctx context.Context, r *rig) error {
		_, err := r.AttachVolume(ctx, "web", vm.VolumeUse{Ref: "data", Shared: true}, "")
		return err
	}
	return map[string]script{
		"launch beside one that shares":    {before: beside, act: launch, after: []vm.State{"", vm.StateRunning}},
		"remove one of two that share":     {before: both, act: func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", true) }, after: []vm.State{"", vm.StateRunning}},
		"attach a volume that is shared":   {before: plain, act: attach, after: []vm.State{vm.StateRunning}},
		"detach a volume that is shared":   {before: func(ctx context.Context, r *rig) error { return errors.Join(plain(ctx, r), attach(ctx, r)) }, act: detach, after: []vm.State{vm.StateRunning}},
		"restart one of two that share it": {before: both, act: func(ctx context.Context, r *rig) error { _, err := r.Restart(ctx, "web", 0); return err }, after: []vm.State{vm.StateRunning, vm.StateStopped}},
	}
}
