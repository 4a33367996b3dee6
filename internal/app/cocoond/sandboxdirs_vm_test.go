//go:build vm

package cocoond_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMSandboxFolders: a container of a sandbox has folders and files of the node of its own, which change as on the node, and are
// gone with it.
func TestVMSandboxFolders(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.MkdirAll(root+"/data", 0o755), os.WriteFile(root+"/data/f", []byte("one"), 0o644), os.Mkdir(root+"/files", 0o755), os.WriteFile(root+"/files/file", []byte("single"), 0o644),
		os.WriteFile(root+"/secret", []byte("SECRET"), 0o644), os.Symlink("../secret", root+"/data/up"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	n := newNode(t, "hostPaths: ["+root+"/data, '"+root+"/files:ro']")
	ctx := t.Context()
	if _, err := n.Launch(ctx, vm.Spec{Name: "pod", Sandbox: true, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	c := func(name string) vm.Container {
		return vm.Container{
			Name: name, Kind: vm.ContainerEphemeral, Image: demo, Manual: true, Process: vm.Process{Entrypoint: []string{"sleep", "100000"}},
			Volumes: []vm.Volume{
				{Name: "data", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: root + "/data"}},
				{Name: "fixed", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: root + "/data", ReadOnly: true}},
				{Name: "file", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: root + "/files/file", ReadOnly: true, File: true}},
			},
			Mounts: []vm.Mount{
				{Volume: "data", Path: "/data"}, {Volume: "fixed", Path: "/fixed"}, {Volume: "file", Path: "/etc/file", SubPath: vm.DirFile},
			},
		}
	}
	closed := c("closed")
	closed.Volumes[0].Dir.Path = root
	if _, err := n.AddContainer(ctx, "pod", closed); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a folder that the operator has not allowed: %v", err)
	}
	closed.Volumes[0].Dir.Trusted = true
	if _, err := n.AddContainer(ctx, "pod", closed); !errdefs.IsInvalid(err) {
		t.Errorf("a trusted folder by the node API: %v", err)
	}
	n.ready("pod")
	add := func(name string) {
		t.Helper()
		if _, err := n.AddContainer(ctx, "pod", c(name)); err != nil {
			t.Fatal(err)
		}
		if _, err := n.StartContainer(ctx, "pod", name); err != nil {
			t.Fatal(err)
		}
	}
	add("a")
	for _, s := range []struct{ script, want string }{
		{"cat /data/f /fixed/f /etc/file", "oneonesingle"},
		{"echo -n two >/data/g; cat /fixed/g; echo x 2>/dev/null >/fixed/x || echo -n ' denied'; echo x 2>/dev/null >/etc/file || echo -n ' denied'", "two denied denied"},
		{"cat /data/up 2>/dev/null || echo -n none", "none"},
		{"stat -c '%u %a' /data/g", "0 644"},
	} {
		if got := n.shIn("pod", "a", s.script); got != s.want {
			t.Errorf("%s: %q, want %q", s.script, got, s.want)
		}
	}
	if err := os.WriteFile(root+"/data/f", []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.until("the guest sees a change", func() bool { return n.shIn("pod", "a", "cat /data/f") == "changed" })
	n.crash()
	n.ready("pod")
	add("b") // also after a restart of cocoond
	if got := n.shIn("pod", "b", "cat /data/g"); got != "two" {
		t.Errorf("after a restart of cocoond: %q", got)
	}
	mounts := func() int {
		t.Helper()
		found, _ := filepath.Glob(filepath.Join(n.dir, "run/shared/*/*/*"))
		return len(found)
	}
	if got := mounts(); got != 6 {
		t.Errorf("%d folders are shared, want 6", got)
	}
	for range 5 {
		if err := n.RemoveContainer(ctx, "pod", "a"); err != nil {
			t.Fatal(err)
		}
		add("a")
	}
	if got := n.shIn("pod", "a", "cat /data/f /etc/file"); got != "changedsingle" {
		t.Errorf("added again: %q", got)
	}
	for _, name := range []string{"a", "b"} {
		if err := n.RemoveContainer(ctx, "pod", name); err != nil {
			t.Fatal(err)
		}
	}
	if got := mounts(); got != 0 {
		t.Errorf("%d folders are shared still", got)
	}
	if err := os.Mkdir(root+"/data/part", 0o755); err != nil {
		t.Fatal(err)
	}
	part := c("part")
	part.Mounts = append(part.Mounts, vm.Mount{Volume: "data", Path: "/part", SubPath: "part"})
	if _, err := n.AddContainer(ctx, "pod", part); err != nil {
		t.Fatal(err)
	}
	if _, err := n.StartContainer(ctx, "pod", "part"); err != nil {
		t.Fatal(err)
	}
	n.shIn("pod", "part", "rmdir /data/part")
	_, err = n.SaveSnapshot(ctx, "pod", vm.SaveSpec{Name: "gold"})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "/part has been deleted") {
		t.Errorf("saved with a mount that cannot be made again: %v", err)
	}
	if got := n.shIn("pod", "part", "grep -c ' /part ' /proc/self/mountinfo; cat /data/f"); got != "1\nchanged" {
		t.Errorf("after that: %q", got)
	}
	add("c")
	if _, err := n.Stop(ctx, "pod", 0); err != nil {
		t.Fatal(err)
	}
	if found, _ := filepath.Glob(filepath.Join(n.dir, "run/shared/*")); len(found) != 0 {
		t.Errorf("of a stopped VM: %v", found)
	}
	if _, err := n.Start(ctx, "pod"); err != nil {
		t.Fatal(err)
	}
	n.ready("pod")
	add("d")
	if err := n.Remove(ctx, "pod", true); err != nil {
		t.Fatal(err)
	}
	if traces := n.unlisted(); len(traces) > 0 {
		t.Errorf("left: %v", traces)
	}
	if found, _ := filepath.Glob(filepath.Join(n.dir, "run/shared/*")); len(found) != 0 {
		t.Errorf("of a removed VM: %v", found)
	}
	if text, err := os.ReadFile(root + "/data/g"); string(text) != "two" || err != nil {
		t.Errorf("the node's own file: %q, %v", text, err)
	}
}
