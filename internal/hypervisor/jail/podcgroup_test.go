package jail

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

func TestFindCgroup1(t *testing.T) {
	const memory = "33 31 0:32 / /cg/memory rw,relatime - cgroup cgroup rw,memory\n"
	for _, tt := range []struct {
		name, mountinfo string
		want            []string
	}{
		{"version 2 alone", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", nil},
		{"version 2 limits memory", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 23 0:27 / /cg/net rw - cgroup cgroup rw,net_cls\n", nil},
		{"version 1", memory + "32 31 0:29 / /cg/c\\040pu rw - cgroup cgroup rw,cpu,cpuacct\n40 31 0:37 / /cg/systemd rw - cgroup cgroup rw,xattr,name=systemd\n", []string{"/cg/memory", "/cg/c pu", "/cg/systemd"}},
		{"twice", memory + strings.Replace(memory, "/cg", "/again", 1), []string{"/cg/memory"}},
		{"read-only, or a part", strings.Replace(memory, "rw,relatime", "ro", 1) + strings.Replace(memory, " / ", " /docker/1 ", 1), nil},
		{"torn", "33 31 0:32 / - cgroup\n33 31 0:32 / /x rw - cgroup cgroup\n", nil},
	} {
		var got []string
		for _, h := range findCgroup1(strings.NewReader(tt.mountinfo)) {
			got = append(got, h.mount)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestPodCgroupV2 has plain folders in the place of a tree of version 2.
func TestPodCgroupV2(t *testing.T) {
	tree := t.TempDir()
	for dir, controllers := range map[string]string{"": "cpu memory pids io", "kubepods": "cpu memory", "kubepods/pod1": "cpu memory"} {
		for name, content := range map[string]string{"cgroup.controllers": controllers, "cgroup.subtree_control": ""} {
			if err := errors.Join(os.MkdirAll(filepath.Join(tree, dir), 0o755), os.WriteFile(filepath.Join(tree, dir, name), []byte(content), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	g := trees{mount: tree, name: "cocoon", parent: "/kubepods/pod1"}
	id := vm.NewID()
	f, err := g.make(id, Bounds{CPUs: 1, Memory: 1 << 28})
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if want := tree + "/kubepods/pod1/cocoon-" + string(id); f.Name() != want || !slices.Equal(g.parents(), []string{tree + "/kubepods/pod1"}) {
		t.Errorf("it is in %s, below %q", f.Name(), g.parents())
	}
	for _, dir := range []string{"", "kubepods", "kubepods/pod1"} {
		if on, err := os.ReadFile(filepath.Join(tree, dir, "cgroup.subtree_control")); err != nil || !strings.HasPrefix(string(on), "+") {
			t.Errorf("%q delegates %q, %v", dir, on, err)
		}
	}
	if tasks, err := g.join(id, g.parents()); len(tasks) > 0 || err != nil {
		t.Errorf("it joins %v, %v", tasks, err)
	}
	for range 2 {
		if err := g.remove(id); err != nil || isDir(f.Name()) || !isDir(tree+"/kubepods/pod1") || isDir(tree+"/cocoon") {
			t.Errorf("removed: %v, %t", err, isDir(f.Name()))
		}
	}
}
