package jail

import (
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Drive is a disk of a guest, in the handle of a process with a root of its own.
type Drive struct {
	Serial   string `json:"serial,omitempty"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// Drives returns the disks as a handle has them.
func Drives(disks []vm.Disk) (out []Drive) {
	for _, d := range disks {
		out = append(out, Drive{d.Serial, d.ReadOnly})
	}
	return out
}

// ToGrow finds the disk that is to have size bytes among disks. path says where a disk is in the root of the process.
// Errors: those of hypervisor.DiskGrower.
func (l *Life) ToGrow(disks []Drive, path func(n int) string, serial string, size int64) (int, error) {
	if err := l.Alive(); err != nil {
		return 0, err
	}
	n := slices.IndexFunc(disks, func(d Drive) bool { return d.Serial == serial && serial != "" })
	if n < 0 || disks[n].ReadOnly {
		return 0, errdefs.Invalidf("VM %s has no disk %q that can be written to", l.h.ID, serial)
	}
	return n, l.CanGrow(path(n), serial, size)
}

// CanGrow refuses a disk that can be written to, at a path in the root of the process, if it is larger than size.
// Errors: those of hypervisor.DiskGrower.
func (l *Life) CanGrow(path, serial string, size int64) error {
	var st unix.Stat_t
	folder, err := l.Proc.Folder(filepath.Dir(path))
	if err == nil {
		defer folder.Close()
		err = unix.Fstatat(int(folder.Fd()), filepath.Base(path), &st, unix.AT_SYMLINK_NOFOLLOW)
	}
	kind := st.Mode & unix.S_IFMT
	switch {
	case err != nil:
		return l.Named(l.OrEnded(errdefs.Unavailablef("look at disk %s: %w", serial, err)))
	case kind != unix.S_IFREG && kind != unix.S_IFBLK: // the process has made it
		return l.Named(errdefs.Unavailablef("disk %s is neither a file nor a block device", serial))
	case kind == unix.S_IFREG && st.Size > size:
		return errdefs.Invalidf("disk %s of VM %s has %d bytes, more than %d", serial, l.h.ID, st.Size, size)
	}
	return nil
}
