package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
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
	g := cgroups{mount: tree, name: "cocoon", parent: "/kubepods/pod1"}
	p := hypervisor.Plan{ID: vm.NewID(), CPUs: 1, Memory: 1 << 28}
	f, err := g.make(p, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if want := tree + "/kubepods/pod1/cocoon-" + string(p.ID); f.Name() != want || !slices.Equal(g.parents(), []string{tree + "/kubepods/pod1"}) {
		t.Errorf("it is in %s, below %q", f.Name(), g.parents())
	}
	for _, dir := range []string{"", "kubepods", "kubepods/pod1"} {
		if on, err := os.ReadFile(filepath.Join(tree, dir, "cgroup.subtree_control")); err != nil || !strings.HasPrefix(string(on), "+") {
			t.Errorf("%q delegates %q, %v", dir, on, err)
		}
	}
	if tasks, err := g.join(p.ID, g.parents()); len(tasks) > 0 || err != nil {
		t.Errorf("it joins %v, %v", tasks, err)
	}
	for range 2 {
		if err := g.remove(p.ID); err != nil || isDir(f.Name()) || !isDir(tree+"/kubepods/pod1") || isDir(tree+"/cocoon") {
			t.Errorf("removed: %v, %t", err, isDir(f.Name()))
		}
	}
}

// podCgroup makes a cgroup as a kubelet makes that of a pod, and returns its path below the root and its folders.
func podCgroup(t *testing.T, d *Driver) (path string, dirs []string) {
	t.Helper()
	need.Root(t)
	g := d.cgroups()
	g.parent = "/" + d.cfg.Cgroup + "-pods/burstable/pod1"
	if dirs = g.parents(); len(dirs) == 0 {
		need.Missing(t, "a cgroup tree that can be written")
	}
	for _, h := range g.v1 {
		if slices.Contains(h.controllers, "cpuset") {
			dirs = append(dirs, filepath.Join(h.mount, g.parent))
		}
	}
	t.Cleanup(func() {
		for _, dir := range dirs {
			for ; g.below(dir); dir = filepath.Dir(dir) {
				if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Errorf("left in the cgroup of the pod: %v", err)
				}
			}
		}
	})
	for _, dir := range dirs {
		if err := g.mkdirV1(dir); err != nil {
			t.Fatal(err)
		}
	}
	return g.parent, dirs
}

// membersOf returns the paths of the cgroups in which a process is, by controllers.
func membersOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 {
			out[f[1]] = f[2]
		}
	}
	return out
}

// wantInPod checks that a process is in the cgroup of the VM below that of its pod.
func wantInPod(t *testing.T, d *Driver, pid int, parent string, id vm.ID) {
	t.Helper()
	in, wanted := membersOf(t, pid), []string{""}
	if v1 := d.cgroups().v1; len(v1) > 0 {
		wanted = nil
		for _, h := range v1 {
			if isDir(filepath.Join(h.mount, parent)) {
				wanted = append(wanted, strings.Join(slices.DeleteFunc(slices.Clone(h.controllers), func(o string) bool { return o == "rw" || o == "xattr" }), ","))
			}
		}
	}
	for _, c := range wanted {
		if in[c] != parent+"/"+vm.CgroupPrefix+string(id) {
			t.Errorf("of the controllers %q, process %d is in %q", c, pid, in[c])
		}
	}
}

// TestPodCgroup ends what is in the cgroups of a VM whose daemon is gone. Those that others have made stay.
func TestPodCgroup(t *testing.T) {
	for name, made := range map[string]bool{"of a kubelet": true, "of nobody": false} {
		t.Run(name, func(t *testing.T) {
			d := shareDriver(t)
			parent, dirs := podCgroup(t, d)
			if !made {
				for _, dir := range dirs {
					if err := errors.Join(os.Remove(dir), os.Remove(filepath.Dir(dir))); err != nil {
						t.Fatal(err)
					}
				}
			}
			l := &launch{d: d, plan: hypervisor.Plan{ID: vm.NewID(), Dir: t.TempDir(), Memory: 1 << 27, CPUs: 1, CgroupParent: parent}}
			t.Cleanup(l.release)
			if err := l.makeCgroup(t.Context()); err != nil {
				t.Fatal(err)
			}
			child, err := proc.Start(proc.Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}, CgroupDir: l.cgroup, CgroupTasks: l.tasks, Isolated: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = errors.Join(child.Kill(context.Background()), child.Close()) })
			wantInPod(t, d, child.PID(), parent, l.plan.ID)
			for range 2 {
				if err := d.Reap(t.Context(), l.plan.ID, l.plan.Dir); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := child.Wait(t.Context()); err != nil {
				t.Error(err)
			}
			for _, dir := range dirs {
				if isDir(filepath.Join(dir, vm.CgroupPrefix+string(l.plan.ID))) || isDir(dir) != made || !isDir(filepath.Dir(filepath.Dir(dir))) {
					t.Errorf("%s is there: %t", dir, isDir(dir))
				}
			}
			if left, err := os.ReadDir(l.plan.Dir); len(left) > 0 || err != nil {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// TestPodCgroupIsGone: the cgroup of the pod has been removed with all that was in it.
func TestPodCgroupIsGone(t *testing.T) {
	d := shareDriver(t)
	parent, dirs := podCgroup(t, d)
	l := &launch{d: d, plan: hypervisor.Plan{ID: vm.NewID(), Dir: t.TempDir(), Memory: 1 << 27, CPUs: 1, CgroupParent: parent}}
	t.Cleanup(l.release)
	if err := l.makeCgroup(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		_ = os.Remove(filepath.Join(dir, vm.CgroupPrefix+string(l.plan.ID)))
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Reap(t.Context(), l.plan.ID, l.plan.Dir); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(l.plan.Dir, cgroupFile), []byte("{"), 0o600); err != nil { // by a power cut
		t.Fatal(err)
	}
	if err := d.Reap(t.Context(), l.plan.ID, l.plan.Dir); err != nil {
		t.Error(err)
	}
}

// shareDriver is a driver whose cgroups belong to this test alone.
func shareDriver(t *testing.T) *Driver {
	t.Helper()
	d, err := New(Config{Cgroup: "cocoon-share-" + strconv.Itoa(os.Getpid())}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}
