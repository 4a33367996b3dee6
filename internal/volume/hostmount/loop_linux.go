package hostmount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file makes disks of the files and devices of volumes. Devices get a loop device, too: the store has them open exclusively, so that
// nothing of the host uses them by mistake.

// backing is the open file or device of a volume.
type backing struct {
	*os.File
	readOnly bool
	stat     unix.Stat_t
}

// openBacking opens the disk d, to write unless it is read-only.
// Errors: DataLoss if it is gone, FailedPrecondition if it is something else.
func openBacking(d vm.Disk) (*backing, error) {
	flag := os.O_RDWR
	if d.ReadOnly {
		flag = os.O_RDONLY
	}
	f, err := os.OpenFile(d.Path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.DataLossf("the disk is gone: %w", err)
	}
	if err != nil {
		return nil, err
	}
	b := &backing{File: f, readOnly: d.ReadOnly}
	want := uint32(unix.S_IFREG)
	if d.Device {
		want = unix.S_IFBLK
	}
	err = unix.Fstat(int(f.Fd()), &b.stat)
	if err == nil && b.stat.Mode&unix.S_IFMT != want {
		err = errdefs.Preconditionf("it is not a file or device as the store says")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return b, nil
}

// behind reports whether l is a loop device of b.
func (b *backing) behind(l loopDevice) bool {
	if b.stat.Mode&unix.S_IFMT == unix.S_IFBLK {
		return l.info.Rdevice == b.stat.Rdev
	}
	return l.info.Device == b.stat.Dev && l.info.Inode == b.stat.Ino
}

// The bytes of a disk that QEMU locks, all of them shared: one for each right that it has, and one for each that it does not leave to others. Who
// wants a right looks for locks on the byte by which others keep it.
const (
	lockHas, lockKeeps = 100, 200

	rightRead   = 0
	rightWrite  = 1
	rightResize = 3
)

// claim locks b as a hypervisor would, so that none opens the disk in a way that the mount does not allow. The loop device holds the open
// file, and with it the locks, for as long as it exists, also after this process has ended.
// Errors: FailedPrecondition if a hypervisor of this host has the disk. The attachment in the store forbids that already.
func (b *backing) claim() error {
	mine, others := []int64{lockHas + rightRead, lockKeeps + rightWrite, lockKeeps + rightResize}, []int64{lockHas + rightWrite, lockHas + rightResize, lockKeeps + rightRead}
	if !b.readOnly {
		mine = append(mine, lockHas+rightWrite, lockHas+rightResize)
		others = append(others, lockHas+rightRead, lockKeeps+rightWrite, lockKeeps+rightResize)
	}
	for _, at := range mine { // first, so that of two that do this at once, at least one sees the other
		if err := unix.FcntlFlock(b.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: at, Len: 1}); err != nil {
			return fmt.Errorf("lock it: %w", err)
		}
	}
	for _, at := range others {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
		if err := unix.FcntlFlock(b.Fd(), unix.F_OFD_GETLK, &l); err != nil {
			return fmt.Errorf("look for locks of hypervisors: %w", err)
		}
		if l.Type != unix.F_UNLCK {
			return errdefs.Preconditionf("a running VM has it; stop that VM, or detach the volume there first")
		}
	}
	return nil
}

// attempts is how often a free loop device is asked for, since others may take it first.
const attempts = 64

// loop makes a loop device of b with a mark. The kernel removes it when nobody has it open and nothing has it mounted.
func (b *backing) loop(mark string) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "loop devices are needed to mount volumes; load the module with `modprobe loop`: %w", err)
	}
	defer control.Close()
	cfg := unix.LoopConfig{Fd: uint32(b.Fd())}
	cfg.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	flag := os.O_RDWR
	if b.readOnly {
		cfg.Info.Flags |= unix.LO_FLAGS_READ_ONLY
		flag = os.O_RDONLY
	}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], mark)
	for range attempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("ask for a loop device: %w", err)
		}
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), flag, 0)
		if err != nil {
			return nil, err
		}
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), &cfg); err == nil {
			held, err := os.Open(loop.Name()) // to hold the device, without the right to write
			return held, errors.Join(err, loop.Close())
		}
		if err = errors.Join(err, loop.Close()); !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("make a loop device: %w", err)
		}
	}
	return nil, errdefs.New(errdefs.ResourceExhausted, "no loop device is free; other programs take them at once")
}

// loopDevice is a loop device in use.
type loopDevice struct {
	path     string // /dev/loopN
	device   string // MAJOR:MINOR
	file     string // behind it, as the kernel shows it
	mark     string // "" if it is not ours
	readOnly bool
	info     unix.LoopInfo64
}

// owner describes the user of a loop device for messages.
func (l loopDevice) owner() string {
	if l.mark != "" {
		return ", where it is mounted for a container"
	}
	return ""
}

// loops returns all loop devices in use.
func loops() ([]loopDevice, error) {
	dirs, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, err
	}
	var out []loopDevice
	for _, dir := range dirs {
		l, err := readLoop(filepath.Dir(dir))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) { // it was released meanwhile
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list loop devices: %w", err)
		}
		out = append(out, l)
	}
	return out, nil
}

// readLoop returns the loop device with that folder in /sys.
func readLoop(sys string) (l loopDevice, err error) {
	l.path = "/dev/" + filepath.Base(sys)
	text := func(name string) (s string) {
		if err == nil {
			var b []byte
			b, err = os.ReadFile(filepath.Join(sys, name))
			s = strings.TrimRight(string(b), "\n")
		}
		return s
	}
	l.device, l.file = text("dev"), text("loop/backing_file")
	if err != nil {
		return l, err
	}
	f, err := os.Open(l.path)
	if err != nil {
		return l, err
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return l, err
	}
	l.info, l.readOnly = *info, info.Flags&unix.LO_FLAGS_READ_ONLY != 0
	if mark := unix.ByteSliceToString(info.File_name[:]); strings.HasPrefix(mark, markPrefix) {
		l.mark = mark
	}
	return l, nil
}

// release frees a loop device that nothing has mounted. Preconditions: it has our mark.
// Errors: Unavailable while a program has it open, such as the check of a process that was killed.
func (l loopDevice) release() error {
	f, err := os.Open(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	now, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err == nil && now.File_name == l.info.File_name && now.Inode == l.info.Inode {
		err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	}
	err = errors.Join(err, f.Close())
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("release %s: %w", l.path, err)
	}
	if now, err := readLoop("/sys/block/" + filepath.Base(l.path)); err == nil && now.mark == l.mark {
		return errdefs.Unavailablef("%s is still in use by an earlier attempt, such as a check of its file system, or in the mount namespace of a container; try again later", l.path)
	}
	return nil
}

// awaitRelease waits until no loop device with that mark exists.
// Errors: FailedPrecondition if one stays in use.
func awaitRelease(ctx context.Context, mark string) error {
	const pause = 20 * time.Millisecond // the kernel releases most of them before it returns from unmounting
	limit := time.After(releaseLimit)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		all, err := loops()
		if err != nil {
			return err
		}
		var busy *loopDevice
		for i := range all {
			if all[i].mark == mark {
				busy = &all[i]
			}
		}
		if busy == nil {
			return nil
		}
		if err := busy.release(); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-limit:
			return errdefs.Preconditionf("%s is still in use: a container that has the volume still runs, or a program has the device open; end it, then try again", busy.path)
		}
	}
}
