package jail

import (
	"fmt"
	"os"
	"slices"

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
	st, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", l.h.PID, path)) // the process cannot change what is there
	switch {
	case err != nil:
		return l.Named(l.OrEnded(errdefs.Unavailablef("look at disk %s: %w", serial, err)))
	case st.Mode().IsRegular() && st.Size() > size:
		return errdefs.Invalidf("disk %s of VM %s has %d bytes, more than %d", serial, l.h.ID, st.Size(), size)
	}
	return nil
}
