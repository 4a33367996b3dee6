//go:build vm

package cocoond_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMHostPath: containers of a guest use folders of the node as their operator allows, also after a restart of cocoond.
func TestVMHostPath(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.MkdirAll(root+"/data/sub", 0o755), os.MkdirAll(root+"/fixed", 0o755), os.WriteFile(root+"/fixed/f", []byte("fixed"), 0o644),
		os.Mkdir(root+"/closed", 0o755), os.WriteFile(root+"/secret", []byte("SECRET"), 0o644), os.Symlink(root, root+"/data/out"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	n := newNode(t, "hostPaths: ["+root+"/data, '"+root+"/fixed:ro']")
	dir := func(name, path string, readOnly bool) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: root + path, ReadOnly: readOnly, Create: !readOnly}}
	}
	file := func(name, path string, readOnly bool) vm.Volume {
		v := dir(name, path, readOnly)
		v.Dir.File = true
		return v
	}
	group := int64(2000)
	grouped := dir("grouped", "/data/grouped", false)
	grouped.Group = &group
	container := func(name string, mounts ...vm.Mount) vm.Container {
		return vm.Container{Name: name, Kind: vm.ContainerApp, Image: demo, Mounts: mounts, Process: vm.Process{Entrypoint: []string{"sleep", "100000"}}}
	}
	spec := vm.Spec{
		Name: "web", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20,
		Volumes: []vm.Volume{dir("data", "/data", false), dir("fixed", "/fixed", true), grouped, file("log", "/data/log", false), file("one", "/fixed/f", true)},
		Containers: []vm.Container{
			container("a", vm.Mount{Volume: "data", Path: "/data"}, vm.Mount{Volume: "fixed", Path: "/fixed"}, vm.Mount{Volume: "grouped", Path: "/grouped"},
				vm.Mount{Volume: "log", Path: "/var/log/app", SubPath: vm.DirFile}, vm.Mount{Volume: "one", Path: "/etc/one", SubPath: vm.DirFile}),
			container("b", vm.Mount{Volume: "data", Path: "/look", ReadOnly: true}, vm.Mount{Volume: "data", Path: "/part", SubPath: "made/here"}),
		},
	}
	for what, bad := range map[string]vm.Volume{"closed": dir("data", "/closed", false), "write to a read-only one": dir("data", "/fixed", false), "a link": dir("data", "/data/out", false)} {
		refused := spec
		refused.Volumes = append([]vm.Volume{bad}, spec.Volumes[1:]...)
		if _, err := n.Launch(t.Context(), refused); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := n.Launch(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	for _, c := range []struct{ container, script, want string }{
		{"a", "echo -n of-a >/data/file; cat /fixed/f; echo x 2>/dev/null >/fixed/x || echo -n ' denied'", "fixed denied"},
		{"a", "stat -c '%g %A' /grouped", "2000 drwxrwsr-x"},
		{"a", "echo -n logged >>/var/log/app; cat /etc/one /data/log; echo x 2>/dev/null >/etc/one || echo -n ' denied'", "fixedlogged denied"},
		{"a", "rm /var/log/app 2>/dev/null || echo -n kept; stat -c ' %F %a' /var/log/app", "kept regular file 644"},
		{"b", "cat /look/file; echo x 2>/dev/null >/look/x || echo -n ' denied'; echo -n of-b >/part/file", "of-a denied"},
		{"a", "cat /data/made/here/file", "of-b"},
		{"a", "ln -s ../secret /data/up; cat /data/up /data/out/secret 2>/dev/null || echo none", "none"},
	} {
		if got := n.shIn("web", c.container, c.script); got != c.want {
			t.Errorf("%s: %s: %q, want %q", c.container, c.script, got, c.want)
		}
	}
	var st unix.Stat_t
	if text, err := os.ReadFile(root + "/data/made/here/file"); string(text) != "of-b" || err != nil || unix.Stat(root+"/data/file", &st) != nil || st.Uid != 0 {
		t.Errorf("the host sees %q of %d, %v", text, st.Uid, err)
	}
	n.crash()
	n.ready("web")
	if err := os.WriteFile(root+"/data/later", []byte("later"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := n.shIn("web", "b", "cat /look/later"); got != "later" {
		t.Errorf("after a restart of cocoond: %q", got)
	}
	if _, err := n.Hibernate(t.Context(), "web", ""); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), root+"/data") {
		t.Errorf("hibernated: %v", err)
	}
	if _, err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	if got := n.shIn("web", "a", "cat /data/file /data/later"); got != "of-alater" {
		t.Errorf("started again: %q", got)
	}
	if err := n.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	if traces := n.unlisted(); len(traces) > 0 {
		t.Errorf("left: %v", traces)
	}
	if text, err := os.ReadFile(root + "/data/file"); string(text) != "of-a" || err != nil {
		t.Errorf("with the VM went its folder: %q, %v", text, err)
	}
}
