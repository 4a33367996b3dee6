package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits for the values of a record.
const (
	maxRecord = 16 << 20 // bytes of snapshot.json
	maxDisks  = 256
	maxLayers = 1024 // of one disk
	maxNICs   = 64
	maxCPUs   = 4096
	maxState  = 4 << 30  // bytes of vmstate
	maxBytes  = 64 << 40 // of memory or a disk
)

var (
	nameRE  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,126}$`)
	layerRE = regexp.MustCompile(`^disk-[0-9]{1,3}\.[0-9]{1,4}\.(qcow2|raw)$`)
)

func checkName(name string) error {
	switch {
	case name == "":
		return errdefs.Invalidf("a snapshot needs a name")
	case !nameRE.MatchString(name):
		return errdefs.Invalidf("snapshot name %.200q must start with a letter or digit and hold only letters, digits, '.', '_', '-' and ':', at most 127 in all", name)
	}
	return nil
}

// parse reads the record of a snapshot and validates it.
// Errors: InvalidArgument.
func parse(data []byte) (snapshot.Snapshot, error) {
	var s snapshot.Snapshot
	if err := json.Unmarshal(data, &s); err != nil {
		return snapshot.Snapshot{}, errdefs.Invalidf("the record of the snapshot cannot be read: %w", err)
	}
	if !vm.ID(s.ID).Valid() {
		return snapshot.Snapshot{}, errdefs.Invalidf("the record of the snapshot has the invalid id %.100q", s.ID)
	}
	if err := checkName(s.Name); err != nil {
		return snapshot.Snapshot{}, err
	}
	return s, check(s)
}

// check validates what a record says about the guest and its files.
// Errors: InvalidArgument.
func check(s snapshot.Snapshot) error {
	bad := func(what string, n int64) error {
		return errdefs.Invalidf("snapshot %s: its record is invalid: it has %d %s", name(s), n, what)
	}
	switch {
	case s.CPU < 0 || s.CPU > maxCPUs:
		return bad("CPUs", int64(s.CPU))
	case s.Memory < 0 || s.Memory > maxBytes || s.Live && s.Memory == 0:
		return bad("bytes of memory", s.Memory)
	case s.Storage < 0 || s.Storage > maxBytes:
		return bad("bytes of storage", s.Storage)
	case s.NICs < 0 || s.NICs > maxNICs || len(s.NIC) > maxNICs:
		return bad("network interfaces", int64(max(s.NICs, len(s.NIC))))
	case s.MemoryBase != "" && (!vm.ID(s.MemoryBase).Valid() || !s.Live):
		return errdefs.Invalidf("snapshot %s: its memory cannot be based on that of %.100q", name(s), s.MemoryBase)
	case s.Size < 0 || s.Pause < 0:
		return bad("bytes, or a negative pause", s.Size)
	case len(s.Disks) > maxDisks:
		return bad("disks", int64(len(s.Disks)))
	}
	seen := map[string]bool{}
	for n, d := range s.Disks {
		if err := checkDisk(d, seen); err != nil {
			return fmt.Errorf("snapshot %s: disk %d: %w", name(s), n, err)
		}
	}
	return nil
}

func checkDisk(d snapshot.Disk, seen map[string]bool) error {
	switch {
	case d.Size < 0 || d.Size > maxBytes:
		return errdefs.Invalidf("a size of %d bytes is not possible", d.Size)
	case len(d.Serial) > 20:
		return errdefs.Invalidf("its serial %.100q is longer than 20 bytes", d.Serial)
	case !slices.Contains([]vm.DiskRole{vm.RoleLayer, vm.RoleCOW, vm.RoleCidat, vm.RoleData}, d.Role):
		return errdefs.Invalidf("its role %.100q is unknown", d.Role)
	case len(d.Layers) > maxLayers:
		return errdefs.Invalidf("it has %d layers; at most %d are possible", len(d.Layers), maxLayers)
	case len(d.Layers) == 0 && !d.Image:
		return errdefs.Invalidf("it has no layers and is not a disk of the image")
	}
	for n, l := range d.Layers {
		switch {
		case !layerRE.MatchString(l.File):
			return errdefs.Invalidf("a layer has the invalid name %.100q; use disk-<disk>.<layer>.<format>", l.File)
		case seen[l.File]:
			return errdefs.Invalidf("layer %s is named twice", l.File)
		case l.Format != vm.DiskRaw && l.Format != vm.DiskQCOW2 || filepath.Ext(l.File) != "."+string(l.Format):
			return errdefs.Invalidf("layer %s has the unsupported format %.100q", l.File, l.Format)
		case l.Format == vm.DiskRaw && (n > 0 || d.Image):
			return errdefs.Invalidf("layer %s is raw and cannot be based on another layer", l.File)
		}
		seen[l.File] = true
	}
	return nil
}

// checkSize validates the size in bytes of a file of the snapshot s.
func checkSize(s snapshot.Snapshot, file string, size int64) error {
	limit, exact := int64(maxBytes), false
	switch file {
	case snapshot.FileState:
		limit = maxState + s.Plugged()
	case snapshot.FileMemory:
		limit = s.Memory
		if exact = s.MemoryBase != ""; exact {
			limit = sparse.DeltaSize(s.Memory - s.Plugged())
		}
	case snapshot.FileBase:
		limit, exact = s.Memory-s.Plugged(), true
	}
	if size < 0 || size > limit || exact && size != limit {
		return errdefs.Invalidf("snapshot %s: %s has %d bytes, but its record allows %d", name(s), file, size, limit)
	}
	return nil
}

// checkFiles validates that a folder has the files of the record, that they are plain files, and that unknown layers
// are safe to give to a hypervisor. It only checks that known layers exist.
// Errors: DataLoss for missing files, InvalidArgument.
func checkFiles(dir string, s snapshot.Snapshot, known map[string]bool) error {
	for _, file := range s.Files() {
		info, err := os.Lstat(filepath.Join(dir, file))
		if errors.Is(err, fs.ErrNotExist) {
			return errdefs.DataLossf("snapshot %s lacks its file %s", name(s), file)
		}
		if err != nil {
			return fmt.Errorf("look at snapshot %s: %w", name(s), err)
		}
		if !info.Mode().IsRegular() {
			return errdefs.Invalidf("snapshot %s: %s is not a regular file: refused", name(s), file)
		}
		if err := checkSize(s, file, info.Size()); err != nil {
			return err
		}
	}
	if s.Live && s.MemoryBase != "" { // the delta must belong to its base
		f, err := openFile(dir, s, snapshot.FileMemory)
		if err != nil {
			return fmt.Errorf("snapshot %s: %w", name(s), err)
		}
		_ = f.Close()
	}
	for _, d := range s.Disks {
		for n, l := range d.Layers {
			if known[l.File] {
				continue
			}
			if err := checkLayer(filepath.Join(dir, l.File), d, l.Format, n == len(d.Layers)-1); err != nil {
				return fmt.Errorf("snapshot %s: %s: %w", name(s), l.File, err)
			}
		}
	}
	return nil
}

// checkLayer validates the content of a layer's file.
func checkLayer(path string, d snapshot.Disk, format vm.DiskFormat, top bool) error {
	f, err := openPlain(path)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := virtualSize(f, format, true)
	if err != nil {
		return err
	}
	if d.Size > 0 && (size > d.Size || top && size != d.Size) {
		return errdefs.Invalidf("it holds a disk of %d bytes, but the record says %d", size, d.Size)
	}
	return nil
}

// virtualSize returns the size in bytes that a guest sees of an open image; with tables, it also validates all of the
// image's tables.
func virtualSize(f *os.File, format vm.DiskFormat, tables bool) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if format != vm.DiskQCOW2 {
		return info.Size(), nil
	}
	h, err := qcow2.ReadLayer(f, info.Size())
	if err != nil {
		return 0, err
	}
	if tables {
		err = h.Check(f, info.Size())
	}
	return h.VirtualSize, err
}

// openPlain opens a plain file for reading; it refuses links and pipes.
func openPlain(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, errdefs.Invalidf("%s is a symbolic link: refused", path)
	}
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, errors.Join(err, errdefs.Invalidf("%s is not a regular file: refused", path))
	}
	return f, nil
}

// readBounded reads a plain file that may be untrusted.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := openPlain(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = errdefs.Invalidf("%s has more than %d bytes: refused", path, limit)
	}
	return data, err
}
