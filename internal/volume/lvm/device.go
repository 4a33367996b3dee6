package lvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// claim makes sure that the volume e has a device, and that the store has it open exclusively. Its record follows a logical volume that
// has grown. Preconditions: the lock of e is held.
// Errors: DataLoss if the logical volume is missing, FailedPrecondition if the host uses its device.
func (s *Store) claim(ctx context.Context, e *entry[volume.Volume]) error {
	device := e.Own.file
	if device == nil {
		var err error
		if device, err = s.activate(ctx, e.Rec.LV); err != nil {
			return err
		}
	}
	size, err := device.Seek(0, io.SeekEnd)
	if err == nil {
		err = s.sized(e, size)
	} else {
		err = fmt.Errorf("measure %s: %w", device.Name(), err)
	}
	if err != nil && e.Own.file == nil {
		device.Close()
	}
	if err == nil {
		s.volumes.keep(e, device)
	}
	return err
}

// activate gives a logical volume a device, unless it has one, and opens that.
func (s *Store) activate(ctx context.Context, lv string) (*os.File, error) {
	if _, _, err := s.kernel.thin(deviceName(s.vg, lv)); errors.Is(err, errNoDevice) {
		if _, err := s.lvm.run(ctx, "lvchange", "-y", "-ay", "-K", s.vg+"/"+lv); err != nil {
			return nil, s.missing(ctx, lv, err)
		}
	}
	return s.openDevice(lv, os.O_RDONLY)
}

// missing returns err, or DataLoss if the logical volume is gone.
func (s *Store) missing(ctx context.Context, lv string, err error) error {
	if all, _, rerr := s.report(ctx); rerr == nil {
		if _, there := all[lv]; !there {
			return errdefs.DataLossf("its logical volume %s/%s is missing; restore it", s.vg, lv)
		}
	}
	return err
}

// deactivate removes the device of a logical volume.
func (s *Store) deactivate(ctx context.Context, lv string) error {
	_, err := s.lvm.run(ctx, "lvchange", "-y", "-an", s.vg+"/"+lv)
	return err
}

// close ends the store's use of the device of e, which stays. Preconditions: the lock of e is held.
func (s *Store) close(e *entry[volume.Volume]) {
	if e.Own.file != nil {
		e.Own.file.Close()
		s.volumes.keep(e, nil)
	}
}

// openDevice opens the device of a logical volume exclusively. It is the one that the kernel has for it, whatever is in /dev.
// Errors: FailedPrecondition if the host uses it.
func (s *Store) openDevice(lv string, flag int) (*os.File, error) {
	name := deviceName(s.vg, lv)
	path, err := filepath.EvalSymlinks(filepath.Join(filepath.Dir(control), name))
	if err != nil {
		return nil, fmt.Errorf("look for the device of logical volume %s/%s: %w", s.vg, lv, err)
	}
	dev, _, err := s.kernel.thin(name)
	if err != nil {
		return nil, fmt.Errorf("look for the device of logical volume %s/%s: %w", s.vg, lv, err)
	}
	var st unix.Stat_t
	is := func() bool { return st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == dev }
	if err := unix.Lstat(path, &st); err != nil || !is() { // opening anything else may have effects
		return nil, errors.Join(err, errdefs.Preconditionf("%s is not the device of logical volume %s/%s", path, s.vg, lv))
	}
	f, err := os.OpenFile(path, flag|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil, errdefs.Preconditionf("the host uses its device %s, as a mounted file system or as a part of another device; end that first", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open its device: %w", err)
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || !is() {
		return nil, errors.Join(err, errdefs.Preconditionf("%s is not the device of logical volume %s/%s", path, s.vg, lv), f.Close())
	}
	return f, nil
}

// allocated returns the bytes that the logical volume of an object occupies: as the kernel knows, else as recorded.
func (s *Store) allocated(st state) int64 {
	if _, n, err := s.kernel.thin(deviceName(s.vg, st.LV)); err == nil {
		return n
	}
	return st.Allocated
}
