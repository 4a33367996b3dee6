package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// foldered is a container with a folder of the node.
func foldered(name, dir string) vm.Container {
	c := manual(name)
	c.Volumes = []vm.Volume{{Name: "data", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: dir, Trusted: true}}}
	c.Mounts = []vm.Mount{{Volume: "data", Path: "/data"}}
	return c
}

func runsFoldered(ctx context.Context, r *rig) error {
	_, err := r.Launch(ctx, sandbox())
	err = errors.Join(err, until(ctx, r, ready), write(ctx, r, "one."))
	_, failed := r.AddContainer(ctx, "web", foldered("app", "/"))
	if err = errors.Join(err, failed); err == nil {
		_, err = r.StartContainer(ctx, "web", "app")
	}
	return err
}

// checkpointed saves the sandbox, and returns a folder with its snapshot.
func checkpointed(ctx context.Context, r *rig, name string) (string, error) {
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: name}); err != nil {
		return "", err
	}
	return exported(ctx, r, name, name)
}

func exported(ctx context.Context, r *rig, name, to string) (string, error) {
	h, err := r.world.Snapshots().Hold(ctx, name)
	if err != nil {
		return "", err
	}
	defer h.Release()
	dir := filepath.Join(r.dir, "exports", to)
	return dir, errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), r.world.Snapshots().ExportDir(ctx, h, dir))
}

func again(dir, name string) vm.SandboxClone {
	s := sandbox()
	s.Name, s.Labels, s.CgroupParent = name, map[string]string{"pod": "again"}, "/kubepods/pod2"
	return vm.SandboxClone{Dir: dir, Spec: s, Containers: []vm.Container{foldered("app", "/")}}
}

// savedScripts are the operations that save and resume sandboxes.
func savedScripts() map[string]script {
	return map[string]script{
		"save sandbox": {
			before: runsFoldered,
			act: func(ctx context.Context, r *rig) error {
				_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
				return err
			},
			after: []vm.State{vm.StateRunning}, disk: []string{"one."},
		},
		"resume sandbox": {
			before: func(ctx context.Context, r *rig) error {
				if err := runsFoldered(ctx, r); err != nil {
					return err
				}
				_, err := checkpointed(ctx, r, "gold")
				return err
			},
			act: func(ctx context.Context, r *rig) error {
				_, err := r.CloneSandbox(ctx, again(filepath.Join(r.dir, "exports", "gold"), "a"))
				return err
			},
			after: []vm.State{"", vm.StateRunning}, disk: []string{"one."}, name: "a",
		},
	}
}

// TestSavedSandbox: a sandbox is saved while its containers run, and resumes as another one, with other folders of the node. Its containers go on
// when they are started.
func TestSavedSandbox(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := runsFoldered(ctx, r); err != nil {
		t.Fatal(err)
	}
	source := r.must(r.Inspect(ctx, "web"))
	r.must(r.AddContainer(ctx, "web", manual("past")))
	r.must(r.StartContainer(ctx, "web", "past"))
	r.world.Guest(source.ID).EndContainer("past", 0)
	r.await("web", "ended", inState("past", vm.ContainerTerminated))
	_, err := r.Hibernate(ctx, "web", "")
	wantClass(t, "a hibernation", err, errdefs.Unsupported)

	dir, err := checkpointed(ctx, r, "gold")
	if err != nil {
		t.Fatal(err)
	}
	if now := r.must(r.Inspect(ctx, "web")); r.world.Guest(source.ID).Rests() || now.Container("app").Status.State != vm.ContainerRunning {
		t.Errorf("the source: %+v", now.Container("app"))
	}
	gone := filepath.Join(r.dir, "gone")
	if err := os.Mkdir(gone, 0o755); err != nil {
		t.Fatal(err)
	}
	r.must(r.AddContainer(ctx, "web", foldered("lost", gone)))
	if err := os.Remove(gone); err != nil {
		t.Fatal(err)
	}
	r.restart() // the guest has it still
	r.await("web", "ready", ready)
	if err := r.RemoveContainer(ctx, "web", "lost"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, snapshot.FileMeta))
	if err != nil || strings.Contains(string(text), "trusted") {
		t.Errorf("the snapshot names what is the node's: %s, %v", text, err)
	}

	for what, tt := range map[string]struct {
		change func(*vm.SandboxClone)
		class  errdefs.Class
	}{
		"a container less":    {func(c *vm.SandboxClone) { c.Containers = nil }, errdefs.FailedPrecondition},
		"one more":            {func(c *vm.SandboxClone) { c.Containers = append(c.Containers, manual("more")) }, errdefs.FailedPrecondition},
		"one that has ended":  {func(c *vm.SandboxClone) { c.Containers = append(c.Containers, manual("past")) }, errdefs.FailedPrecondition},
		"another name":        {func(c *vm.SandboxClone) { c.Containers[0].Name = "other" }, errdefs.FailedPrecondition},
		"no mount":            {func(c *vm.SandboxClone) { c.Containers[0].Volumes, c.Containers[0].Mounts = nil, nil }, errdefs.FailedPrecondition},
		"another mount":       {func(c *vm.SandboxClone) { c.Containers[0].Mounts[0].Path = "/other" }, errdefs.FailedPrecondition},
		"a file for a folder": {func(c *vm.SandboxClone) { c.Containers[0].Volumes[0].Dir.File = true }, errdefs.FailedPrecondition},
		"a folder to read":    {func(c *vm.SandboxClone) { c.Containers[0].Volumes[0].Dir.ReadOnly = true }, errdefs.FailedPrecondition},
		"a bad cgroup":        {func(c *vm.SandboxClone) { c.Spec.CgroupParent = "../x" }, errdefs.InvalidArgument},
		"a name in use":       {func(c *vm.SandboxClone) { c.Spec.Name = "web" }, errdefs.AlreadyExists},
		"no folder":           {func(c *vm.SandboxClone) { c.Dir += "/none" }, errdefs.InvalidArgument},
	} {
		c := again(dir, "a")
		tt.change(&c)
		_, err := r.CloneSandbox(ctx, c)
		wantClass(t, what, err, tt.class)
	}
	owned := func(by vm.Owner) {
		t.Helper()
		if _, err := r.world.Snapshots().Update(ctx, "gold", func(x *snapshot.Snapshot) { x.Owner = by }); err != nil {
			t.Fatal(err)
		}
	}
	owned(vm.Owner{Namespace: "prod"})
	theirs, err := exported(ctx, r, "gold", "theirs")
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.CloneSandbox(r.as("other"), again(theirs, "a"))
	wantClass(t, "of another namespace", err, errdefs.NotFound)
	owned(vm.Owner{})
	_, err = r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"})
	wantClass(t, "an ordinary clone", err, errdefs.Unsupported)
	_, err = r.Restore(ctx, "web", "gold")
	wantClass(t, "an ordinary restore", err, errdefs.Unsupported)

	next := again(dir, "again")
	next.Containers[0].Volumes[0].Dir.Path = r.dir
	rec := r.must(r.CloneSandbox(ctx, next))
	now := r.await("again", "ready", ready)
	g := r.world.Guest(rec.ID)
	c := now.Container("app")
	if c == nil || c.Status.State != vm.ContainerCreated || len(now.Ephemeral) != 1 || g.Rests() || now.Spec.CgroupParent != "/kubepods/pod2" || now.Spec.Labels["pod"] != "again" {
		t.Fatalf("resumed: %+v, %+v", now.Spec, now.Ephemeral)
	}
	for _, path := range g.Folders() {
		if path != r.dir {
			t.Errorf("it has the folder %s", path)
		}
	}
	r.restart() // they wait on
	if now = r.await("again", "ready", ready); now.Container("app").Status.State != vm.ContainerCreated {
		t.Errorf("after a restart: %+v", now.Container("app"))
	}
	if now = r.must(r.StartContainer(ctx, "again", "app")); now.Container("app").Status.State != vm.ContainerRunning {
		t.Errorf("started: %+v", now.Container("app"))
	}
	r.must(r.AddContainer(ctx, "again", manual("later")))
	if has := r.world.Guest(rec.ID).Has(); !slices.Equal(has, []string{"app", "past", "later"}) {
		t.Errorf("the guest has %v", has)
	}
	r.clearAll("gold")
}

// TestSaveSandboxFaults: whatever fails while a sandbox is saved, its containers go on.
func TestSaveSandboxFaults(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		if call == fault.Load() {
			return errdefs.Unavailablef("told to fail")
		}
		return nil
	}
	if err := runsFoldered(ctx, r); err != nil {
		t.Fatal(err)
	}
	id := r.must(r.Inspect(ctx, "web")).ID
	for _, call := range []string{
		"agent.PauseContainers", "agent.PauseContainers done", "driver.UnplugShare", "driver.UnplugShare done", "driver.Save", "driver.Save done",
		"driver.PlugShare", "driver.PlugShare done", "agent.ResumeContainers", "agent.ResumeContainers done",
	} {
		fault.Store(call)
		_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
		wantClass(t, call, err, errdefs.Unavailable)
		fault.Store("")
		r.eventually("the containers go on after "+call+" failed", func() bool { return !r.world.Guest(id).Rests() })
		r.eventually("the guest answers and is saved", func() bool {
			_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
			return err == nil
		})
		if err := r.RemoveSnapshot(ctx, "gold"); err != nil {
			t.Fatal(err)
		}
	}
	r.clearAll()
}

// TestSavedSandboxWithImages: the files of an image that a container has beside its own are in the guest that resumes, also those of one that has
// ended. A device of the node is not.
func TestSavedSandboxWithImages(t *testing.T) {
	need.Root(t)
	r, ctx := newRig(t), t.Context()
	with := func(c vm.Container) vm.Container {
		c.Volumes = append(c.Volumes, vm.Volume{Name: "files", Kind: vm.VolumeImage, Image: "layered"})
		c.Mounts = append(c.Mounts, vm.Mount{Volume: "files", Path: "/files", SubPath: "part"})
		return c
	}
	r.must(r.Launch(ctx, sandbox()))
	source := r.await("web", "ready", ready)
	for _, c := range []vm.Container{with(foldered("app", "/")), with(manual("past"))} {
		r.must(r.AddContainer(ctx, "web", c))
		r.must(r.StartContainer(ctx, "web", c.Name))
	}
	r.world.Guest(source.ID).EndContainer("past", 0)
	had := r.await("web", "ended", inState("past", vm.ContainerTerminated))
	dir, err := checkpointed(ctx, r, "gold")
	if err != nil {
		t.Fatal(err)
	}
	want := func(name string) vm.SandboxClone {
		c := again(dir, name)
		c.Containers[0] = with(c.Containers[0])
		return c
	}
	for what, change := range map[string]func(*vm.Volume){
		"another image": func(v *vm.Volume) { v.Image = "demo" },
		"a folder for an image": func(v *vm.Volume) {
			*v = vm.Volume{Name: "files", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/", Trusted: true}}
		},
	} {
		c := want("a")
		change(&c.Containers[0].Volumes[1])
		_, err := r.CloneSandbox(ctx, c)
		wantClass(t, what, err, errdefs.FailedPrecondition)
	}
	for what, forge := range map[string]func(*vm.Ephemeral){
		"an image without disks": func(e *vm.Ephemeral) { e.Volumes[0].Layers = nil },
		"a disk without image":   func(e *vm.Ephemeral) { e.Volumes[0].ImageDigest = "" },
		"disks without a volume": func(e *vm.Ephemeral) { e.Spec.Volumes = e.Spec.Volumes[:1]; e.Spec.Mounts = e.Spec.Mounts[:1] },
	} {
		var was vm.Record
		change := func(f func(x *snapshot.Snapshot)) {
			if _, err := r.world.Snapshots().Update(ctx, "gold", f); err != nil {
				t.Fatal(err)
			}
		}
		change(func(x *snapshot.Snapshot) { was = x.Record.Clone(); forge(&x.Record.Ephemeral[0]) })
		forged, err := exported(ctx, r, "gold", strings.ReplaceAll(what, " ", "-"))
		if err != nil {
			t.Fatal(err)
		}
		c := want("a")
		c.Dir = forged
		_, err = r.CloneSandbox(ctx, c)
		wantClass(t, what, err, errdefs.DataLoss)
		change(func(x *snapshot.Snapshot) { x.Record = was })
	}
	r.must(r.CloneSandbox(ctx, want("again")))
	now := r.await("again", "ready", ready)
	if e := now.Ephemeral[0]; len(now.Ephemeral) != 1 || !slices.EqualFunc(e.Volumes, had.Ephemeral[0].Volumes, func(a, b vm.ImageVolume) bool {
		return a.Volume == b.Volume && a.ImageDigest == b.ImageDigest && slices.Equal(a.Layers, b.Layers)
	}) || len(now.Disks) != len(had.Disks) {
		t.Errorf("resumed: %+v and %d disks, want %+v and %d", now.Ephemeral, len(now.Disks), had.Ephemeral, len(had.Disks))
	}
	r.must(r.StartContainer(ctx, "again", "app"))
	if err := r.RemoveContainer(ctx, "again", "app"); err != nil {
		t.Fatal(err)
	}

	dev := filepath.Join(t.TempDir(), "dev")
	if err := unix.Mknod(dev, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 4094))); err != nil { // nobody opens it
		t.Fatal(err)
	}
	c := manual("device")
	c.Volumes = []vm.Volume{{Name: "data", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: dev, Trusted: true}}}
	c.Mounts = []vm.Mount{{Volume: "data", Path: "/dev/data", Device: true}}
	r.must(r.AddContainer(ctx, "web", c))
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "device"})
	wantClass(t, "a sandbox with a device", err, errdefs.Unsupported)
	r.clearAll("gold")
}
