package engine

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// each calls fn for d and all its backing files.
func each(d vm.Disk, fn func(vm.Disk)) {
	for at := &d; at != nil; at = at.Backing {
		fn(*at)
	}
}

// keepDisks puts disks into a snapshot of r by keep, a method of its draft, except the seed: it contains a VM's identity, and a clone gets its own.
func keepDisks(ctx context.Context, keep func(context.Context, vm.Disk, func(path string) bool) (snapshot.Disk, error), r vm.Record, disks []vm.Disk) ([]snapshot.Disk, error) {
	shared := imageFiles(r.ImageType, disks)
	var out []snapshot.Disk
	for _, d := range disks {
		if d.Role == vm.RoleCidat || d.Role == vm.RoleVolume {
			continue
		}
		x, err := keep(ctx, d, func(path string) bool { return slices.Contains(shared, path) })
		if err != nil {
			return nil, err
		}
		if d.Role == vm.RoleCOW && x.Size == 0 {
			x.Size = r.Spec.Storage
		}
		out = append(out, x)
	}
	return out, nil
}

// imageFiles returns the files among disks that belong to the image. For a container image these are the layers; each
// host makes the empty file system below the writable layer itself. For a disk image it is the bottom file of the
// writable disk.
func imageFiles(t vm.ImageType, disks []vm.Disk) []string {
	var out []string
	for _, d := range disks {
		switch {
		case d.Role == vm.RoleLayer:
			out = append(out, d.Path)
		case d.Role == vm.RoleCOW && t != vm.ImageOCI && d.Backing != nil:
			each(d, func(at vm.Disk) {
				if at.Backing == nil {
					out = append(out, at.Path)
				}
			})
		}
	}
	return out
}

// below returns disks with each writable disk replaced by its backing file.
func below(disks []vm.Disk) []vm.Disk {
	disks = slices.Clone(disks)
	for i, d := range disks {
		if !d.ReadOnly && d.Backing != nil {
			disks[i] = *d.Backing
			disks[i].ReadOnly, disks[i].Serial, disks[i].Role = false, d.Serial, d.Role
		}
	}
	return disks
}

// ownFiles returns the names of the files in dir that belong to disks and are not overlays of the engine.
func ownFiles(dir string, disks []vm.Disk) []string {
	var out []string
	for _, d := range disks {
		if d.Role == vm.RoleCidat {
			continue
		}
		each(d, func(at vm.Disk) {
			if filepath.Dir(at.Path) == dir && !strings.HasPrefix(filepath.Base(at.Path), topPrefix) {
				out = append(out, filepath.Base(at.Path))
			}
		})
	}
	return out
}

// tidy removes disks in the folder of m, and of files, that its record does not refer to. What it cannot remove
// is removed with the VM. Preconditions: m is held, and its process, if any, is the one of its record.
func (m *machine) tidy(files ...string) {
	dir := m.dirs.state(m.id)
	used := map[string]bool{}
	for _, d := range m.record().Disks {
		each(d, func(at vm.Disk) {
			if rel, err := filepath.Rel(dir, at.Path); err == nil {
				used[strings.SplitN(rel, string(filepath.Separator), 2)[0]] = true
			}
		})
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.log.Warn("folder of vm not read", "vm", m.id, "err", err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, topPrefix) || strings.HasPrefix(name, disksPrefix) {
			files = append(files, name)
		}
	}
	files = slices.DeleteFunc(slices.Clone(files), func(name string) bool { return used[name] || filepath.Base(name) != name })
	if len(files) == 0 {
		return
	}
	if err := m.durable(m.life.serving); err != nil { // an older record may refer to them
		m.log.Warn("old disks of vm not removed", "vm", m.id, "err", err)
		return
	}
	for _, name := range files {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			m.log.Warn("old disk of vm not removed", "vm", m.id, "err", err)
		}
	}
}

// Every save and every wake adds a layer to each writable disk of a VM.
const (
	mergeLayers = 8  // from this number on, they are merged when the guest runs
	mostLayers  = 48 // above this number, no more are added: a driver starts only VMs with a limited number
)

// layers returns how many files d consists of, including the one at the bottom.
func layers(d vm.Disk) (n int) {
	each(d, func(vm.Disk) { n++ })
	return n
}

// roomOnTop refuses a save that would add too many overlays.
func roomOnTop(r vm.Record) error {
	for _, d := range r.Disks {
		if n := layers(d); !d.ReadOnly && n > mostLayers {
			return errdefs.Preconditionf("its disk %s has too many layers (%d); a start merges them, so start or restart the VM first", d.Serial, n)
		}
	}
	return nil
}

// shorten merges the layers of m's writable disks when there are many, while its guest runs. A failure leaves the
// longer chain, which is equally valid: the next save or start tries again.
//
// Preconditions: m is held. Its process uses exactly the disks of its record: either the process has just started, or a save
// has just added overlays.
func (m *machine) shorten(ctx context.Context) {
	run := m.run.Load()
	if run == nil || run.Over() {
		return
	}
	flattener, ok := hypervisor.As[hypervisor.DiskFlattener](run.Inst)
	if !ok {
		return
	}
	was := m.record().Disks
	for i, d := range was {
		if d.ReadOnly || layers(d) < mergeLayers {
			continue
		}
		base := d
		each(d, func(at vm.Disk) { base = at })
		if err := flattener.FlattenDisk(ctx, d.Serial, &base); err != nil {
			m.log.Warn("layers of disk not merged", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
		_, err := m.update(ctx, func(r *vm.Record) {
			r.Disks = slices.Clone(r.Disks)
			r.Disks[i].Backing = &base
		})
		if err != nil {
			m.log.Warn("merged layers of disk not recorded", "vm", m.id, "disk", d.Serial, "err", err)
			return
		}
	}
	m.tidy(ownFiles(m.dirs.state(m.id), was)...)
}
