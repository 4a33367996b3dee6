// Package proc starts detached processes, identifies them safely even when pids are recycled, waits for them and signals them
// through pidfds. This also works for processes that are not children of the caller.
//
// It does not restart, supervise or interpret what it runs, and it keeps no list: the caller that starts a process owns it. It
// needs Linux 5.7 or newer (pidfd, clone into a cgroup).
package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Unknown is the exit code of a process that has ended but whose status only another parent can read.
const Unknown = -1

// Exit says how a process ended.
type Exit struct {
	Code   int // exit code; Unknown for a process that is not our child or that a signal ended
	Signal int // signal that ended it; 0 if none or unknown
}

// Process is one process, held by a pidfd. A pidfd never refers to a later process with the same pid.
type Process struct {
	pid   int
	start uint64
	fd    *os.File // pidfd, non-blocking: the runtime's poller waits for it, so no thread blocks

	mu   sync.Mutex
	done chan struct{} // created by the first Wait; closed when the process has ended
	exit Exit
	err  error // error of the wait itself
}

// PID is the process id. Another process may have it once this process has ended.
func (p *Process) PID() int { return p.pid }

// StartTime is field 22 of /proc/PID/stat, in clock ticks since boot. Together with the pid it identifies a process uniquely
// until the machine reboots.
func (p *Process) StartTime() uint64 { return p.start }

// Open opens the process that has this pid and start time and has marker among its arguments. It returns NotFound if there is
// no such process: it has ended (zombies count as ended and are reaped), or the pid is another process's.
func Open(pid int, start uint64, marker string) (*Process, error) {
	fd, err := pidfdOpen(pid)
	if err != nil {
		return nil, err
	}
	p := newProcess(pid, start, fd)
	if err := p.check(marker); err != nil {
		p.reapZombie()
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

// check must run after the pidfd was opened. What /proc says about the pid is then true of the process behind the pidfd, unless
// that process has ended meanwhile. Signal 0 through the pidfd detects that.
func (p *Process) check(marker string) error {
	st, err := readStat(p.pid)
	if err != nil || st.state == 'Z' || st.state == 'X' {
		return errdefs.NotFoundf("process %d has ended", p.pid)
	}
	if st.start != p.start {
		return errdefs.NotFoundf("process %d has ended; another process has its pid now", p.pid)
	}
	args, err := Args(p.pid)
	if err != nil || !slices.Contains(args, marker) {
		return errdefs.NotFoundf("process %d is not the one that carries %s", p.pid, marker)
	}
	if p.Signal(0) != nil {
		return errdefs.NotFoundf("process %d has ended", p.pid)
	}
	return nil
}

func pidfdOpen(pid int) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return -1, errdefs.NotFoundf("process %d has ended", pid)
	}
	if err != nil {
		return -1, fmt.Errorf("open pidfd of process %d: %w", pid, err)
	}
	return fd, nil
}

func newProcess(pid int, start uint64, pidfd int) *Process {
	// The runtime's poller accepts only non-blocking descriptors. PIDFD_NONBLOCK would need a newer kernel.
	_ = unix.SetNonblock(pidfd, true)
	return &Process{pid: pid, start: start, fd: os.NewFile(uintptr(pidfd), "pidfd")}
}

// Descriptor returns a copy of the descriptor n of the process. What it refers to is up to the process. Permission is that of ptrace(2).
// Errors: NotFound if the process has ended or has no such descriptor.
func (p *Process) Descriptor(n int) (*os.File, error) {
	got, gerr := -1, error(nil)
	err := p.control(func(fd int) { got, gerr = unix.PidfdGetfd(fd, n, 0) })
	if err == nil {
		err = gerr
	}
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EBADF) {
		return nil, errdefs.NotFoundf("process %d has ended, or has no descriptor %d", p.pid, n)
	}
	if err != nil {
		return nil, fmt.Errorf("copy descriptor %d of process %d: %w", n, p.pid, err)
	}
	return os.NewFile(uintptr(got), "descriptor"), nil
}

// Signal sends sig. It returns NotFound when the process has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	var serr error
	err := p.control(func(fd int) { serr = unix.PidfdSendSignal(fd, sig, nil, 0) })
	if err == nil {
		err = serr
	}
	if errors.Is(err, unix.ESRCH) {
		return errdefs.NotFoundf("process %d has ended", p.pid)
	}
	if err != nil {
		return fmt.Errorf("send signal %d to process %d: %w", sig, p.pid, err)
	}
	return nil
}

// Wait blocks until the process has ended or ctx ends. Any number of callers may wait, also after the end. The kernel reports
// the end (pidfd), without polling. Wait reaps a child. After Close it returns a FailedPrecondition error, unless the end was
// seen earlier.
func (p *Process) Wait(ctx context.Context) (Exit, error) {
	select {
	case <-p.Done():
		return p.exit, p.err
	case <-ctx.Done():
		return Exit{Code: Unknown}, ctx.Err()
	}
}

// Done is closed when the process has ended or the Process was closed.
func (p *Process) Done() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done == nil {
		p.done = make(chan struct{})
		go p.await(p.done)
	}
	return p.done
}

// await is the only goroutine that waits. It returns when the process ends or Close is called.
func (p *Process) await(done chan<- struct{}) {
	defer close(done)
	p.exit.Code = Unknown
	rc, err := p.fd.SyscallConn()
	if err == nil {
		err = rc.Read(func(fd uintptr) bool { return ended(int(fd)) })
	}
	if err != nil {
		p.err = errdefs.Preconditionf("process %d is no longer watched: %w", p.pid, err)
		return
	}
	p.exit = p.reap()
}

// ended checks without blocking whether the pidfd's process and all its threads are dead.
func ended(fd int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n > 0
		}
	}
}

// reap collects the exit status if the process was our child. Otherwise the status stays unknown.
func (p *Process) reap() Exit {
	exit := Exit{Code: Unknown}
	_ = p.control(func(fd int) {
		// waitid proves through the pidfd that the process is our child and dead. Its siginfo is opaque in x/sys, so wait4
		// reads the status. No other process can get the pid meanwhile: an unreaped child keeps it.
		if unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) != nil {
			return
		}
		var ws unix.WaitStatus
		if got, err := unix.Wait4(p.pid, &ws, unix.WNOHANG, nil); err != nil || got != p.pid {
			return
		}
		if ws.Signaled() {
			exit.Signal = int(ws.Signal())
			return
		}
		exit.Code = ws.ExitStatus()
	})
	return exit
}

func (p *Process) reapZombie() {
	if st, err := readStat(p.pid); err == nil && st.state == 'Z' && st.start == p.start {
		p.reap()
	}
}

// Kill sends SIGKILL and waits until the process is gone. Killing an ended process is no error.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.Signal(unix.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	_, err := p.Wait(ctx)
	return err
}

// Close releases the process without affecting it.
func (p *Process) Close() error {
	// Close alone wakes a waiter only if the poller knows the descriptor. A deadline in the past always wakes it.
	_ = p.fd.SetReadDeadline(time.Unix(1, 0))
	return p.fd.Close()
}

func (p *Process) control(f func(fd int)) error {
	rc, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Control(func(fd uintptr) { f(int(fd)) })
}
