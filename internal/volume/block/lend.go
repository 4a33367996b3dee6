package block

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Lend makes a volume, with the owner and the name, of a device that another program has put at path, such as a CSI driver. The volume
// stays until Return, also while the device is missing. When the device has come back, which may be another one for the kernel, Lend
// must be called again: the caller says that it is the same disk.
// Errors: InvalidArgument for an invalid name or path, AlreadyExists if another volume has the name, FailedPrecondition if path is no
// block device or the host uses it, or if a running VM has another device of this name.
func (s *Store) Lend(ctx context.Context, owner vm.Owner, spec volume.Spec, path string) (volume.Volume, error) {
	v, err := s.lend(ctx, owner, spec, path)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("make a volume of device %s: %w", path, record.Full(err))
	}
	return v, nil
}

func (s *Store) lend(ctx context.Context, owner vm.Owner, spec volume.Spec, path string) (volume.Volume, error) {
	if err := vm.Volumes.ValidateName(spec.Name); err != nil {
		return volume.Volume{}, err
	}
	if err := volume.ValidateLabels(spec.Labels); err != nil {
		return volume.Volume{}, err
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return volume.Volume{}, errdefs.Invalidf("the device %q must be an absolute path", path)
	}
	e, release, err := s.lent(ctx, owner, spec.Name)
	if errdefs.IsNotFound(err) {
		return s.add(owner, spec, path, true)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	return s.lendAgain(e, path)
}

// lendAgain takes the device at path for the volume e. Preconditions: the lock of e is held.
func (s *Store) lendAgain(e *entry, path string) (volume.Volume, error) {
	if e.device != nil { // a VM has it, so it is the one that it was
		return e.rec.Clone(), nil
	}
	dev, err := s.openDevice(path)
	if err != nil {
		return volume.Volume{}, err
	}
	defer dev.Close()
	size := whole(dev.id.Size)
	if size < e.rec.Size {
		return volume.Volume{}, errdefs.Preconditionf("%s has %d bytes, and the volume had %d; it is another device", path, size, e.rec.Size)
	}
	next := e.rec.clone()
	next.Path, next.Device, next.Size, next.Boot = path, dev.id, size, s.boot
	return s.save(e, next, nil)
}

// Lent returns a volume that Lend has made. here: it was lent since the machine started, so a VM can have it. Errors: NotFound.
func (s *Store) Lent(ctx context.Context, owner vm.Owner, name string) (v volume.Volume, here bool, err error) {
	e, release, err := s.lent(ctx, owner, name)
	if err != nil {
		return v, false, err
	}
	defer release()
	return e.rec.Clone(), !s.lostSince(e), nil
}

// Measure returns the size that the device of a lent volume has now, of which a volume can have whole blocks only, in bytes.
// Errors: NotFound; FailedPrecondition if it is another device, or a smaller one.
func (s *Store) Measure(ctx context.Context, owner vm.Owner, name string) (int64, error) {
	e, release, err := s.lent(ctx, owner, name)
	if err != nil {
		return 0, err
	}
	defer release()
	dev, err := s.identified(e)
	if err != nil {
		return 0, fmt.Errorf("measure the device of volume %s: %w", owner.Qualify(name), err)
	}
	defer e.release(dev)
	return whole(dev.id.Size), nil
}

// Withdraw closes the device of a lent volume, which may then go away. The volume stays, and no VM gets it until Lend is called again, as
// after a boot of the machine. It is no error if there is no such volume. Preconditions: no VM that has the volume runs.
func (s *Store) Withdraw(ctx context.Context, owner vm.Owner, name string) error {
	e, release, err := s.lent(ctx, owner, name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err == nil {
		defer release()
		next, dev := e.rec.clone(), e.device
		next.Boot = ""
		if _, err = s.save(e, next, nil); err == nil {
			e.release(dev)
		}
	}
	if err != nil {
		return fmt.Errorf("withdraw the device of volume %s: %w", owner.Qualify(name), record.Full(err))
	}
	return nil
}

// Return ends what Lend has made. The device may then go away. It is no error if there is no such volume.
// Errors: FailedPrecondition while a VM has it.
func (s *Store) Return(ctx context.Context, owner vm.Owner, name string) error {
	e, release, err := s.lent(ctx, owner, name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("give back the device of volume %s: %w", owner.Qualify(name), err)
	}
	defer release()
	if a := e.rec.Attachments; len(a) > 0 {
		return errdefs.Preconditionf("volume %s is attached to VM %s; remove that VM or detach the volume first", owner.Qualify(name), a[0].VM)
	}
	if err := os.Remove(s.file(e.id)); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("give back the device of volume %s: %w", owner.Qualify(name), err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, e.id)
	return nil
}

// lostSince reports whether e is a device that was lent before the machine started: it must be lent again, even if its path leads to a
// device that looks the same.
func (s *Store) lostSince(e *entry) bool { return e.rec.Lent && e.rec.Boot != s.boot }

// lent finds the volume of a device that Lend has made, and keeps others from changing it until release.
// Errors: NotFound, AlreadyExists if a device of the configuration has the name.
func (s *Store) lent(ctx context.Context, owner vm.Owner, name string) (e *entry, release func(), err error) {
	e, release, err = s.hold(vm.OnBehalf(ctx, owner), owner.Qualify(name))
	if err != nil {
		return nil, nil, err
	}
	if !e.rec.Lent || e.rec.Name != name {
		release()
		return nil, nil, vm.Volumes.Taken(owner.Qualify(name))
	}
	return e, release, nil
}
