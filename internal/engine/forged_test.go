package engine_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestForeignSnapshot claims to be taken of a VM that does not know it: its clones do not get the secrets of that VM.
func TestForeignSnapshot(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec, _ := r.source()
	r.must(r.Launch(ctx, vm.Spec{Name: "evil", Image: "demo"}))
	r.await("evil", "ready", ready)
	if _, err := r.SaveSnapshot(ctx, "evil", vm.SaveSpec{Name: "claims"}); err != nil {
		t.Fatal(err)
	}
	for _, id := range []vm.ID{rec.ID, "../" + rec.ID, "nobody"} {
		_, err := r.world.Snapshots().Update(ctx, "claims", func(x *snapshot.Snapshot) {
			x.Source.VMID = id
			x.Record.Spec.Volumes = []vm.Volume{{Name: "conf", Kind: vm.VolumeFiles}}
		})
		if err != nil {
			t.Fatal(err)
		}
		c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "claims", Name: "a"}))
		r.await("a", "ready", ready)
		if files := r.world.Guest(c.ID).Volume("conf"); len(files) != 0 {
			t.Errorf("source %s: the clone was given %d files", id, len(files))
		}
		if err := r.Remove(ctx, "a", true); err != nil {
			t.Fatal(err)
		}
	}
	r.clearAll("claims")
}

// TestForgedSandbox: a snapshot that claims to be of a sandbox, or that one of its containers had something of its node, gives nothing of this node.
func TestForgedSandbox(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := severalSpec()
	s.Name = "evil"
	r.must(r.Launch(ctx, s))
	r.await("evil", "ready", ready)
	r.must(r.AddContainer(ctx, "evil", debugger("debug")))
	if _, err := r.SaveSnapshot(ctx, "evil", vm.SaveSpec{Name: "claims"}); err != nil {
		t.Fatal(err)
	}
	for what, tt := range map[string]struct {
		forge func(x *snapshot.Snapshot)
		class errdefs.Class
	}{
		"a sandbox": {func(x *snapshot.Snapshot) { x.Record.Spec.Sandbox = true }, errdefs.Unsupported},
		"a cgroup":  {func(x *snapshot.Snapshot) { x.Record.Spec.CgroupParent = "/kubepods/pod1" }, errdefs.Unsupported},
		"a folder": {func(x *snapshot.Snapshot) {
			c := &x.Record.Ephemeral[0].Spec
			c.Volumes, c.Mounts = []vm.Volume{{Name: "v", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/etc", Trusted: true}}}, []vm.Mount{{Volume: "v", Path: "/v"}}
		}, errdefs.DataLoss},
		"a folder of the VM": {func(x *snapshot.Snapshot) {
			x.Record.Spec.Volumes = append(x.Record.Spec.Volumes, vm.Volume{Name: "v", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/etc", Trusted: true}})
		}, errdefs.InvalidArgument},
		"a device of the VM": {func(x *snapshot.Snapshot) {
			x.Record.Spec.Volumes = append(x.Record.Spec.Volumes, vm.Volume{Name: "v", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: "/dev/vda", Trusted: true}})
		}, errdefs.InvalidArgument},
		"a disk": {func(x *snapshot.Snapshot) {
			x.Record.Ephemeral[0].Volumes = []vm.ImageVolume{{Volume: "v", Layers: []string{"host-0"}}}
		}, errdefs.DataLoss},
	} {
		var was vm.Record
		change := func(f func(x *snapshot.Snapshot)) {
			if _, err := r.world.Snapshots().Update(ctx, "claims", f); err != nil {
				t.Fatal(err)
			}
		}
		change(func(x *snapshot.Snapshot) { was = x.Record.Clone(); tt.forge(x) })
		_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "claims", Name: "a"})
		wantClass(t, what, err, tt.class)
		change(func(x *snapshot.Snapshot) { x.Record = was })
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "claims", Name: "a"}))
	r.clearAll("claims")
}
