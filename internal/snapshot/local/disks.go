package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

const block = 4096 // disks grow to a multiple of this, bytes

// grown is one disk of a future VM.
type grown struct {
	snapshot.Disk
	below *vm.Disk // the image's part; nil if it has none
	size  int64    // bytes that the VM will see
}

// Disks implements snapshot.Store. Files in dir are called clone-<snapshot>-<disk>…, so that a VM that resumes from one
// snapshot after another never reuses the overlays of the earlier one. To restore the same snapshot again, use another
// folder or empty this one.
func (s *Store) Disks(ctx context.Context, h snapshot.Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error) {
	return s.disks(ctx, h, base, dir, storage, grown.make)
}

// RawDisks implements snapshot.Store. The names of files are as those of Disks.
func (s *Store) RawDisks(ctx context.Context, h snapshot.Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error) {
	for _, d := range h.Snapshot().Disks {
		if d.Writable() && (d.Image || len(d.Layers) != 1 || d.Layers[0].Format != vm.DiskRaw) {
			return nil, errdefs.Unsupportedf("disk %s of snapshot %s is no single raw file, and the hypervisor of this VM reads raw disks only; choose another hypervisor", d.Serial, name(h.Snapshot()))
		}
	}
	return s.disks(ctx, h, base, dir, storage, grown.copy)
}

func (s *Store) disks(ctx context.Context, h snapshot.Held, base []vm.Disk, dir string, storage int64, lay func(g grown, ctx context.Context, from, prefix string) (vm.Disk, error)) ([]vm.Disk, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	snap := h.Snapshot()
	disks, err := plan(h.Dir(), snap, base, storage)
	if err != nil {
		return nil, fmt.Errorf("disks of snapshot %s: %w", name(snap), err)
	}
	out := make([]vm.Disk, 0, len(disks))
	for n, d := range disks {
		disk, err := lay(d, ctx, h.Dir(), filepath.Join(dir, fmt.Sprintf("clone-%.10s-%d", snap.ID, n)))
		if err != nil {
			return nil, fmt.Errorf("disk %s of snapshot %s: %w", d.Serial, name(snap), full(err))
		}
		out = append(out, disk)
	}
	return out, nil
}

// plan makes every check that can refuse the request, before any file is made.
func plan(from string, snap snapshot.Snapshot, base []vm.Disk, storage int64) ([]grown, error) {
	out := make([]grown, 0, len(snap.Disks))
	for _, d := range snap.Disks {
		g := grown{Disk: d}
		if d.Image {
			below, err := imagePart(d, base)
			if err != nil {
				return nil, err
			}
			g.below = &below
		}
		if len(d.Layers) > 0 && d.Writable() {
			top := d.Layers[len(d.Layers)-1]
			size, err := sizeOf(vm.Disk{Path: filepath.Join(from, top.File), Format: top.Format})
			if errors.Is(err, fs.ErrNotExist) {
				return nil, errdefs.DataLossf("its file %s is missing", top.File)
			}
			if err != nil {
				return nil, err
			}
			g.size = roundUp(size, qcow2.SectorSize)
			if d.Role == vm.RoleCOW && storage != 0 {
				want := roundUp(storage, block)
				if want < size {
					return nil, errdefs.Invalidf("disk %s has %d bytes, more than the requested %d; request at least as much storage", d.Serial, size, storage)
				}
				g.size = want
			}
		}
		out = append(out, g)
	}
	return out, nil
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// imagePart returns the image's own file for a disk. It skips a fresh overlay of the image store: the snapshot's layers
// are based on the image itself.
func imagePart(d snapshot.Disk, base []vm.Disk) (vm.Disk, error) {
	at := slices.IndexFunc(base, func(b vm.Disk) bool { return b.Serial == d.Serial })
	if at < 0 {
		return vm.Disk{}, errdefs.DataLossf("disk %s belongs to the image, but the image has no such disk: it is not the image that the snapshot was made with", d.Serial)
	}
	b := base[at].Clone()
	for !b.ReadOnly && b.Backing != nil {
		b = *b.Backing
	}
	if len(d.Layers) == 0 {
		b.Serial, b.Role = d.Serial, d.Role
	}
	return b, nil
}

// make creates the files of a disk at prefix.
func (g grown) make(ctx context.Context, from, prefix string) (vm.Disk, error) {
	below := g.below
	for n, l := range g.Layers {
		at := vm.Disk{Path: fmt.Sprintf("%s.%d.%s", prefix, n, l.Format), Format: l.Format, ReadOnly: true, Role: vm.RoleLayer, Backing: below}
		if err := link(ctx, at.Path, filepath.Join(from, l.File)); err != nil {
			return vm.Disk{}, err
		}
		below = &at
	}
	if len(g.Layers) == 0 {
		return *below, nil
	}
	if !g.Writable() {
		below.Serial, below.Role = g.Serial, g.Role
		return *below, nil
	}
	top := vm.Disk{Path: prefix + ".qcow2", Format: vm.DiskQCOW2, Serial: g.Serial, Role: g.Role, Backing: below}
	return top, qcow2.Overlay{VirtualSize: g.size, Backing: below.Path, BackingFormat: below.Format}.Create(top.Path)
}

// copy creates a raw disk at prefix: a writable one is a copy of its only layer, another one is as make creates it.
func (g grown) copy(ctx context.Context, from, prefix string) (vm.Disk, error) {
	if !g.Writable() || len(g.Layers) != 1 {
		return g.make(ctx, from, prefix)
	}
	d := vm.Disk{Path: prefix + ".raw", Format: vm.DiskRaw, Serial: g.Serial, Role: g.Role}
	if _, err := os.Lstat(d.Path); err == nil {
		return d, nil
	}
	tmp := filepath.Join(filepath.Dir(d.Path), "."+filepath.Base(d.Path)+".tmp")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by an attempt that was killed
		return vm.Disk{}, err
	}
	if err := sparse.CopyFile(ctx, tmp, filepath.Join(from, g.Layers[0].File)); err != nil {
		return vm.Disk{}, err
	}
	if err := os.Truncate(tmp, g.size); err != nil {
		return vm.Disk{}, err
	}
	return d, os.Rename(tmp, d.Path)
}

// link makes path a hard link to src, or a copy if links are not possible, unless it exists already. A copy gets its
// final name when it is complete.
func link(ctx context.Context, path, src string) error {
	want, err := os.Lstat(src)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.DataLossf("the layer %s is missing", src)
	}
	if err != nil {
		return err
	}
	switch have, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case have.Size() == want.Size(): // a link or a copy; the name tells which snapshot it belongs to
		return nil
	default:
		return errdefs.Preconditionf("%s exists and is another disk; remove the remains of the VM first", path)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by an attempt that was killed
		return err
	}
	if err := sparse.LinkFile(ctx, tmp, src); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// Overlay implements snapshot.Store.
func (s *Store) Overlay(_ context.Context, below vm.Disk, dir, name string) (vm.Disk, error) {
	if name != filepath.Base(name) || name == "." || name == ".." {
		return vm.Disk{}, errdefs.Invalidf("%q is not a valid name for the file of a disk", name)
	}
	size, err := sizeOf(below)
	if err != nil {
		return vm.Disk{}, fmt.Errorf("make an overlay on disk %s: %w", below.Serial, err)
	}
	frozen := below.Clone()
	frozen.ReadOnly, frozen.Serial, frozen.Role = true, "", vm.RoleLayer
	top := vm.Disk{Path: filepath.Join(dir, name), Format: vm.DiskQCOW2, Serial: below.Serial, Role: below.Role, Backing: &frozen}
	o := qcow2.Overlay{VirtualSize: roundUp(size, qcow2.SectorSize), Backing: frozen.Path, BackingFormat: frozen.Format}
	if err := o.Create(top.Path); err != nil {
		return vm.Disk{}, fmt.Errorf("make an overlay on disk %s: %w", below.Serial, full(err))
	}
	return top, nil
}
