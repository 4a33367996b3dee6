package block

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/blockdev"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// device is a device that is open exclusively, for reading only: an end of writing would make the host look at what is on it.
type device struct {
	*os.File // its name is that of the device itself, not of a link
	id       blockdev.Identity
	fixed    bool // it cannot be written to
	file     bool // see Config.Files
}

// openDevice opens the device at path, which may be a link to it.
// Errors: DataLoss if it is missing, FailedPrecondition if the host uses it or it is no block device.
func (s *Store) openDevice(path string) (*device, error) {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.DataLossf("its device %s is missing; plug it in, or correct the configuration of the node", path)
	}
	if err != nil {
		return nil, fmt.Errorf("look for its device: %w", err)
	}
	st, err := os.Stat(real)
	if err != nil {
		return nil, fmt.Errorf("look at its device: %w", err)
	}
	isFile := s.cfg.Files && st.Mode().IsRegular()
	if st.Mode()&(fs.ModeDevice|fs.ModeCharDevice) != fs.ModeDevice && !isFile { // opening anything else may have effects
		return nil, errdefs.Preconditionf("%s is not a block device", path)
	}
	f, err := os.OpenFile(real, os.O_RDONLY|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, errdefs.Preconditionf("the host uses its device %s, as a mounted file system or as a part of another device; end that first", path)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENOMEDIUM):
		return nil, errdefs.DataLossf("its device %s is missing; plug it in, or correct the configuration of the node", path)
	case err != nil:
		return nil, fmt.Errorf("open its device: %w", err)
	}
	d := &device{File: f, file: isFile}
	if err := d.identify(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return d, nil
}

// identify sets what identifies d, as it is now.
func (d *device) identify() (err error) {
	if d.file {
		st, err := d.Stat()
		if err == nil {
			d.id = blockdev.Identity{Size: st.Size(), Virtual: d.Name()}
		}
		return err
	}
	if d.id, err = blockdev.Identify(d.File); err != nil {
		return err
	}
	n, err := unix.IoctlGetInt(int(d.Fd()), unix.BLKROGET)
	d.fixed = n != 0
	return err
}

// identified returns the device of e, and opens it if it is not open. It is the one that it was, but may have grown. Preconditions: the
// lock of e is held; the caller calls e.release.
func (s *Store) identified(e *entry) (dev *device, err error) {
	if dev = e.device; dev != nil {
		err = dev.identify()
	} else {
		dev, err = s.openDevice(e.rec.Path)
	}
	if err != nil {
		return nil, err
	}
	if was := e.rec.Device; !dev.id.Same(was) || dev.id.Size < was.Size {
		e.release(dev)
		return nil, errdefs.Preconditionf("%s is another device now (%s) than the one of this volume (%s); plug that one in, or give this one another name in the configuration of the node",
			dev.Name(), dev.id, was)
	}
	return dev, nil
}

// claim is identified for a device that still has its size.
func (s *Store) claim(e *entry) (*device, error) {
	dev, err := s.identified(e)
	if err != nil {
		return nil, err
	}
	if dev.id.Size != e.rec.Device.Size {
		e.release(dev)
		return nil, errdefs.Preconditionf("its device %s had %d bytes and has %d now; if it is still the same one, run `cocoon volume resize %s %d`",
			dev.Name(), e.rec.Device.Size, dev.id.Size, e.rec.Owner.Qualify(e.rec.Name), whole(dev.id.Size))
	}
	return dev, nil
}

// release closes dev, unless e keeps it open. Preconditions: the lock of e is held.
func (e *entry) release(dev *device) {
	if dev != nil && dev != e.device {
		_ = dev.Close()
	}
}

// whole returns the part of a device that a volume has, in bytes.
func whole(size int64) int64 { return size / volume.Block * volume.Block }
