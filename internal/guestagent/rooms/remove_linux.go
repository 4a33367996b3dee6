package rooms

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
)

// writtenFiles is the folder of the writable disk with what was written in rooms. Preconditions: there is such a disk.
func (k *Keeper) writtenFiles() string {
	return fmt.Sprintf("/proc/self/fd/%d/containers", k.disk.Fd())
}

// Clear deletes what was written in rooms of an earlier boot. No room may have been made.
func (k *Keeper) Clear() error {
	if k.disk == nil {
		return nil
	}
	if err := os.RemoveAll(k.writtenFiles()); err != nil {
		return fmt.Errorf("delete the files of containers of an earlier boot: %w", err)
	}
	return nil
}

// Remove forgets the room called name and deletes what was written in it. Nothing may run in it any more. It is idempotent.
func (k *Keeper) Remove(name string) error {
	k.mu.Lock()
	r := k.rooms[name]
	delete(k.rooms, name)
	k.mu.Unlock()
	if r != nil && r.ns != nil {
		if err := r.ns.Close(); err != nil { // its mounts go with their namespace
			return err
		}
	} else if r != nil {
		_ = unix.Unmount(path.Join(stagePath, "r", name), unix.MNT_DETACH)
	}
	// The server of a shared folder keeps files open that the kernel of the guest remembers. Errors only keep them open for longer.
	_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0)
	if k.disk == nil || name == "" {
		return nil
	}
	if err := os.RemoveAll(path.Join(k.writtenFiles(), name)); err != nil {
		return fmt.Errorf("delete the files of container %s: %w", name, err)
	}
	return nil
}

// How long a disk may be in use after the last room that used it was removed, and how often that is looked at: the kernel unmounts
// a moment later.
const (
	releaseLimit = 10 * time.Second
	releasePause = 5 * time.Millisecond
)

// Release waits until no room uses the disks with these serials, and makes the kernel forget them. It is idempotent.
func (k *Keeper) Release(ctx context.Context, serials []string) error {
	if len(serials) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	disks, err := boot.Disks()
	if err != nil {
		return err
	}
	for _, serial := range serials {
		dev, ok := disks[serial]
		if !ok {
			continue
		}
		if err := unused(ctx, dev); err != nil {
			return fmt.Errorf("disk %s: %w", serial, err)
		}
		if err := boot.Forget(dev); err != nil {
			return fmt.Errorf("forget disk %s: %w", serial, err)
		}
	}
	return nil
}

// unused waits until no file system on the disk dev is mounted.
func unused(ctx context.Context, dev string) error {
	tick := time.NewTicker(releasePause)
	defer tick.Stop()
	for {
		fd, err := unix.Open(dev, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			return unix.Close(fd)
		}
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("look whether it is in use: %w", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errdefs.Unavailablef("it is still in use; a program that has left its container may use it")
		}
	}
}
