package local

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Files that Prepare creates in a VM's folder.
const (
	CowFile     = "cow.qcow2"     // writable layer of an OCI guest
	OverlayFile = "overlay.qcow2" // the disk of a disk guest
	RawFile     = "disk.raw"      // either of them for a VM whose disks must be raw
)

// Prepare creates the disks of a VM. A container image gets its shared layers and a private disk that begins as an empty file
// system. A disk image gets a private disk that begins as the image, and is larger than it if the layout says so.
// Preconditions: one caller at a time for one VM.
func (s *Store) Prepare(ctx context.Context, img image.Image, l image.Layout) (_ image.Rootfs, err error) {
	if err := s.Open(ctx); err != nil {
		return image.Rootfs{}, err
	}
	if l.Dir, err = filepath.Abs(l.Dir); err != nil {
		return image.Rootfs{}, fmt.Errorf("prepare disks: %w", err)
	}
	if img.ID == "" && img.Type == vm.ImageOCI { // image.Blank
		return s.prepareOCI(ctx, record{}, l)
	}
	rec, err := s.use(img.ID)
	if err != nil {
		return image.Rootfs{}, err
	}
	if rec.Type == vm.ImageOCI {
		return s.prepareOCI(ctx, rec, l)
	}
	base := s.baseDisk(rec)
	storage := cmp.Or(l.Storage, rec.VirtualSize)
	if storage < rec.VirtualSize {
		return image.Rootfs{}, errdefs.Invalidf("the disk of image %s has %d bytes (%s), more than the requested %d (%s); request at least as much storage",
			orID(img), rec.VirtualSize, human(rec.VirtualSize), storage, human(storage))
	}
	own := vm.Disk{Path: filepath.Join(l.Dir, OverlayFile), Format: vm.DiskQCOW2, Serial: image.SerialDisk, Role: vm.RoleCOW, Backing: &base}
	if l.Raw {
		own = raw(own, l.Dir)
		return image.Rootfs{Disks: []vm.Disk{own}}, s.copyTo(ctx, own.Path, roundUp(storage, qcow2.SectorSize), func() (string, error) { return s.rawDisk(ctx, img, rec) })
	}
	return image.Rootfs{Disks: []vm.Disk{own}}, overlay(own, storage, qcow2.SectorSize)
}

// raw returns d as a raw disk in dir, without a backing file.
func raw(d vm.Disk, dir string) vm.Disk {
	d.Path, d.Format, d.Backing = filepath.Join(dir, RawFile), vm.DiskRaw, nil
	return d
}

// copyTo makes path a sparse copy of the file that find finds, of size bytes, unless it exists: by reflink where the file system can do that.
func (s *Store) copyTo(ctx context.Context, path string, size int64, find func() (string, error)) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	src, err := find()
	if err != nil {
		return err
	}
	part := path + ".part" // of an attempt that was killed, if it exists
	if err := os.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("copy the disk %s: %w", src, err)
	}
	if err = sparse.CopyFile(ctx, part, src); err == nil {
		err = os.Truncate(part, size)
	}
	if err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		return fmt.Errorf("copy the disk %s: %w", src, full(errors.Join(err, os.RemoveAll(part))))
	}
	return nil
}

// Base returns the disks of an image that VMs share.
func (s *Store) Base(ctx context.Context, img image.Image) ([]vm.Disk, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	rec, err := s.use(img.ID)
	if err != nil {
		return nil, err
	}
	if rec.Type == vm.ImageOCI {
		return s.layerDisks(rec), nil
	}
	base := s.baseDisk(rec)
	return []vm.Disk{{Format: vm.DiskQCOW2, Serial: image.SerialDisk, Role: vm.RoleCOW, Backing: &base}}, nil
}

func (s *Store) baseDisk(rec record) vm.Disk {
	return vm.Disk{
		Path: s.path("data", strings.TrimPrefix(rec.ID, "sha256:"), rec.File), Format: rec.Format, ReadOnly: true, Role: vm.RoleLayer,
	}
}

func (s *Store) layerDisks(rec record) []vm.Disk {
	var disks []vm.Disk
	for n, key := range rec.Layers {
		disks = append(disks, vm.Disk{
			Path: s.path("layers", key, layerFile), Format: vm.DiskRaw, ReadOnly: true, Serial: image.SerialLayer(n), Role: vm.RoleLayer,
		})
	}
	return disks
}

// DiskSize returns the size in bytes of a disk image's disk for its guest, 0 for a container image.
func (s *Store) DiskSize(ctx context.Context, img image.Image) (int64, error) {
	if err := s.Open(ctx); err != nil || img.Type != vm.ImageDisk {
		return 0, err
	}
	hex, _ := hexOf(img.ID)
	rec, err := s.load(hex)
	return rec.VirtualSize, err
}

func (s *Store) prepareOCI(ctx context.Context, rec record, l image.Layout) (image.Rootfs, error) {
	storage := cmp.Or(l.Storage, vm.DefaultStorage)
	if storage < vm.MinStorage || storage > vm.MaxStorage {
		return image.Rootfs{}, errdefs.Invalidf("invalid size of a writable layer: %d bytes (%s); use a size between %s and %s", storage, human(storage), human(vm.MinStorage), human(vm.MaxStorage))
	}
	storage = roundUp(storage, blockSize)
	empty, err := s.Template(ctx, storage)
	if err != nil {
		return image.Rootfs{}, err
	}
	cow := vm.Disk{
		Path: filepath.Join(l.Dir, CowFile), Format: vm.DiskQCOW2, Serial: image.SerialCOW, Role: vm.RoleCOW,
		Backing: &vm.Disk{Path: empty, Format: vm.DiskRaw, ReadOnly: true, Role: vm.RoleLayer},
	}
	if l.Raw {
		cow = raw(cow, l.Dir)
		return image.Rootfs{Disks: append(s.layerDisks(rec), cow)}, s.copyTo(ctx, cow.Path, storage, func() (string, error) { return empty, nil })
	}
	return image.Rootfs{Disks: append(s.layerDisks(rec), cow)}, overlay(cow, storage, blockSize)
}

func overlay(d vm.Disk, size, unit int64) error {
	o := qcow2.Overlay{VirtualSize: roundUp(size, unit), Backing: d.Backing.Path, BackingFormat: d.Backing.Format}
	return full(o.Create(d.Path))
}

const blockSize = 4096 // of the file systems we make, bytes

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// Template returns the empty ext4 file system of size bytes, and creates it if it is the first of its size. Creating one
// takes tens of milliseconds, so a daemon may request the expected sizes in advance.
//
// A template is never replaced once it has its name, because overlays depend on its exact bytes.
func (s *Store) Template(ctx context.Context, size int64) (path string, err error) {
	if err := s.Open(ctx); err != nil {
		return "", err
	}
	size = roundUp(size, blockSize)
	path = s.path("templates", "ext4-"+strconv.FormatInt(size, 10)+".raw")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	work, err := s.newWork()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	tmp := work.join("ext4")
	if _, err := writeSynced(tmp, func(f *os.File) error {
		if err := f.Truncate(size); err != nil {
			return fmt.Errorf("make an empty file system of %s: %w", human(size), full(err))
		}
		return s.mkfs(ctx, tmp, size)
	}); err != nil {
		return "", err
	}
	if err := os.Link(tmp, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("keep an empty file system: %w", full(err))
	}
	return path, atomicfile.SyncDir(s.path("templates"))
}

// Features are listed one by one, identifiers and times are fixed: one size gives the same bytes on any host.
const (
	ext4Features = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"
	ext4UUID     = "c0c00000-0000-4000-8000-000000000001"
	ext4Extended = "root_owner=0:0,nodiscard,hash_seed=" + ext4UUID
)

// mkfsRoom is the free space, in bytes, below which a failure of mkfs is reported as a full disk.
const mkfsRoom = 64 << 20

func (s *Store) mkfs(ctx context.Context, path string, size int64) error {
	tool, err := s.findMkfs()
	if err != nil {
		return err
	}
	// The file is one big hole: nothing must be zeroed, neither here nor later by the guest's kernel. Older versions of
	// mkfs do not know the first option; there the guest does this work.
	var out []byte
	for _, extended := range []string{"assume_storage_prezeroed=1," + ext4Extended, "lazy_itable_init=1,lazy_journal_init=1," + ext4Extended} {
		cmd := exec.CommandContext(ctx, tool, "-q", "-F", "-t", "ext4", "-b", strconv.Itoa(blockSize), "-I", "256", "-i", "16384",
			"-m", "0", "-J", "size="+journal(size), "-U", ext4UUID, "-O", ext4Features, "-E", extended, path)
		cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "E2FSPROGS_FAKE_TIME=1", "SOURCE_DATE_EPOCH=1"}
		if out, err = cmd.CombinedOutput(); err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if room, rerr := s.room(); rerr == nil && room < mkfsRoom {
		return errdefs.Exhaustedf("the disk of the image store is full: no room for an empty file system of %s; `cocoon image rm` frees some", human(size))
	}
	return fmt.Errorf("make an empty file system of %s: %w: %s", human(size), err, bytes.TrimSpace(out))
}

// journal returns the size of the journal in MiB. It is small, because what the guest writes there uses the host's disk.
func journal(size int64) string {
	switch {
	case size < 256<<20:
		return "4"
	case size < 4<<30:
		return "16"
	}
	return "32"
}

func (s *Store) findMkfs() (string, error) {
	if s.cfg.Mkfs != "" {
		return s.cfg.Mkfs, nil
	}
	for _, p := range []string{"/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} { // not in an unprivileged user's PATH
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		return "", errdefs.Preconditionf("mkfs.ext4 is missing; it makes the writable disks of VMs; install it with `apt-get install e2fsprogs`")
	}
	return p, nil
}

func orID(img image.Image) string { return cmp.Or(img.Name, img.ID) }

func human(n int64) string {
	v, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, u
	}
	return strconv.FormatFloat(v, 'g', 4, 64) + " " + unit
}
