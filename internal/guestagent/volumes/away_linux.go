package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file unmounts a folder of the host and mounts it again later, when it may be a folder of another host.

// Away is a folder of the host that is mounted nowhere.
type Away struct {
	keeper *Keeper
	volume vm.Volume
	mounts []lifted // those that are to be made again, the last one first
}

// TakeAway unmounts a folder of the host in all of places. Those of ended are not mounted again. A guest without the volume has none to unmount.
// Errors: FailedPrecondition while a program uses it; then it is mounted as before.
func (k *Keeper) TakeAway(ctx context.Context, volume string, places, ended []Place) (*Away, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v, ok := k.volumes[volume]
	if !ok || v.Kind != vm.VolumeDir || k.vault == nil {
		return nil, errdefs.Preconditionf("the guest has no folder of its host with the name %s", volume)
	}
	a := &Away{keeper: k, volume: v}
	dev, err := k.deviceOf(v)
	if err != nil {
		return nil, err
	}
	if err := whole(dev, places); err != nil {
		return nil, err
	}
	past, err := liftAll(dev, ended)
	if err == nil {
		a.mounts, err = liftAll(dev, places)
	}
	if err == nil {
		err = k.staged(func() error { return unix.Unmount(k.top(v), unix.UMOUNT_NOFOLLOW) })
	}
	if err == nil {
		if err = hidden(dev); err == nil {
			return a, nil
		}
		err = errors.Join(err, k.remount(ctx, v))
	}
	a.mounts = append(past, a.mounts...)
	return nil, errors.Join(err, a.putBack(ctx))
}

// whole returns a FailedPrecondition error if a mount of the file system with that device cannot be made again, because what it shows has been
// deleted.
func whole(dev string, places []Place) error {
	proc, err := os.OpenFile("/proc", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer proc.Close()
	for _, p := range places {
		err := p.Enter(func() error {
			lines, err := mountsOf(proc, dev)
			for _, l := range lines {
				if strings.HasSuffix(l.of, deleted) {
					return inUse(fmt.Sprintf("the file or folder of the host that is mounted at %s has been deleted", l.at))
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// deleted ends how the kernel shows the root of a mount that has been deleted.
const deleted = "//deleted"

// deviceOf returns the device of the file system of v. Preconditions: mu is held.
func (k *Keeper) deviceOf(v vm.Volume) (dev string, err error) {
	err = k.staged(func() error {
		root, err := os.OpenFile(k.top(v), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer root.Close()
		dev, err = deviceOf(root)
		return err
	})
	return dev, err
}

// hidden returns a FailedPrecondition error if a program has mounted the file system with that device where only that program sees it.
func hidden(dev string) error {
	all, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, file := range all {
		ns, err := os.Readlink(filepath.Join(filepath.Dir(file), "ns/mnt"))
		if err != nil || seen[ns] { // the process has ended, or another one has shown these mounts
			continue
		}
		seen[ns] = true
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if lines := parseMounts(string(text), dev); len(lines) > 0 {
			name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm"))
			return inUse(fmt.Sprintf("the program %s has it mounted at %s where only that program sees it", strings.TrimSpace(string(name)), lines[0].at))
		}
	}
	return nil
}

// mountPause is the time between two attempts to mount a folder whose device may just have been plugged.
const mountPause = 5 * time.Millisecond

// remount mounts the folder of v in the stage. Preconditions: mu is held.
func (k *Keeper) remount(ctx context.Context, v vm.Volume) error {
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	for {
		err := k.staged(func() error { return mountHostDir(v, k.top(v)) })
		if !errdefs.IsUnavailable(err) {
			return err
		}
		select {
		case <-time.After(mountPause):
		case <-ctx.Done():
			return err
		}
	}
}

// Return waits until the host shares the folder, and mounts it where it was. After an error it may be called again.
// Errors: Unavailable if the host shares none.
func (a *Away) Return(ctx context.Context) error {
	k := a.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	mounted := false
	err := k.staged(func() (err error) {
		mounted, err = proc.Mounted(k.top(a.volume))
		return err
	})
	if err == nil && !mounted {
		err = k.remount(ctx, a.volume)
	}
	if err != nil {
		return err
	}
	return a.putBack(ctx)
}

// putBack makes the mounts again. Preconditions: the keeper's mu is held.
func (a *Away) putBack(ctx context.Context) error {
	for len(a.mounts) > 0 {
		last := len(a.mounts) - 1
		if err := a.keeper.putBack(ctx, a.volume, a.mounts[last:]); err != nil {
			return err
		}
		a.mounts = a.mounts[:last]
	}
	return nil
}
