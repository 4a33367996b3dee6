package containerdtest

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/proc"
)

// clean removes the pods, ends containerd, and removes what is left of both. What containerd itself should have removed is an error
// only if nothing has killed it: then the runtime, or a test, has lost something.
func (d *Daemon) clean() {
	ids := d.containers()
	removed := false
	if d.process != nil {
		_, err := d.try("rmp", "--force", "--all")
		removed = err == nil
		if err != nil {
			d.t.Logf("remove all pods: %v", err)
		}
	}
	if d.t.Failed() {
		d.t.Logf("what containerd complained of:\n%s", complaints(d.Log(), 50))
	}
	d.Stop()
	left := d.processes()
	if removed && len(left) > 0 {
		d.t.Errorf("all pods are removed, and of containerd processes are left: %v", left)
	}
	for pid := range left {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if !eventually(func() bool { return len(d.processes()) == 0 }) {
		d.t.Errorf("processes of containerd do not end: %v", d.processes())
	}
	for _, path := range proc.MountsBelow(d.dir) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			d.t.Errorf("unmount %s: %v", path, err)
		}
	}
	d.removeCgroups(ids)
	_ = exec.Command("ip", "link", "del", bridge).Run() // there is none before the first pod
	if err := os.RemoveAll(d.dir); err != nil {
		d.t.Error("remove the files of containerd:", err)
	}
}

// removeCgroups removes the cgroups of killed containers. It also removes the parent of all cgroups, unless others use it.
func (d *Daemon) removeCgroups(ids []string) {
	var left []string
	for _, id := range ids {
		dirs, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup/*/k8s.io", id))
		left = append(left, dirs...)
	}
	var err error
	gone := eventually(func() bool { // a process that has ended may still count for a moment
		left = slices.DeleteFunc(left, func(dir string) bool {
			failed := os.Remove(dir)
			if failed == nil || errors.Is(failed, os.ErrNotExist) {
				return true
			}
			err = failed
			return false
		})
		return len(left) == 0
	})
	if !gone {
		d.t.Errorf("%d cgroups of containers stay: %v", len(left), err)
	}
	parents, _ := filepath.Glob("/sys/fs/cgroup/*/k8s.io")
	for _, dir := range parents {
		_ = os.Remove(dir)
	}
}

// containers returns the ids of containers and sandboxes that run.
func (d *Daemon) containers() []string {
	var ids []string
	dirs, _ := filepath.Glob(filepath.Join(d.dir, "state/io.containerd.runtime.v2.task/k8s.io/*"))
	for _, dir := range dirs {
		ids = append(ids, filepath.Base(dir))
	}
	return ids
}

// processes returns the shims, runcs and processes of containers, by their ids. containerd itself is none.
func (d *Daemon) processes() map[int]string {
	names, parents := map[int]string{}, map[int]int{}
	ours := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			continue // it has ended
		}
		open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		fields := strings.Fields(string(stat[end+1:]))
		if fields[0] == "Z" {
			continue
		}
		names[pid] = string(stat[open+1 : end])
		parents[pid], _ = strconv.Atoi(fields[1])
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		program, _, _ := bytes.Cut(cmdline, []byte{0})
		if bytes.Contains(cmdline, []byte(d.dir+"/")) && strings.HasPrefix(string(program), d.Programs+"/") && (d.process == nil || pid != d.process.Process.Pid) {
			ours[pid] = names[pid]
		}
	}
	for more := true; more; {
		more = false
		for pid, parent := range parents {
			if _, known := ours[pid]; !known && ours[parent] != "" {
				ours[pid], more = names[pid], true
			}
		}
	}
	return ours
}

// complaints returns the last n lines of a log of containerd that are no mere information.
func complaints(log string, n int) string {
	lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(log), "\n"), func(line string) bool { return strings.Contains(line, " level=info ") })
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
