package proc

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// mounts is the mount namespace of isolated processes, made by the first of them and shared by all. A namespace for each would cost
// each start a copy of the mount table. It is that of this process, whose later mounts and unmounts reach it too, but for /proc,
// where a process sees no other user's (hidepid=invisible, proc(5)). /proc/self/fd, by which a process opens what it was given, is
// there as ever. nil: before Linux 5.8 the option would change /proc for everybody, and there is no such namespace.
var mounts = sync.OnceValues(func() (ns *os.File, err error) {
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("keep mounts to their namespace: %w", err)
		}
		err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "hidepid=invisible")
		if errors.Is(err, unix.EINVAL) { // older kernels know numbers only
			return nil
		}
		if err != nil {
			return fmt.Errorf("mount /proc for isolated processes: %w", err)
		}
		ns, err = os.Open("/proc/thread-self/ns/mnt")
		return err
	})
	return ns, err
})

// enterMounts moves this thread to mounts.
func enterMounts() error {
	ns, err := mounts()
	if err != nil || ns == nil {
		return err
	}
	// A thread that shares its working directory with others cannot leave their mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("enter a mount namespace: %w", err)
	}
	fd, err := rawFd(ns)
	if err == nil {
		err = unix.Setns(int(fd), unix.CLONE_NEWNS)
	}
	if err != nil {
		return fmt.Errorf("enter a mount namespace: %w", err)
	}
	return nil
}
