package jail

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file puts a VM into a cgroup that others have made (Plan.CgroupParent), such as that of a pod: below it, the VM has a folder of its own.
// With cgroup v2 this is the one folder of the VM. With version 1 the VM has one in each hierarchy that has the parent, beside its folder in
// the tree of version 2, if there is one, by which its processes are found.

// hierarchy is a tree of cgroup v1.
type hierarchy struct {
	mount       string
	controllers []string // such as memory, and name=systemd of one without controllers
	device      string   // of the mount; the same hierarchy may be mounted twice
}

// v1Controllers are those of the hierarchies in which a missing parent is made.
var v1Controllers = []string{"cpu", "cpuacct", "memory", "pids"}

// findCgroup1 returns the writable hierarchies of cgroup v1. It returns none if version 2 limits memory here.
func findCgroup1(mountinfo io.Reader) []hierarchy {
	var all []hierarchy
	memory := false
	for sc := bufio.NewScanner(mountinfo); sc.Scan(); {
		mount, fs, ok := strings.Cut(sc.Text(), " - ")
		fields, kind := strings.Fields(mount), strings.Fields(fs)
		if !ok || len(fields) < 6 || len(kind) < 3 || kind[0] != "cgroup" || fields[3] != "/" || !slices.Contains(strings.Split(fields[5], ","), "rw") {
			continue
		}
		h := hierarchy{mount: proc.MountPath(fields[4]), controllers: strings.Split(kind[2], ","), device: fields[2]}
		if !slices.ContainsFunc(all, func(o hierarchy) bool { return o.device == h.device }) {
			all = append(all, h)
			memory = memory || slices.Contains(h.controllers, "memory")
		}
	}
	if !memory {
		return nil
	}
	return all
}

// parents returns the folders of g.parent in which the VM gets folders.
func (g trees) parents() (out []string) {
	if len(g.v1) == 0 {
		if !g.usable() {
			return nil
		}
		return []string{filepath.Join(g.mount, g.parent)}
	}
	for _, h := range g.v1 {
		if dir := filepath.Join(h.mount, g.parent); isDir(dir) {
			out = append(out, dir)
		}
	}
	if len(out) > 0 {
		return out
	}
	for _, h := range g.v1 { // nobody has made it yet
		if slices.ContainsFunc(h.controllers, func(c string) bool { return slices.Contains(v1Controllers, c) }) {
			out = append(out, filepath.Join(h.mount, g.parent))
		}
	}
	return out
}

// folders returns the folders that id may have in the hierarchies of version 1.
func (g trees) folders(id vm.ID) (out []string) {
	if g.parent == "" || id == "" {
		return nil
	}
	for _, h := range g.v1 {
		out = append(out, filepath.Join(h.mount, g.parent, vm.CgroupPrefix+string(id)))
	}
	return out
}

// join makes the folders of id in the hierarchies of version 1, and opens their files "tasks". The caller closes them.
func (g trees) join(id vm.ID, parents []string) (tasks []*os.File, err error) {
	if len(g.v1) == 0 {
		return nil, nil
	}
	for _, parent := range parents {
		dir := filepath.Join(parent, vm.CgroupPrefix+string(id))
		if err = g.mkdirV1(dir); err != nil {
			break
		}
		var f *os.File
		if f, err = os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0); err != nil {
			break
		}
		tasks = append(tasks, f)
	}
	if err != nil {
		CloseAll(tasks)
		return nil, fmt.Errorf("make cgroup below %s: %w", g.parent, err)
	}
	return tasks, nil
}

// mkdirV1 makes a folder and those above it.
func (g trees) mkdirV1(dir string) error {
	err := os.Mkdir(dir, 0o755)
	if errors.Is(err, os.ErrNotExist) {
		if err = g.mkdirV1(filepath.Dir(dir)); err == nil {
			err = os.Mkdir(dir, 0o755)
		}
	}
	if err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return inheritCPUs(dir)
}

// inheritCPUs copies the CPUs and the memory nodes of the parent into a folder of the controller cpuset. No process can join a folder without both.
func inheritCPUs(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) || err == nil && strings.TrimSpace(string(own)) != "" {
			continue
		}
		if err != nil {
			return err
		}
		of, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), of, 0); err != nil {
			return err
		}
	}
	return nil
}

// below reports whether dir is in one of the trees, and not the root of one.
func (g trees) below(dir string) bool {
	in := func(mount string) bool { return mount != "" && strings.HasPrefix(dir, mount+"/") }
	return in(g.mount) || slices.ContainsFunc(g.v1, func(h hierarchy) bool { return in(h.mount) })
}

// removeJoined removes the folders of id in the hierarchies of version 1, and the folders above that were made for it and are empty.
func (g trees) removeJoined(id vm.ID) error {
	var errs []error
	for _, dir := range g.folders(id) {
		errs = append(errs, removeCgroup(dir))
	}
	for _, dir := range g.made {
		if g.below(dir) {
			_ = os.Remove(dir) // the kernel refuses while others are in it
		}
	}
	return errors.Join(errs...)
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
