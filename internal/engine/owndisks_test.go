package engine_test

import (
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestSandboxDisks: a container has the layers of another image and a block device of the node, which are plugged once for all containers of the
// guest, and for no other VM.
func TestSandboxDisks(t *testing.T) {
	need.Root(t)
	r, ctx := newRig(t), t.Context()
	dev := filepath.Join(t.TempDir(), "dev")
	if err := unix.Mknod(dev, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 4095))); err != nil { // nobody opens it
		t.Fatal(err)
	}
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		if call == fault.Load() {
			return errdefs.Unavailablef("told to fail")
		}
		return nil
	}
	r.must(r.Launch(ctx, sandbox()))
	rec := r.await("web", "ready", ready)
	none := len(rec.Disks)
	with := func(name string) vm.Container {
		c := manual(name)
		c.Image = "demo"
		c.Volumes = []vm.Volume{
			{Name: "files", Kind: vm.VolumeImage, Image: "layered"},
			{Name: "data", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: dev, Trusted: true}},
		}
		c.Mounts = []vm.Mount{{Volume: "files", Path: "/files", SubPath: "part"}, {Volume: "data", Path: "/dev/data", Device: true}}
		return c
	}
	for what, change := range map[string]func(*vm.Container){
		"a device that is mounted":    func(c *vm.Container) { c.Mounts[1].Device = false },
		"an image that is a device":   func(c *vm.Container) { c.Mounts[0].Device = true },
		"a device of nobody's choice": func(c *vm.Container) { c.Volumes[1].HostDisk.Trusted = false },
		"an image that boots itself":  func(c *vm.Container) { c.Volumes[0].Image = "disk" },
	} {
		c := with("app")
		change(&c)
		_, err := r.AddContainer(ctx, "web", c)
		wantClass(t, what, err, errdefs.InvalidArgument)
	}
	folder := with("app")
	folder.Volumes[1].HostDisk.Path = filepath.Dir(dev)
	_, err := r.AddContainer(ctx, "web", folder)
	wantClass(t, "a folder as a device", err, errdefs.FailedPrecondition)
	for _, call := range []string{"driver.PlugDisk", "agent.AddContainer"} {
		fault.Store(call)
		_, err := r.AddContainer(ctx, "web", with("app"))
		wantClass(t, call, err, errdefs.Unavailable)
		if now := r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 0 || len(now.Disks) != none {
			t.Errorf("after %s failed: %+v, %+v", call, now.Ephemeral, now.Disks)
		}
	}
	fault.Store("")

	r.must(r.AddContainer(ctx, "web", with("app")))
	now := r.must(r.AddContainer(ctx, "web", with("two")))
	if len(now.Disks) != none+2 || len(r.world.Guest(rec.ID).Serials()) != none+2 {
		t.Fatalf("two containers have the disks %+v, the guest has %v", now.Disks, r.world.Guest(rec.ID).Serials())
	}
	d := now.Disks[none+1]
	if d.Path != dev || !d.Device || d.Role != vm.RoleHost || d.Format != vm.DiskRaw || d.ReadOnly || d.Port == 0 {
		t.Errorf("the device is %+v", d)
	}
	for _, e := range now.Ephemeral {
		if len(e.Volumes) != 2 || e.Volumes[0].ImageDigest != "sha256:layered" || !slices.Equal(e.Volumes[0].Layers, []string{now.Disks[none].Serial}) || !slices.Equal(e.Volumes[1].Layers, []string{d.Serial}) {
			t.Errorf("%s has %+v", e.Spec.Name, e.Volumes)
		}
	}
	if m := now.Ephemeral[1].Spec.GuestMounts(); m[0] != (vm.Mount{Volume: "two.files", Path: "/files", SubPath: "part"}) || m[1] != (vm.Mount{Volume: "two.data", Path: "/dev/data", Device: true}) {
		t.Errorf("the guest mounts %+v", m)
	}
	if !r.ImageInUse("sha256:layered") {
		t.Error("the image of a volume is nobody's")
	}
	other := sandbox()
	other.Name = "other"
	r.must(r.Launch(ctx, other))
	r.await("other", "ready", ready)
	_, err = r.AddContainer(ctx, "other", with("app"))
	wantClass(t, "the device of another VM", err, errdefs.FailedPrecondition)

	if err := r.RemoveContainer(ctx, "web", "app"); err != nil {
		t.Fatal(err)
	}
	if now := r.must(r.Inspect(ctx, "web")); len(now.Disks) != none+2 {
		t.Errorf("one container needs them still: %+v", now.Disks)
	}
	r.restart()
	r.await("web", "ready", ready)
	if err := r.RemoveContainer(ctx, "web", "two"); err != nil {
		t.Fatal(err)
	}
	if now := r.must(r.Inspect(ctx, "web")); len(now.Disks) != none || len(r.world.Guest(rec.ID).Serials()) != none || r.ImageInUse("sha256:layered") {
		t.Errorf("nothing needs them: %+v, the guest has %v", now.Disks, r.world.Guest(rec.ID).Serials())
	}
	r.must(r.AddContainer(ctx, "other", with("app")))
	r.must(r.Stop(ctx, "other", 0))
	if now := r.must(r.Inspect(ctx, "other")); len(now.Ephemeral[0].Volumes[0].Layers)+len(now.Ephemeral[0].Volumes[1].Layers) != 0 || r.ImageInUse("sha256:layered") {
		t.Errorf("after the end of the guest: %+v", now.Ephemeral)
	}
}
