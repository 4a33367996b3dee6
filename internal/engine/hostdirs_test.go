package engine_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// sharing is the VM web, which has a folder of the node.
func sharing(dir vm.HostDir) vm.Spec {
	s := spec("web")
	s.Volumes = []vm.Volume{{Name: "data", Kind: vm.VolumeDir, Dir: &dir}}
	s.Mounts = []vm.Mount{{Volume: "data", Path: "/data"}}
	return s
}

// shares are those of the last plan of a driver.
type shares struct {
	mu   sync.Mutex
	last []hypervisor.Share
}

func (s *shares) watch(r *rig) {
	r.world.Process = func(p hypervisor.Plan) int {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.last = p.Shares
		return 4711
	}
}

func (s *shares) get() []hypervisor.Share {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// folders is a rig that allows folders below the returned one.
func folders(t *testing.T, opts ...func(*rig)) (r *rig, root string) {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.MkdirAll(root+"/all/in", 0o755), os.Mkdir(root+"/fixed", 0o755), os.Mkdir(root+"/prod", 0o755), os.Mkdir(root+"/other", 0o755),
		os.Symlink(root+"/other", root+"/all/link"), os.WriteFile(root+"/all/file", nil, 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	list := hostdir.List{{Path: root + "/all"}, {Path: root + "/fixed", ReadOnly: true}, {Namespace: "prod", Path: root + "/prod"}}
	return newRig(t, append(opts, func(r *rig) { r.cfg.HostPaths = list })...), root
}

// TestHostDirsAllowed: a VM has only the folders that the operator allows to its owner. What is refused leaves nothing behind.
func TestHostDirsAllowed(t *testing.T) {
	var seen shares
	r, root := folders(t, seen.watch)
	for _, c := range []struct {
		namespace string
		dir       vm.HostDir
		class     errdefs.Class
		says      string // "": it is allowed
	}{
		{"test", vm.HostDir{Path: "/all"}, 0, ""},
		{"test", vm.HostDir{Path: "/all/in"}, 0, ""},
		{"test", vm.HostDir{Path: "/all/new/er", Create: true}, 0, ""},
		{"prod", vm.HostDir{Path: "/prod"}, 0, ""},
		{"", vm.HostDir{Path: "/prod"}, 0, ""},
		{"test", vm.HostDir{Path: "/fixed", ReadOnly: true}, 0, ""},
		{"test", vm.HostDir{Path: "/fixed/new", ReadOnly: true, Create: true}, errdefs.FailedPrecondition, "does not exist"},
		{"test", vm.HostDir{Path: "/prod"}, errdefs.FailedPrecondition, "hostPaths"},
		{"test", vm.HostDir{Path: "/fixed"}, errdefs.FailedPrecondition, "read-only"},
		{"test", vm.HostDir{Path: "/other", Create: true}, errdefs.FailedPrecondition, "hostPaths"},
		{"", vm.HostDir{Path: "/other"}, errdefs.FailedPrecondition, "hostPaths"},
		{"test", vm.HostDir{Path: ""}, errdefs.FailedPrecondition, "hostPaths"},
		{"test", vm.HostDir{Path: "/all/../other"}, errdefs.InvalidArgument, "path"},
		{"test", vm.HostDir{Path: "/all/link"}, errdefs.FailedPrecondition, "symbolic link"},
		{"test", vm.HostDir{Path: "/all/file"}, errdefs.FailedPrecondition, "not a folder"},
		{"test", vm.HostDir{Path: "/all/missing"}, errdefs.FailedPrecondition, "does not exist"},
	} {
		ctx := r.as(c.namespace)
		c.dir.Path = root + c.dir.Path
		rec, err := r.Launch(ctx, sharing(c.dir))
		if c.says != "" {
			if errdefs.ClassOf(err) != c.class || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%+v: %v", c, err)
			}
			if _, err := r.Inspect(ctx, "web"); !errdefs.IsNotFound(err) {
				t.Errorf("%+v: it left a VM, %v", c, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		want := hypervisor.Share{Tag: vm.DirTag(0), Path: c.dir.Path, ReadOnly: c.dir.ReadOnly, Create: c.dir.Create}
		got := seen.get()
		if len(got) != 1 || !strings.HasPrefix(got[0].Path, got[0].Root) || got[0].Root == root {
			t.Errorf("%+v: the driver gets %+v", c, got)
			continue
		}
		want.Root = got[0].Root
		if got[0] != want {
			t.Errorf("%+v: the driver gets %+v", c, got)
		}
		if err := r.Remove(ctx, string(rec.ID), true); err != nil {
			t.Error(err)
		}
	}
	r.clean()
}

// TestHostDirsOfDiskGuests: a guest that boots itself gets folders, too. What cloud-init cannot do with them is refused.
func TestHostDirsOfDiskGuests(t *testing.T) {
	var seen shares
	r, root := folders(t, seen.watch)
	boots := func(change func(*vm.Spec)) vm.Spec {
		s := sharing(vm.HostDir{Path: root + "/all"})
		s.Image = "cloud"
		if change != nil {
			change(&s)
		}
		return s
	}
	for says, change := range map[string]func(*vm.Spec){
		"the part in of volume data": func(s *vm.Spec) { s.Mounts[0].SubPath = "in" },
		"share the folder of the file": func(s *vm.Spec) {
			s.Volumes[0].Dir.Path, s.Volumes[0].Dir.File, s.Mounts[0].SubPath = root+"/all/f", true, vm.DirFile
		},
		"to group 2000":                       func(s *vm.Spec) { s.Volumes[0].Group = new(int64(2000)) },
		"has spaces":                          func(s *vm.Spec) { s.Mounts[0].Path = "/a b" },
		"shared folders need a #cloud-config": func(s *vm.Spec) { s.CloudInit = &vm.CloudInit{UserData: "#!/bin/sh\n", VendorData: "#!/bin/sh\n"} },
	} {
		if _, err := r.Launch(t.Context(), boots(change)); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	r.must(r.Launch(t.Context(), boots(nil)))
	if got := seen.get(); len(got) != 1 || got[0].Tag != "cocoon:d000" || got[0].Path != root+"/all" {
		t.Errorf("the driver gets %+v", got)
	}
	_, err := r.Hibernate(t.Context(), "web", "")
	r.refused("hibernate it", errdefs.FailedPrecondition, err)
	if err := r.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A file of the node must be there, or is made by the driver, which gets the name that the guest has for it.
func TestHostFile(t *testing.T) {
	var seen shares
	r, root := folders(t, seen.watch)
	file := func(name string, create bool) vm.Spec {
		s := sharing(vm.HostDir{Path: root + "/all/" + name, File: true, Create: create})
		for i := range s.Mounts {
			s.Mounts[i].SubPath = vm.DirFile
		}
		return s
	}
	_, err := r.Launch(t.Context(), file("f", false))
	r.refused("a file that is missing", errdefs.FailedPrecondition, err)
	if err := os.Mkdir(root+"/all/folder", 0o755); err != nil {
		t.Fatal(err)
	}
	_, err = r.Launch(t.Context(), file("folder", false))
	r.refused("a folder", errdefs.FailedPrecondition, err)
	r.must(r.Launch(t.Context(), file("f", true)))
	if got := seen.get(); len(got) != 1 || got[0].Path != root+"/all/f" || got[0].File != vm.DirFile || !got[0].Create {
		t.Errorf("the driver gets %+v", got)
	}
	if err := r.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// published are folders of volumes of CSI drivers, by namespace.
type published struct {
	root string
	of   map[string]string
}

func (p published) Root() string { return p.root }

func (p published) Find(owner vm.Owner, path string, write bool) error {
	if p.of[owner.Namespace] != path || write && strings.HasSuffix(path, "ro") {
		return errdefs.Preconditionf("it is not published for it")
	}
	return nil
}

// TestPublishedFolders: a VM has the folder of a published volume of its owner, and no other way leads there.
func TestPublishedFolders(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"a", "b", "ro"} {
		if err := os.Mkdir(root+"/"+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var seen shares
	r := newRig(t, seen.watch, func(r *rig) {
		r.cfg.Published = published{root, map[string]string{"test": root + "/a", "prod": root + "/b", "dev": root + "/ro"}}
	})
	for _, c := range []struct {
		namespace string
		dir       vm.HostDir
		class     errdefs.Class // 0: it is allowed
	}{
		{"test", vm.HostDir{Path: root + "/a", Published: true}, 0},
		{"dev", vm.HostDir{Path: root + "/ro", Published: true, ReadOnly: true}, 0},
		{"dev", vm.HostDir{Path: root + "/ro", Published: true}, errdefs.FailedPrecondition},
		{"test", vm.HostDir{Path: root + "/b", Published: true}, errdefs.FailedPrecondition},
		{"", vm.HostDir{Path: root + "/a", Published: true}, errdefs.FailedPrecondition},
		{"test", vm.HostDir{Path: root + "/a"}, errdefs.FailedPrecondition},
		{"test", vm.HostDir{Path: root + "/a", Published: true, Create: true}, errdefs.InvalidArgument},
	} {
		rec, err := r.Launch(r.as(c.namespace), sharing(c.dir))
		if c.class != 0 {
			if errdefs.ClassOf(err) != c.class {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if got := seen.get(); err != nil || len(got) != 1 || got[0].Root != root || got[0].Path != c.dir.Path || got[0].ReadOnly != c.dir.ReadOnly {
			t.Errorf("%+v: %v, the driver gets %+v", c, err, got)
		}
		if err := r.Remove(t.Context(), string(rec.ID), true); err != nil {
			t.Error(err)
		}
	}
	r.clean()
	dir := t.TempDir()
	cfg := engine.Config{StateDir: dir + "/state", RunDir: dir + "/run", HostPaths: hostdir.List{{Path: root + "/a"}}, Published: published{root: root}}
	if _, err := engine.New(cfg, engine.Deps{}); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), root) {
		t.Errorf("hostPaths with the published volumes: %v", err)
	}
}

// TestPublishedOff: without drivers, a node has no published volumes.
func TestPublishedOff(t *testing.T) {
	off := newRig(t)
	if _, err := off.Launch(off.as("test"), sharing(vm.HostDir{Path: t.TempDir(), Published: true})); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("without drivers: %v", err)
	}
	off.clean()
}

// TestHostDirsOff: without configuration, a node shares no folder.
func TestHostDirsOff(t *testing.T) {
	r := newRig(t)
	for _, path := range []string{"/", "/etc", t.TempDir()} {
		if _, err := r.Launch(t.Context(), sharing(vm.HostDir{Path: path})); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "hostPaths") {
			t.Errorf("%s: %v", path, err)
		}
	}
	r.clean()
}

// TestHostDirsNeverShareTheState: the configuration cannot give guests the node's own files.
func TestHostDirsNeverShareTheState(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{"/", dir, dir + "/state", dir + "/state/vms", dir + "/run"} {
		_, err := engine.New(engine.Config{StateDir: dir + "/state", RunDir: dir + "/run", HostPaths: hostdir.List{{Path: path}}}, engine.Deps{})
		if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), hostdir.Setting) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestHostDirsCannotBeSaved: what needs the state of the guest is refused before anything changes.
func TestHostDirsCannotBeSaved(t *testing.T) {
	r, root := folders(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, sharing(vm.HostDir{Path: root + "/all"})))
	was := r.await("web", "it is ready", ready)
	for what, verb := range map[string]func(context.Context) error{
		"snapshot": func(ctx context.Context) error {
			_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
			return err
		},
		"hibernate": func(ctx context.Context) error {
			_, err := r.Hibernate(ctx, "web", "")
			return err
		},
	} {
		err := verb(ctx)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), root+"/all") || !strings.Contains(err.Error(), "volume data") {
			t.Errorf("%s: %v", what, err)
		}
		if now := r.must(r.Inspect(ctx, "web")); now.Revision != was.Revision || now.State != vm.StateRunning {
			t.Errorf("%s changed %+v", what, now)
		}
	}
	if all, err := r.world.Snapshots().List(ctx); err != nil || len(all) > 0 {
		t.Errorf("snapshots %v, %v", all, err)
	}
	if _, err := r.Stop(ctx, "web", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a stopped VM: %v", err)
	}
}

// TestHostDirsNoLongerAllowed: a VM that runs keeps its folder, and does not start again with one that is no longer allowed.
// A VM with a TPM is not saved, whether it runs or not: no snapshot has the state of its TPM.
// A VM whose memory or keys are in no snapshot is not saved while it runs. With huge pages it has no memory to save once it has stopped.
func TestHardwareThatCannotBeSaved(t *testing.T) {
	for what, c := range map[string]struct {
		hardware vm.Hardware
		stopped  bool // it can be saved when it has stopped
	}{
		"TPM":        {vm.Hardware{TPM: vm.TPMPersistent}, false},
		"huge pages": {vm.Hardware{HugePages: vm.HugePages2M}, true},
	} {
		t.Run(what, func(t *testing.T) {
			r, _ := folders(t)
			ctx := t.Context()
			s := sharing(vm.HostDir{})
			s.Image, s.Volumes, s.Mounts, s.Hardware = "cloud", nil, nil, &c.hardware
			was := r.must(r.Launch(ctx, s))
			_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
			r.refused("save it", errdefs.FailedPrecondition, err)
			_, err = r.Hibernate(ctx, "web", "")
			r.refused("hibernate it", errdefs.FailedPrecondition, err)
			if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateRunning || now.PID != was.PID {
				t.Errorf("it has changed: %+v", now)
			}
			if _, err := r.Stop(ctx, "web", 0); err != nil {
				t.Fatal(err)
			}
			if _, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); c.stopped && err != nil {
				t.Errorf("save it when it has stopped: %v", err)
			} else if !c.stopped {
				r.refused("save it when it has stopped", errdefs.FailedPrecondition, err)
			}
		})
	}
}

func TestHugePagesOfOddSize(t *testing.T) {
	r, _ := folders(t)
	s := sharing(vm.HostDir{})
	s.Image, s.Volumes, s.Mounts, s.Hardware, s.Memory = "cloud", nil, nil, &vm.Hardware{HugePages: vm.HugePages2M}, 129<<20
	_, err := r.Launch(t.Context(), s)
	r.refused("launch it", errdefs.InvalidArgument, err)
}

func TestHostDirsNoLongerAllowed(t *testing.T) {
	r, root := folders(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, sharing(vm.HostDir{Path: root + "/all"})))
	allowed := r.cfg.HostPaths
	r.cfg.HostPaths = nil
	r.restart()
	if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateRunning {
		t.Errorf("after the restart it is %s", now.State)
	}
	was := r.must(r.Stop(ctx, "web", 0))
	if _, err := r.Start(ctx, "web"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "hostPaths") {
		t.Errorf("started: %v", err)
	}
	if now := r.must(r.Inspect(ctx, "web")); now.Revision != was.Revision {
		t.Errorf("the refusal changed %+v", now)
	}
	r.cfg.HostPaths = allowed
	r.restart()
	r.must(r.Start(ctx, "web"))
}
