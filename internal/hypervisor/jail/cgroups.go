package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Cgroups makes the cgroups of VMs.
type Cgroups struct {
	name string // of our folder in the tree of version 2
	log  *slog.Logger
}

// Bounds are what the processes of a VM may take from the node.
type Bounds struct {
	CPUs     int
	Memory   int64 // of the guest, bytes
	Overhead int64 // what the hypervisor itself may need in addition, bytes
}

// Cgroup is the place of a new process in the cgroup trees.
type Cgroup struct {
	Dir   *os.File   // of version 2; nil if the host has none that can be written
	Tasks []*os.File // of version 1; see proc.Spec.CgroupTasks
	Place *Place     // nil: in the driver's own cgroup
}

// Close closes the descriptors; the cgroups stay.
func (c Cgroup) Close() { CloseAll(append(c.Tasks, c.Dir)) }

// placeFile is the file that says where the cgroups of a VM with a parent are. It is in the runtime folder, and is written before the first
// cgroup is made. The handle repeats it later, because the runtime folder may be lost when the daemon is not.
const placeFile = "cgroup.json"

// Place says in which cgroup of others a VM is.
type Place struct {
	Parent string   `json:"parent"`
	Made   []string `json:"made,omitempty"` // folders above those of the VM that were missing, the innermost first
}

// Usable reports whether each VM gets a cgroup.
func (c Cgroups) Usable() bool { return c.trees().usable() }

// Notes says what the cgroup trees of this host lack, one sentence each.
func (c Cgroups) Notes() []string { return c.trees().notes() }

// Make makes the cgroups of VM id, whose runtime folder is dir. parent is hypervisor.Plan.CgroupParent. The caller closes the result.
// After an error the caller has to Remove what exists.
func (c Cgroups) Make(id vm.ID, dir, parent string, b Bounds) (cg Cgroup, err error) {
	g := c.trees()
	var parents []string
	if parent != "" {
		if cg.Place, parents, err = g.enter(dir, parent); err != nil {
			return cg, err
		}
		g.parent, g.made = cg.Place.Parent, cg.Place.Made
	}
	if cg.Dir, err = g.make(id, b); err != nil {
		return cg, err
	}
	cg.Tasks, err = g.join(id, parents)
	return cg, err
}

// enter finds the folders of parent in which the VM gets folders, and takes a note of those that will have to be made.
func (g trees) enter(dir, parent string) (*Place, []string, error) {
	g.parent = parent
	parents := g.parents()
	if len(parents) == 0 {
		return nil, nil, errdefs.Preconditionf("no cgroup tree is mounted that can be written, so the VM cannot be in the cgroup %s", parent)
	}
	place := &Place{Parent: parent}
	for _, dir := range parents {
		for ; !isDir(dir) && g.below(dir); dir = filepath.Dir(dir) {
			place.Made = append(place.Made, dir)
		}
	}
	slices.SortStableFunc(place.Made, func(a, b string) int { return len(b) - len(a) })
	if err := WriteFile(filepath.Join(dir, placeFile), place); err != nil {
		return nil, nil, fmt.Errorf("record the cgroups of the VM: %w", err)
	}
	return place, parents, nil
}

// of is the part of the cgroup trees that holds the VM with that runtime folder. known is what its handle says, nil if nothing.
func (c Cgroups) of(dir string, known *Place) (trees, error) {
	g := c.trees()
	if known != nil {
		g.parent, g.made = known.Parent, known.Made
		return g, nil
	}
	b, err := os.ReadFile(filepath.Join(dir, placeFile))
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err != nil {
		return g, fmt.Errorf("read where its cgroups are: %w", err)
	}
	var n Place
	if err := json.Unmarshal(b, &n); err != nil { // it is replaced as a whole, so only a power cut damages it, which ends all cgroups
		c.log.Warn("it is not known where the cgroups of vm were", "dir", dir, "err", err)
		return g, nil
	}
	g.parent, g.made = n.Parent, n.Made
	return g, nil
}

// Processes opens the processes in the cgroups of id, whatever they run. A host without a usable tree has none. The caller closes them.
func (c Cgroups) Processes(id vm.ID, dir string, known *Place) ([]*proc.Process, error) {
	g, err := c.of(dir, known)
	if err != nil {
		return nil, err
	}
	return g.processes(id)
}

// Folders returns the folders that the cgroups of id have or would have, that of version 2 first.
func (c Cgroups) Folders(id vm.ID, dir string, known *Place) ([]string, error) {
	g, err := c.of(dir, known)
	return g.all(id), err
}

// Parents returns the folders of the cgroup parent in which VMs get folders.
func (c Cgroups) Parents(parent string) []string {
	g := c.trees()
	g.parent = parent
	return g.parents()
}

// Limit gives a VM that runs other bounds.
func (c Cgroups) Limit(id vm.ID, dir string, known *Place, b Bounds) error {
	g, err := c.of(dir, known)
	if err == nil && g.mount != "" {
		limit(g.path(id), b)
	}
	return err
}

// Remove removes the cgroups of a VM that has no process, and then the file that says where they are. Idempotent.
func (c Cgroups) Remove(id vm.ID, dir string, known *Place) error {
	g, err := c.of(dir, known)
	if err != nil {
		return err
	}
	if err := g.remove(id); err != nil || g.parent == "" {
		return err
	}
	if err := os.Remove(filepath.Join(dir, placeFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

// OutOfMemory reports whether the kernel has killed a process of a VM because its cgroup, or one above it, reached its limit of memory.
func (c Cgroups) OutOfMemory(id vm.ID, dir string, known *Place) bool {
	g, err := c.of(dir, known)
	if err != nil {
		return false
	}
	for _, dir := range g.all(id) {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2 and 1
			f := words(filepath.Join(dir, name))
			if at := slices.Index(f, "oom_kill"); at >= 0 && at+1 < len(f) && f[at+1] != "0" {
				return true
			}
		}
	}
	return false
}

// all returns the folders of id in all trees.
func (g trees) all(id vm.ID) (dirs []string) {
	if g.mount != "" {
		dirs = append(dirs, g.path(id))
	}
	return append(dirs, g.folders(id)...)
}
