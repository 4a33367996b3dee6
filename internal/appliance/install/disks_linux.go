package install

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/blockdev"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
)

// Disk is a disk on which the system can be installed.
type Disk struct {
	Path   string
	Size   int64 // bytes
	Model  string
	Serial string
	Holds  string // in words; "": it is blank

	name   string // of the kernel
	system bool   // an installed system of ours is on it
}

// candidates returns the disks on which the system can be installed, the blank ones first: at least disk.MinimumSize, neither removable nor read-only, in sectors
// of 512 bytes, not in use, and not own, from which the installer was started. other is one that has an installed system, whatever else is wrong with it; "": none.
func candidates(sysBlock, dev, own string) (all []Disk, others []string, err error) {
	names, err := os.ReadDir(sysBlock)
	if err != nil {
		return nil, nil, fmt.Errorf("list the disks: %w", err)
	}
	for _, n := range names {
		name := n.Name()
		if disk.Virtual(name) || name == own {
			continue
		}
		d, err := look(filepath.Join(sysBlock, name), filepath.Join(dev, name))
		if err != nil { // a reader of cards without one, a disk that is broken
			continue
		}
		d.name = name
		if d.system {
			others = append(others, d.Path)
		}
		if usable(filepath.Join(sysBlock, name), d.Size) {
			all = append(all, d)
		}
	}
	slices.SortStableFunc(all, func(a, b Disk) int { // what cannot hurt comes first
		return boolean(a.Holds != "") - boolean(b.Holds != "")
	})
	return all, others, nil
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// usable reports whether a disk of that folder of the kernel may be an installation's.
func usable(dir string, size int64) bool {
	if number(dir, "removable") != 0 || number(dir, "ro") != 0 || number(dir, "queue/logical_block_size") != disk.SectorSize || size < disk.MinimumSize {
		return false
	}
	users, err := filepath.Glob(filepath.Join(dir, "holders", "*"))
	more, err2 := filepath.Glob(filepath.Join(dir, "*", "holders", "*"))
	return err == nil && err2 == nil && len(users)+len(more) == 0
}

// number reads a number of the kernel; -1 if it says none.
func number(dir, file string) int64 {
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 54)
	if err != nil {
		return -1
	}
	return n
}

// look describes a disk.
func look(dir, device string) (Disk, error) {
	d := Disk{Path: device, Size: number(dir, "size") * disk.SectorSize, Serial: blockdev.Serial(dir)}
	if d.Size <= 0 {
		return d, errdefs.NotFoundf("%s has no size", device)
	}
	model, _ := os.ReadFile(filepath.Join(dir, "device", "model"))
	d.Model = strings.Join(strings.Fields(string(model)), " ")
	f, err := os.Open(filepath.Clean(device))
	if err != nil {
		return d, err
	}
	defer f.Close()
	head, tail := make([]byte, min(signature.Window, d.Size)), make([]byte, min(signature.Window, d.Size))
	_, err1 := f.ReadAt(head, 0)
	_, err2 := f.ReadAt(tail, d.Size-int64(len(tail)))
	if err := errors.Join(notEnd(err1), notEnd(err2)); err != nil {
		return d, fmt.Errorf("read %s: %w", device, err)
	}
	if kind := signature.Identify(head, tail); kind != signature.Blank {
		d.Holds = string(kind)
	}
	if id, _, err := disk.ReadTable(bytes.NewReader(head)); err == nil && id == disk.Signature {
		d.Holds, d.system = "an installed Cocoon OS", true
	}
	return d, nil
}

func notEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
