// Package jailtest has what tests of drivers ask the host about the places of VMs.
package jailtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// PodCgroup makes a cgroup as a kubelet makes that of a pod, and returns its path below the root and its folders. No other test may use name.
func PodCgroup(t testing.TB, groups jail.Cgroups, name string) (path string, dirs []string) {
	t.Helper()
	need.Root(t)
	path = "/" + name + "-pods/burstable/pod1"
	if dirs = groups.Parents(path); len(dirs) == 0 {
		need.Missing(t, "a cgroup tree that can be written")
	}
	if cpus := filepath.Join(filepath.Dir(strings.TrimSuffix(dirs[0], path)), "cpuset"); exists(filepath.Join(cpus, "cpuset.cpus")) { // of version 1
		dirs = append(dirs, cpus+path)
	}
	t.Cleanup(func() {
		for _, dir := range dirs {
			for range strings.Count(path, "/") {
				if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Errorf("left in the cgroup of the pod: %v", err)
				}
				dir = filepath.Dir(dir)
			}
		}
	})
	for _, dir := range dirs {
		if err := makeGroup(strings.TrimSuffix(dir, path), path); err != nil {
			t.Fatal(err)
		}
	}
	return path, dirs
}

// makeGroup makes the cgroup path below root. One of the controller cpuset takes no process before it has CPUs.
func makeGroup(root, path string) error {
	for at := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		dir := filepath.Join(root, at)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
			own, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil || strings.TrimSpace(string(own)) != "" || !exists(filepath.Join(dir, "tasks")) {
				continue
			}
			of, err := os.ReadFile(filepath.Join(root, name))
			if err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), of, 0)); err != nil {
				return err
			}
		}
		root = dir
	}
	return nil
}

// WantInPod checks that a process is in the cgroup of the VM below that of its pod.
func WantInPod(t testing.TB, groups jail.Cgroups, pid int, parent string, id vm.ID) {
	t.Helper()
	for _, dir := range groups.Parents(parent) {
		own := filepath.Join(dir, vm.CgroupPrefix+string(id))
		procs, err := os.ReadFile(filepath.Join(own, "cgroup.procs"))
		if err != nil || !slices.Contains(strings.Fields(string(procs)), strconv.Itoa(pid)) {
			t.Errorf("process %d is not in %s, which has %q, %v", pid, own, procs, err)
		}
	}
}

// Left returns what a VM of p has left on the host: processes, cgroups and sockets.
func Left(t testing.TB, j *jail.Jail, p hypervisor.Plan) []string {
	t.Helper()
	var traces []string
	found, err := j.Find(context.WithoutCancel(t.Context()), jail.UUID(p.ID))
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range found {
		traces = append(traces, fmt.Sprintf("process %d", q.PID()))
		_ = q.Close()
	}
	dirs, err := j.Cgroups.Folders(p.ID, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range dirs {
		if exists(path) {
			traces = append(traces, path)
		}
		// Our folder above those of the VMs is removed with the last VM.
		if rest, err := os.ReadDir(filepath.Dir(path)); err == nil && j.Cgroups.Usable() && !slices.ContainsFunc(rest, os.DirEntry.IsDir) {
			traces = append(traces, "empty cgroup "+filepath.Dir(path))
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup" + p.CgroupParent, "/sys/fs/cgroup/*" + p.CgroupParent} {
		own, _ := filepath.Glob(filepath.Join(pattern, vm.CgroupPrefix+string(p.ID)))
		traces = append(traces, own...)
	}
	err = filepath.WalkDir(p.Dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && (e.Name() == "cgroup.json" || e.Type()&os.ModeSocket != 0) {
			traces = append(traces, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return traces
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
