package jail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
)

// ConsoleLog is the name of the log of a guest's console, in the runtime folder.
const ConsoleLog = "console.log"

// Life is the process of a VM from its start, or its adoption, until it has ended. The instance of every driver embeds one. The driver supervises it,
// and calls Detach when the instance is closed, or Bury when the process has ended. Its methods are safe for concurrent use.
type Life struct {
	Proc *proc.Process
	// Memory is what the guest has resumed from. It is nil for a guest that booted, and for one that was adopted. It is set before Supervise.
	Memory interface{ Release() }

	jail     *Jail
	h        Handle
	raw      hypervisor.Handle
	console  Single
	closed   context.Context // ends with Close; set by Supervise
	close    context.CancelFunc
	finished chan struct{} // closed when supervision has stopped
	gone     chan struct{} // closed when the process has ended and its resources are removed
	exit     hypervisor.Exit
	cleanup  error // error of removing the resources
}

// NewLife returns the life of the process of h. raw is the text of the driver's handle.
func (j *Jail) NewLife(h Handle, raw hypervisor.Handle, p *proc.Process) *Life {
	return &Life{Proc: p, jail: j, h: h, raw: append(hypervisor.Handle(nil), raw...), finished: make(chan struct{}), gone: make(chan struct{})}
}

// Renew replaces the text of the driver's handle. It is called before Supervise, or not at all.
func (l *Life) Renew(raw hypervisor.Handle) { l.raw = append(hypervisor.Handle(nil), raw...) }

// Supervise runs fn until the process has ended or the instance is closed, when ctx of fn ends. It outlives ctx.
func (l *Life) Supervise(ctx context.Context, fn func(ctx context.Context)) {
	l.closed, l.close = context.WithCancel(context.WithoutCancel(ctx))
	l.jail.Logs.Add(l.h.Dir)
	go func() {
		defer close(l.finished)
		fn(l.closed)
	}()
}

// Closed is closed by Close.
func (l *Life) Closed() <-chan struct{} { return l.closed.Done() }

// Detach releases what is held for a process that goes on.
func (l *Life) Detach() {
	l.jail.Logs.Drop(l.h.Dir)
	l.release()
}

func (l *Life) release() {
	l.jail.Users.Drop(l.h.UID)
	if l.Memory != nil {
		l.Memory.Release()
	}
	_ = l.Proc.Close()
}

// Bury removes what is left of an ended process, and publishes how it ended. failed are errors of removing what only the driver knows.
func (l *Life) Bury(exit hypervisor.Exit, failed error) {
	l.exit = exit
	if exit.Cause == "" && !exit.GuestShutdown && !exit.GuestReset && l.jail.Cgroups.OutOfMemory(l.h.ID, l.h.Dir, l.h.Cgroup) {
		l.exit.Cause = "the kernel of the node killed it, because its cgroup or that of its pod reached the limit of memory"
	}
	l.jail.Logs.Drop(l.h.Dir)
	l.cleanup = errors.Join(failed, l.jail.Clear(l.h.ID, l.h.Dir, l.h.Cgroup))
	l.release()
	close(l.gone)
}

// Handle implements hypervisor.Instance.
func (l *Life) Handle() hypervisor.Handle { return append(hypervisor.Handle(nil), l.raw...) }

// PID implements hypervisor.Instance.
func (l *Life) PID() int {
	select {
	case <-l.gone:
		return 0
	default:
		return l.h.PID
	}
}

// Kill implements hypervisor.Instance.
func (l *Life) Kill(ctx context.Context) error {
	select {
	case <-l.gone:
		return l.cleanup
	default:
	}
	if err := l.Proc.Kill(ctx); err != nil {
		return fmt.Errorf("kill VM %s: %w", l.h.ID, err)
	}
	select {
	case <-l.gone:
		return l.cleanup
	case <-ctx.Done():
		return fmt.Errorf("kill VM %s: %w", l.h.ID, ctx.Err())
	}
}

// Wait implements hypervisor.Instance.
func (l *Life) Wait(ctx context.Context) (hypervisor.Exit, error) {
	select {
	case <-l.gone:
		return l.exit, nil
	default:
	}
	select {
	case <-l.gone:
		return l.exit, nil
	case <-l.closed.Done():
		return hypervisor.Exit{Code: -1}, errdefs.Preconditionf("wait for VM %s: the instance was closed", l.h.ID)
	case <-ctx.Done():
		return hypervisor.Exit{Code: -1}, ctx.Err()
	}
}

// Close implements hypervisor.Instance.
func (l *Life) Close() error {
	l.close()
	<-l.finished
	return nil
}

// ConsoleLog implements hypervisor.ConsoleOpener.
func (l *Life) ConsoleLog() string { return filepath.Join(l.h.Dir, ConsoleLog) }

// TakeConsole opens the console for one user at a time.
func (l *Life) TakeConsole(open func() (io.ReadWriteCloser, error)) (io.ReadWriteCloser, error) {
	conn, err := l.console.Take(open)
	if err != nil {
		return nil, fmt.Errorf("console of VM %s: %w", l.h.ID, l.OrEnded(err))
	}
	return conn, nil
}

// endTime is how long after its sockets a process may end that is killed.
const endTime = time.Second

// OrEnded turns the loss of a connection into NotFound if the process has ended, or ends now.
func (l *Life) OrEnded(err error) error {
	if !errdefs.IsUnavailable(err) {
		return err
	}
	t := time.NewTimer(endTime)
	defer t.Stop()
	select {
	case <-l.Proc.Done():
		return l.endedError()
	case <-t.C:
		return err
	}
}

// Alive returns NotFound if the process has ended.
func (l *Life) Alive() error {
	select {
	case <-l.Proc.Done():
		return l.endedError()
	default:
		return nil
	}
}

func (l *Life) endedError() error { return errdefs.NotFoundf("VM %s has ended", l.h.ID) }

// Named says in err of which VM it is.
func (l *Life) Named(err error) error {
	if err != nil {
		return fmt.Errorf("VM %s: %w", l.h.ID, err)
	}
	return nil
}
