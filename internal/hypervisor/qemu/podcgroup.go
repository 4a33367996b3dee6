package qemu

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
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
func (g cgroups) parents() (out []string) {
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
func (g cgroups) folders(id vm.ID) (out []string) {
	if g.parent == "" || id == "" {
		return nil
	}
	for _, h := range g.v1 {
		out = append(out, filepath.Join(h.mount, g.parent, vm.CgroupPrefix+string(id)))
	}
	return out
}

// join makes the folders of id in the hierarchies of version 1, and opens their files "tasks". The caller closes them.
func (g cgroups) join(id vm.ID, parents []string) (tasks []*os.File, err error) {
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
		closeAll(tasks)
		return nil, fmt.Errorf("make cgroup below %s: %w", g.parent, err)
	}
	return tasks, nil
}

// mkdirV1 makes a folder and those above it.
func (g cgroups) mkdirV1(dir string) error {
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

// cgroupFile is the file that says where the cgroups of a VM with a parent are. It is in the runtime folder, and is written before the first
// cgroup is made. The handle repeats it later, because the file is lost with its folder.
const cgroupFile = "cgroup.json"

// cgroupNote says in which cgroup of others a VM is.
type cgroupNote struct {
	Parent string   `json:"parent"`
	Made   []string `json:"made,omitempty"` // folders above those of the VM that were missing, the innermost first
}

// choose returns the part of the cgroup trees that will hold the VM, and the folders of its parent, if it has one. It takes a note of them.
func (l *launch) choose() (g cgroups, parents []string, err error) {
	g = l.d.cgroups()
	if l.plan.CgroupParent == "" {
		return g, nil, nil
	}
	g.parent = l.plan.CgroupParent
	if parents = g.parents(); len(parents) == 0 {
		return g, nil, errdefs.Preconditionf("no cgroup tree is mounted that can be written, so the VM cannot be in the cgroup %s", g.parent)
	}
	for _, dir := range parents {
		for ; !isDir(dir) && g.below(dir); dir = filepath.Dir(dir) {
			g.made = append(g.made, dir)
		}
	}
	slices.SortStableFunc(g.made, func(a, b string) int { return len(b) - len(a) })
	l.place = &cgroupNote{Parent: g.parent, Made: g.made}
	if err := writeFile(filepath.Join(l.plan.Dir, cgroupFile), l.place); err != nil {
		return g, nil, fmt.Errorf("record the cgroups of the VM: %w", err)
	}
	return g, parents, nil
}

// cgroupsOf is the part of the cgroup trees that holds the VM with that runtime folder. known is what its handle says, nil if nothing.
func (d *Driver) cgroupsOf(dir string, known *cgroupNote) (cgroups, error) {
	g := d.cgroups()
	if known != nil {
		g.parent, g.made = known.Parent, known.Made
		return g, nil
	}
	b, err := os.ReadFile(filepath.Join(dir, cgroupFile))
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err != nil {
		return g, fmt.Errorf("read where its cgroups are: %w", err)
	}
	var n cgroupNote
	if err := json.Unmarshal(b, &n); err != nil { // it is replaced as a whole, so only a power cut damages it, which ends all cgroups
		d.log.Warn("it is not known where the cgroups of vm were", "dir", dir, "err", err)
		return g, nil
	}
	g.parent, g.made = n.Parent, n.Made
	return g, nil
}

// below reports whether dir is in one of the trees, and not the root of one.
func (g cgroups) below(dir string) bool {
	in := func(mount string) bool { return mount != "" && strings.HasPrefix(dir, mount+"/") }
	return in(g.mount) || slices.ContainsFunc(g.v1, func(h hierarchy) bool { return in(h.mount) })
}

// removeJoined removes the folders of id in the hierarchies of version 1, and the folders above that were made for it and are empty.
func (g cgroups) removeJoined(id vm.ID) error {
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

// removeCgroups removes the cgroups of a VM that has no process, and then the file that says where they are.
func (d *Driver) removeCgroups(id vm.ID, dir string, known *cgroupNote) error {
	groups, err := d.cgroupsOf(dir, known)
	if err != nil {
		return err
	}
	if err := groups.remove(id); err != nil || groups.parent == "" {
		return err
	}
	if err := os.Remove(filepath.Join(dir, cgroupFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

// outOfMemory reports whether the kernel has killed a process of a VM because its cgroup, or one above it, reached its limit of memory.
func (d *Driver) outOfMemory(h handle) bool {
	g, err := d.cgroupsOf(h.Dir, h.Cgroup)
	if err != nil {
		return false
	}
	dirs := g.folders(h.ID)
	if g.mount != "" {
		dirs = append(dirs, g.path(h.ID))
	}
	for _, dir := range dirs {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2 and 1
			f := words(filepath.Join(dir, name))
			if at := slices.Index(f, "oom_kill"); at >= 0 && at+1 < len(f) && f[at+1] != "0" {
				return true
			}
		}
	}
	return false
}
