// Package blockdev says which block device it is that somebody has opened, by what the kernel knows of it.
//
// It never reads what is on a device.
package blockdev

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Identity tells devices apart whose numbers and names have changed. Texts are "" if the kernel knows none.
type Identity struct {
	Size      int64  `json:"size"`                // bytes
	Serial    string `json:"serial,omitempty"`    // of the disk
	WWID      string `json:"wwid,omitempty"`      // of the disk, unique in the world
	Virtual   string `json:"virtual,omitempty"`   // of a device that the kernel makes of others: its UUID, or the file behind it
	Partition string `json:"partition,omitempty"` // its number and first sector; "" for a whole disk
}

// String describes i for messages.
func (i Identity) String() string {
	parts := []string{fmt.Sprintf("%d bytes", i.Size)}
	for _, p := range []struct{ name, text string }{{"serial", i.Serial}, {"WWID", i.WWID}, {"UUID or file", i.Virtual}, {"partition", i.Partition}} {
		if p.text != "" {
			parts = append(parts, fmt.Sprintf("%s %q", p.name, p.text))
		}
	}
	return strings.Join(parts, ", ")
}

// Same reports whether i and other are the same device, which may have another size now.
func (i Identity) Same(other Identity) bool {
	i.Size, other.Size = 0, 0
	return i == other
}

const sysfs = "/sys/dev/block"

// Identify returns the identity of the open block device f. It moves the offset of f.
// Errors: InvalidArgument if f is something else.
func Identify(f *os.File) (Identity, error) { return identify(sysfs, f) }

func identify(sys string, f *os.File) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Identity{}, fmt.Errorf("look at %s: %w", f.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Identity{}, errdefs.Invalidf("%s is not a block device", f.Name())
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return Identity{}, fmt.Errorf("measure %s: %w", f.Name(), err)
	}
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))))
	if err != nil {
		return Identity{}, fmt.Errorf("look for %s in sysfs: %w", f.Name(), err)
	}
	i := read(dir)
	i.Size = size
	return i, nil
}

// read returns what the folder of a device in sysfs says.
func read(dir string) Identity {
	var i Identity
	if n := text(dir, "partition"); n != "" {
		i.Partition, dir = n+" at "+text(dir, "start"), filepath.Dir(dir)
	}
	i.Serial = Serial(dir)
	i.WWID = first(dir, "wwid", "device/wwid")
	i.Virtual = first(dir, "dm/uuid", "md/uuid", "loop/backing_file")
	return i
}

// pageHeader is the length of the header of a SCSI disk's page with its serial, in bytes.
const pageHeader = 4

// Serial returns the serial of a disk, given its folder in sysfs; "" if it has none.
func Serial(dir string) string {
	if serial := first(dir, "serial", "device/serial"); serial != "" {
		return serial
	}
	page := text(dir, "device/vpd_pg80") // of a SCSI disk
	if len(page) < pageHeader {
		return ""
	}
	return strings.TrimSpace(page[pageHeader:])
}

func first(dir string, files ...string) string {
	for _, f := range files {
		if s := strings.TrimSpace(text(dir, f)); s != "" {
			return s
		}
	}
	return ""
}

// maxText is the most that is read of a file in sysfs, whose content may come from a device, in bytes.
const maxText = 4096

func text(dir, file string) string {
	f, err := os.Open(filepath.Join(dir, file))
	if err != nil {
		return "" // most devices have only some of them
	}
	defer f.Close()
	s, err := io.ReadAll(io.LimitReader(f, maxText))
	if err != nil && !errors.Is(err, io.EOF) {
		return ""
	}
	return strings.ToValidUTF8(strings.TrimRight(string(s), "\x00\n"), "?")
}
