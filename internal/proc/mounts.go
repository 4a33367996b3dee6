package proc

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// mounts is the mount namespace that all isolated processes share. The first start of one creates it: a namespace per process
// would copy the mount table at each start. It is a copy of this process's namespace, and later mounts and unmounts here
// propagate to it. Only /proc differs: a process sees no process of another user there (hidepid=invisible, proc(5)).
// /proc/self/fd, through which a process opens its inherited descriptors, still works. The value is nil before Linux 5.8: there
// the option would change /proc for all processes, so no such namespace is created.
var mounts = sync.OnceValues(func() (ns *os.File, err error) {
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("keep mounts to their namespace: %w", err)
		}
		err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "hidepid=invisible")
		if errors.Is(err, unix.EINVAL) { // older kernels accept only numbers here
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
	// A thread that shares its working directory with other threads cannot leave their mount namespace.
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
