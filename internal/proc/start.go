package proc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Spec describes a process to start. The process gets only what Spec names: no other descriptor, no environment, no controlling
// terminal.
type Spec struct {
	Path  string   // of the executable; not looked up in PATH
	Args  []string // Args[0] is the name that the process sees
	Env   []string
	Files []*os.File // become descriptors 3, 4, … in this order; the caller keeps its own copies
	In    *os.File   // stdin; nil is /dev/null
	Out   *os.File   // stdout; nil is /dev/null
	Err   *os.File   // stderr; nil is Out

	User      *User    // nil keeps the caller's user and capabilities
	CgroupDir *os.File // cgroup v2 folder in which the process starts; nil for the caller's
	// CgroupTasks are the files "tasks" of folders of cgroup v1, at most one of each hierarchy, in which the process starts. A thread of
	// the caller is in them for the moment of the start.
	CgroupTasks []*os.File
	// Isolated gives the process its own namespaces for network (empty), IPC, UTS and process ids, in which it is process 1.
	// Its /proc shows no process of another user (before Linux 5.8 it sees their pids but can do nothing to them).
	Isolated bool

	// Mapped, if not nil, makes the process root of a user namespace with these ids: it has all capabilities there, and none on the
	// host. It also gets no_new_privs and the filter of system calls that a User gets. User must be nil and Isolated set.
	Mapped *IDs
	Mount  *Mount // nil: none; Isolated must be set
	Root   *Root  // nil: the file system of the host; not with Mapped or Mount

	SmallPages bool // no transparent huge pages, even if the process asks for them; ignored if Linux has none
}

// User is an unprivileged identity. A process that gets one also gets no_new_privs, loses every capability, including the bounding
// set, cannot set the hardware address of a tap that it holds, and makes system calls of the native architecture only.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// Start starts the process in its own session. It is independent of the caller: it keeps running when the caller dies, and for
// the OOM killer it is an ordinary process even if the caller is protected. The caller owns the result and should Wait for it,
// otherwise a zombie stays until the caller ends.
func Start(s Spec) (*Process, error) { return s.start(0, s.fork) }

// start prepares the descriptors and then calls fork.
func (s Spec) start(deathSignal syscall.Signal, fork func(*syscall.ProcAttr) (int, error)) (*Process, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Path, err)
	}
	defer null.Close()
	in, out := cmp.Or(s.In, null), cmp.Or(s.Out, null)
	files := append([]*os.File{in, out, cmp.Or(s.Err, out)}, s.Files...)
	fds := make([]uintptr, len(files))
	for i, f := range files {
		// Fd would make a polled descriptor blocking; reading the raw number does not.
		if fds[i], err = rawFd(f); err != nil {
			return nil, fmt.Errorf("start %s: pass descriptor %d: %w", s.Path, i, err)
		}
	}
	// A descriptor that this process inherited without close-on-exec (from a shell, from systemd) must not reach the child.
	// Errors (Linux before 5.11) are ignored: every descriptor that Go itself opens already has the flag.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	pidfd := -1
	attr := &syscall.ProcAttr{Dir: "/", Env: s.Env, Files: fds, Sys: s.sys(&pidfd)}
	attr.Sys.Pdeathsig = deathSignal
	pid, err := s.inherit(func() (int, error) { return fork(attr) })
	runtime.KeepAlive(files)
	runtime.KeepAlive(s.CgroupDir)
	runtime.KeepAlive(s.CgroupTasks)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Path, err)
	}
	p, err := started(pid, pidfd)
	if err == nil {
		p.ordinary()
	}
	return p, err
}

// ordinary resets the OOM score adjustment, which a child inherits from the caller. If the kernel refuses, the value stays as
// it was.
func (p *Process) ordinary() {
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID()), []byte("0"), 0)
}

// hugePages is held for writing while this process has transparent huge pages switched off, so that no child that should have
// them starts without them.
var hugePages sync.RWMutex

// inherit runs fork while this process has the memory setting that the child must inherit. Threads share their memory, so this
// setting, unlike namespaces, cannot apply to one thread alone. fork returns after the child's exec has replaced its memory.
func (s Spec) inherit(fork func() (int, error)) (int, error) {
	if !s.SmallPages {
		hugePages.RLock()
		defer hugePages.RUnlock()
		return fork()
	}
	hugePages.Lock()
	defer hugePages.Unlock()
	was, err := unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0)
	if err != nil || was != 0 { // the kernel has no huge pages, or they are already off for this process
		return fork()
	}
	if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0); err != nil {
		return fork()
	}
	defer func() { _ = unix.Prctl(unix.PR_SET_THP_DISABLE, 0, 0, 0, 0) }()
	return fork()
}

func (s Spec) sys(pidfd *int) *syscall.SysProcAttr {
	sys := &syscall.SysProcAttr{Setsid: true, PidFD: pidfd}
	if s.Isolated {
		sys.Cloneflags |= unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID
	}
	if s.CgroupDir != nil {
		if fd, err := rawFd(s.CgroupDir); err == nil {
			sys.UseCgroupFD, sys.CgroupFD = true, int(fd)
		}
	}
	if s.Mapped != nil {
		sys.Cloneflags |= unix.CLONE_NEWUSER
		sys.UidMappings, sys.GidMappings, sys.GidMappingsEnableSetgroups = s.Mapped.mappings(), s.Mapped.mappings(), true
		sys.Credential = &syscall.Credential{}
	}
	if s.User != nil {
		sys.Credential = &syscall.Credential{Uid: s.User.UID, Gid: s.User.GID, Groups: s.User.Groups}
	}
	return sys
}

func (s Spec) fork(attr *syscall.ProcAttr) (int, error) {
	if s.User == nil && !s.Isolated && s.Root == nil && len(s.CgroupTasks) == 0 {
		return syscall.ForkExec(s.Path, s.Args, attr)
	}
	var pid int
	err := OnThread(func() (err error) {
		pid, err = s.forkHere(attr)
		return err
	})
	return pid, err
}

// forkHere forks from this thread. The thread permanently gives up what the child must not have.
func (s Spec) forkHere(attr *syscall.ProcAttr) (int, error) {
	for _, f := range s.CgroupTasks {
		if _, err := f.WriteString("0"); err != nil { // 0 is the thread that writes. Version 1 has no fork into a cgroup, but its threads move one by one
			return 0, fmt.Errorf("join cgroup: %w", err)
		}
	}
	if s.Root != nil {
		if s.Mapped != nil || s.Mount != nil {
			return 0, errdefs.Invalidf("a process with a root of its own has no other mounts")
		}
		p, err := s.place()
		if err != nil {
			return 0, err
		}
		defer p.close()
		if err := p.show(); err != nil {
			return 0, err
		}
	} else if s.Isolated {
		if err := enterMounts(); err != nil {
			return 0, err
		}
	}
	if s.Mount != nil {
		if err := s.Mount.show(); err != nil {
			return 0, err
		}
	}
	if s.User != nil {
		if err := dropBounding(); err != nil {
			return 0, err
		}
	}
	if s.User != nil || s.Mapped != nil {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return 0, fmt.Errorf("set no_new_privs: %w", err)
		}
		if err := keepAddress(); err != nil {
			return 0, err
		}
	}
	return syscall.ForkExec(s.Path, s.Args, attr)
}

// dropBounding empties the capability bounding set of this thread. A child inherits it.
func dropBounding() error {
	for c := uintptr(0); ; c++ {
		if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
			return nil //nolint:nilerr // EINVAL: one past the last capability this kernel knows
		} else if has == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
}

// OnThread runs f on its own thread, which ends with f. So f may permanently change what belongs to a thread: namespaces,
// capabilities, no_new_privs. Children forked by f inherit that.
func OnThread(f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread never ends and represents /proc/PID; while it is locked f gets another thread
			errc <- OnThread(f)
			runtime.UnlockOSThread()
			return
		}
		errc <- f() // stays locked: the runtime ends a thread whose goroutine ends while locked
	}()
	return <-errc
}

func started(pid, pidfd int) (*Process, error) {
	if pidfd < 0 {
		_ = unix.Kill(pid, unix.SIGKILL) // our own unreaped child still owns this pid
		_, _ = unix.Wait4(pid, nil, 0, nil)
		return nil, errdefs.Unsupportedf("this kernel gives no pidfd for new processes; Linux 5.7 or newer is needed")
	}
	start, err := StartTime(pid) // a child that died at once is a zombie and still has a start time
	p := newProcess(pid, start, pidfd)
	if err != nil {
		_ = p.Signal(unix.SIGKILL)
		p.reap()
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

func rawFd(f *os.File) (uintptr, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var fd uintptr
	err = rc.Control(func(n uintptr) { fd = n })
	return fd, err
}

// Limits bound what a process may use; 0 means no limit. They apply to each process, not to the sum of all processes.
type Limits struct {
	Memory   uint64 // bytes of address space
	CPU      uint64 // seconds of CPU time
	FileSize uint64 // bytes of any file that it writes
}

// Run runs s to its end. Unlike a process that Start started, this one does not outlive the caller: Run kills it when ctx ends,
// and the kernel kills it when the calling process dies. The error of an ended ctx comes with the Exit of the kill. prlimit of
// util-linux sets the limits: none of our code runs between fork and exec, and after exec is too late.
func Run(ctx context.Context, s Spec, l Limits) (exit Exit, err error) {
	exit.Code = Unknown
	if err := ctx.Err(); err != nil {
		return exit, err
	}
	if l != (Limits{}) {
		if s, err = l.wrap(s); err != nil {
			return exit, err
		}
	}
	// For the kernel the parent is the thread that forked, so this thread must live until the process ends.
	err = OnThread(func() (err error) {
		p, err := s.start(unix.SIGKILL, s.forkHere)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Close()) }()
		if exit, err = p.Wait(ctx); err != nil {
			return errors.Join(err, p.Kill(context.WithoutCancel(ctx)))
		}
		return nil
	})
	return exit, err
}

func (l Limits) wrap(s Spec) (Spec, error) {
	tool, err := exec.LookPath("prlimit")
	if err != nil {
		return s, errdefs.Preconditionf("prlimit is missing, which limits %s; run `apt-get install util-linux`", s.Path)
	}
	args := []string{"prlimit", "--core=0"}
	for _, x := range []struct {
		flag  string
		value uint64
	}{{"--as=", l.Memory}, {"--cpu=", l.CPU}, {"--fsize=", l.FileSize}} {
		if x.value > 0 {
			args = append(args, x.flag+strconv.FormatUint(x.value, 10))
		}
	}
	s.Args = append(append(args, "--", s.Path), s.Args[1:]...)
	s.Path = tool
	return s, nil
}
