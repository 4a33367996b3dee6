package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/guestagent/seccomp"
	"cocoonstack.io/cocoon/internal/proc"
)

// This file is what the copy does.

// Main becomes the program if this process is a copy, and does not return then.
func Main() {
	if len(os.Args) != 1 || os.Args[0] != name {
		return
	}
	debug.SetGCPercent(-1)
	shared, err := unix.Mmap(orderFD, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		os.Exit(1)
	}
	// What is done is done for one thread, which becomes the program. It is not the first one, because that exists as long as the others.
	_ = proc.OnThread(func() error {
		copy(shared[textAt:page-1], become(shared).Error())
		write(shared, stateFailed)
		os.Exit(1) // before the thread ends, which watch would notice
		return nil
	})
}

func read(shared []byte) uint32 { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&shared[0]))) }

func write(shared []byte, state uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&shared[0])), state)
}

// become returns only with an error.
func become(shared []byte) error {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // no process of the container may look into this one
	unix.CloseOnExec(orderFD)
	unix.CloseOnExec(openFD)
	o, filter, err := received()
	if err != nil {
		return err
	}
	path, err := syscall.BytePtrFromString(o.Path)
	if err != nil {
		return err
	}
	args, err := syscall.SlicePtrFromStrings(split(o.Args))
	if err != nil {
		return err
	}
	env, err := syscall.SlicePtrFromStrings(split(o.Env))
	if err != nil {
		return err
	}
	if o.Proc != nil {
		if err := rooms.MountProc(*o.Proc); err != nil {
			return err
		}
	}
	if err := Bound(o.Keep); err != nil {
		return err
	}
	watch(shared)
	if o.Grouped { // late: a group that is being frozen stops this process, and whoever waits for it
		if err := enter(); err != nil {
			return fmt.Errorf("enter the control group: %w", err)
		}
	}
	if err := o.drop(); err != nil {
		return err
	}
	if err := unix.Chdir(o.Dir); err != nil {
		return fmt.Errorf("enter the working folder %s: %w", o.Dir, err)
	}
	// Go has raised the limit of open files for itself. This fails, and gives the limit back.
	_ = syscall.Exec("", []string{""}, nil)
	runtime.Gosched() // a new slice of time, so that no signal of the runtime comes below
	write(shared, stateLast)
	if len(filter) > 0 {
		if err := filter.Load(); err != nil {
			return err
		}
	}
	// From here on, every system call of this thread may fail or be its last one.
	_, _, errno := unix.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(unsafe.SliceData(args))), uintptr(unsafe.Pointer(unsafe.SliceData(env))))
	write(shared, stateErrno+uint32(errno))
	for { //nolint:staticcheck // the other thread ends this process; this one may not be able to
	}
}

func received() (o order, filter seccomp.Filter, err error) {
	f := os.NewFile(orderFD, name)
	defer runtime.KeepAlive(f)
	st, err := f.Stat()
	if err != nil {
		return o, nil, err
	}
	text := make([]byte, max(st.Size()-page, 0))
	if _, err := f.ReadAt(text, page); err != nil {
		return o, nil, err
	}
	if err := json.Unmarshal(text, &o); err != nil {
		return o, nil, err
	}
	return o, filter, filter.UnmarshalBinary(o.Filter)
}

// enter enters the control group of the program, and makes it the root of those that it sees.
func enter() error {
	defer unix.Close(cgroupFD)
	fd, err := unix.Openat(cgroupFD, "cgroup.procs", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("0")); err != nil {
		return err
	}
	return unix.Unshare(unix.CLONE_NEWCGROUP)
}

// drop makes the thread one of the user. It keeps what it needs to load a filter, until it becomes another program.
func (o order) drop() error {
	if o.NoNew {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	u := o.User
	if u == nil {
		return nil
	}
	keeps := u.Uid != 0 && !o.NoNew
	if keeps {
		if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("keep capabilities: %w", err)
		}
	}
	// Package syscall would change all threads.
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(u.Groups)), uintptr(unsafe.Pointer(unsafe.SliceData(u.Groups))), 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETGID, uintptr(u.Gid), 0, 0)
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETUID, uintptr(u.Uid), 0, 0)
	}
	if errno != 0 {
		return fmt.Errorf("become user %d: %w", u.Uid, errno)
	}
	if !keeps {
		return nil
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{{Effective: 1 << unix.CAP_SYS_ADMIN, Permitted: 1 << unix.CAP_SYS_ADMIN}}
	if err := unix.Capset(&head, &data[0]); err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	return nil
}

// watch starts a thread without the filter of this one, which ends the process when this thread has failed in the last step, or when the filter
// has killed it alone.
func watch(shared []byte) {
	runtime.GOMAXPROCS(2) // neither waits for the other
	pid, tid := unix.Getpid(), unix.Gettid()
	begun := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(begun)
		pause := unix.Timespec{Nsec: 1e6}
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&pause)), 0, 0)
			if read(shared) > stateErrno {
				unix.Exit(1)
			}
			if _, _, errno := unix.RawSyscall(unix.SYS_TGKILL, uintptr(pid), uintptr(tid), 0); errno == unix.ESRCH {
				end()
			}
		}
	}()
	<-begun
}

// end ends this process as the kernel ends one of a single thread that a filter has killed.
func end() {
	var action struct{ handler, flags, restorer, mask uintptr } // SIG_DFL
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGSYS), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGSYS)
	unix.Exit(1)
}

// Bound takes all capabilities but those of keep (bit n: capability n) from the programs that the thread starts or becomes, for good.
func Bound(keep uint64) error {
	for c := range uintptr(64) {
		if keep&(1<<c) != 0 {
			continue
		}
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // one past the last capability that this kernel knows
		}
		if err == nil && has != 0 {
			err = unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}
