package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
)

// instance is one running VM. Two goroutines serve it: one supervises, one reads events.
type instance struct {
	d    *Driver
	h    handle
	raw  hypervisor.Handle
	proc *proc.Process

	memory  *savedmemory.Memory // from which it has resumed; nil: from none, or it was adopted
	console jail.Single
	guest   jail.Channel

	life     context.Context // ends with Close; set by run
	close    context.CancelFunc
	finished chan struct{} // closed when supervision has stopped
	gone     chan struct{} // closed when the process has ended and its resources are removed

	mu       sync.Mutex
	unbooted bool      // the guest has not begun: it was launched paused
	pressed  bool      // its power button was pressed before it began
	again    time.Time // until then, a guest that powers itself off starts again
	reason   string    // why the guest ended, "" if it has not
	exit     hypervisor.Exit
	cleanup  error // error of removing the resources
}

var (
	_ hypervisor.Instance      = (*instance)(nil)
	_ hypervisor.ConsoleOpener = (*instance)(nil)
	_ hypervisor.GuestDialer   = (*instance)(nil)
	_ hypervisor.Linker        = (*instance)(nil)
	_ hypervisor.Pauser        = (*instance)(nil)
	_ hypervisor.Resetter      = (*instance)(nil)
	_ hypervisor.Snapshotter   = (*instance)(nil)
)

func newInstance(d *Driver, h handle, p *proc.Process) *instance {
	return &instance{d: d, h: h, proc: p, finished: make(chan struct{}), gone: make(chan struct{})}
}

// adopt finds the process of h again.
func (d *Driver) adopt(ctx context.Context, h handle) (*instance, error) {
	p, err := proc.Open(h.PID, h.Start, marker(h.UUID))
	if err != nil {
		if errdefs.IsNotFound(err) && !answers(ctx, h.Dir) {
			err = d.joinClear(err, h)
		}
		return nil, err
	}
	d.jail.Users.Hold(h.UID)
	i := newInstance(d, h, p)
	text, err := os.ReadFile(filepath.Join(h.Dir, eventLog))
	i.unbooted = err == nil && lifeOf(text) == lifeUnknown
	return i, nil
}

// answers reports whether a later run of the VM listens in dir. If so, the files there do not belong to the ended run.
func answers(ctx context.Context, dir string) bool {
	conn, err := jail.Dial(ctx, dir, apiSocket)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// run starts supervision, which outlives ctx.
func (i *instance) run(ctx context.Context) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	i.life, i.close = life, cancel
	i.d.jail.Logs.Add(i.h.Dir)
	go i.supervise(life)
}

// Handle implements hypervisor.Instance.
func (i *instance) Handle() hypervisor.Handle { return append(hypervisor.Handle(nil), i.raw...) }

// PID implements hypervisor.Instance.
func (i *instance) PID() int {
	select {
	case <-i.gone:
		return 0
	default:
		return i.h.PID
	}
}

func (i *instance) call(ctx context.Context, verb, method string, body, answer any, files ...*os.File) error {
	select {
	case <-i.proc.Done():
		return i.endedError()
	default:
	}
	conn, err := jail.Dial(ctx, i.h.Dir, apiSocket)
	if err != nil {
		return i.orEnded(err)
	}
	return i.orEnded(call(ctx, conn, verb, method, body, answer, files...))
}

// endTime is how long after its sockets a process may end that is killed.
const endTime = time.Second

// orEnded turns the loss of the connection into NotFound if the process has ended, or ends now.
func (i *instance) orEnded(err error) error {
	if !errdefs.IsUnavailable(err) {
		return err
	}
	t := time.NewTimer(endTime)
	defer t.Stop()
	select {
	case <-i.proc.Done():
		return i.endedError()
	case <-t.C:
		return err
	}
}

func (i *instance) endedError() error { return errdefs.NotFoundf("VM %s has ended", i.h.ID) }

// The states of a VM as the program names them.
const (
	stateCreated = "Created" // it has not booted, or has powered itself off
	stateRunning = "Running"
)

func (i *instance) state(ctx context.Context) (string, error) {
	var info struct {
		State string `json:"state"`
	}
	err := i.call(ctx, "GET", "vm.info", nil, &info)
	return info.State, err
}

func (i *instance) notBegun() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.unbooted
}

// State implements hypervisor.Instance.
func (i *instance) State(ctx context.Context) (hypervisor.RunState, error) {
	s, err := i.state(ctx)
	switch {
	case err != nil:
		return "", fmt.Errorf("state of VM %s: %w", i.h.ID, err)
	case s == stateRunning:
		return hypervisor.Running, nil
	case s == stateCreated && !i.notBegun():
		return hypervisor.Ended, nil
	}
	return hypervisor.Paused, nil
}

// start begins the guest.
func (i *instance) start(ctx context.Context) error {
	if err := i.call(ctx, "PUT", "vm.boot", nil, nil); err != nil {
		return err
	}
	if i.h.Resets {
		return nil
	}
	return unlinkKernel(i.h.Dir)
}

// Shutdown implements hypervisor.Instance.
func (i *instance) Shutdown(ctx context.Context) error {
	i.mu.Lock()
	if i.unbooted {
		i.pressed = true
		i.mu.Unlock()
		return nil
	}
	i.mu.Unlock()
	return i.named(i.call(ctx, "PUT", "vm.power-button", nil, nil))
}

func (i *instance) named(err error) error {
	if err != nil {
		return fmt.Errorf("VM %s: %w", i.h.ID, err)
	}
	return nil
}

// Pause implements hypervisor.Pauser.
func (i *instance) Pause(ctx context.Context) error {
	s, err := i.State(ctx)
	if err != nil || s != hypervisor.Running {
		return err
	}
	return i.named(i.call(ctx, "PUT", "vm.pause", nil, nil))
}

// Resume implements hypervisor.Pauser.
func (i *instance) Resume(ctx context.Context) error {
	if i.notBegun() {
		return i.named(i.begin(ctx))
	}
	s, err := i.State(ctx)
	if err != nil || s != hypervisor.Paused {
		return err
	}
	return i.named(i.call(ctx, "PUT", "vm.resume", nil, nil))
}

// begin starts a guest that was launched paused.
func (i *instance) begin(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.unbooted {
		return nil
	}
	if err := i.start(ctx); err != nil {
		return err
	}
	i.unbooted = false
	if !i.pressed {
		return nil
	}
	return i.call(ctx, "PUT", "vm.power-button", nil, nil)
}

// resets returns Unsupported for a guest that ends when it resets.
func (i *instance) resets() error {
	select {
	case <-i.proc.Done():
		return i.endedError()
	default:
	}
	if !i.h.Resets {
		return errdefs.Unsupportedf("VM %s boots a kernel of ours, so it ends when it resets", i.h.ID)
	}
	return nil
}

// Reset implements hypervisor.Resetter.
func (i *instance) Reset(ctx context.Context) error {
	if err := i.resets(); err != nil {
		return err
	}
	return i.named(i.call(ctx, "PUT", "vm.reboot", nil, nil))
}

// ResetOnPoweroff implements hypervisor.Resetter.
func (i *instance) ResetOnPoweroff(_ context.Context, until time.Time) error {
	if err := i.resets(); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.again = until
	return nil
}

// Kill implements hypervisor.Instance.
func (i *instance) Kill(ctx context.Context) error {
	select {
	case <-i.gone:
		return i.cleanup
	default:
	}
	if err := i.proc.Kill(ctx); err != nil {
		return fmt.Errorf("kill VM %s: %w", i.h.ID, err)
	}
	select {
	case <-i.gone:
		return i.cleanup
	case <-ctx.Done():
		return fmt.Errorf("kill VM %s: %w", i.h.ID, ctx.Err())
	}
}

// Wait implements hypervisor.Instance.
func (i *instance) Wait(ctx context.Context) (hypervisor.Exit, error) {
	select {
	case <-i.gone:
		return i.exit, nil
	default:
	}
	select {
	case <-i.gone:
		return i.exit, nil
	case <-i.life.Done():
		return hypervisor.Exit{Code: -1}, errdefs.Preconditionf("wait for VM %s: the instance was closed", i.h.ID)
	case <-ctx.Done():
		return hypervisor.Exit{Code: -1}, ctx.Err()
	}
}

// Close implements hypervisor.Instance.
func (i *instance) Close() error {
	i.close()
	<-i.finished
	return nil
}

// ConsoleLog implements hypervisor.ConsoleOpener.
func (i *instance) ConsoleLog() string { return filepath.Join(i.h.Dir, consoleLog) }

// OpenConsole implements hypervisor.ConsoleOpener.
func (i *instance) OpenConsole(context.Context) (io.ReadWriteCloser, error) {
	conn, err := i.console.Take(func() (io.ReadWriteCloser, error) { return jail.OpenConsole(i.proc, fdConsole, i.ConsoleLog()) })
	if err != nil {
		return nil, fmt.Errorf("console of VM %s: %w", i.h.ID, i.orEnded(err))
	}
	return conn, nil
}

// DialGuest implements hypervisor.GuestDialer. It waits until the agent listens.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	if !i.h.Agent {
		return nil, errdefs.Preconditionf("VM %s has no channel for an agent", i.h.ID)
	}
	conn, err := i.guest.Dial(ctx, i.proc, func(ctx context.Context) (net.Conn, error) { return dialAgent(ctx, i.h) })
	return conn, i.named(err)
}

// supervise follows the events of the guest until the process or the instance ends, and handles that end.
func (i *instance) supervise(ctx context.Context) {
	defer close(i.finished)
	lives := make(chan life)
	go i.follow(ctx, lives)
	for {
		select {
		case <-ctx.Done():
			i.d.jail.Logs.Drop(i.h.Dir)
			i.d.jail.Users.Drop(i.h.UID)
			i.memory.Release()
			_ = i.proc.Close()
			return
		case <-i.proc.Done():
			i.bury(ctx)
			return
		case l := <-lives:
			i.lives(ctx, l)
		}
	}
}

// follow passes the life of the guest on, each time that its events change it.
func (i *instance) follow(ctx context.Context, lives chan<- life) {
	f, err := jail.Follow(filepath.Join(i.h.Dir, eventLog), 0, i.proc.Done())
	if err != nil {
		i.d.log.Warn("events of vm not read", "vm", i.h.ID, "err", err)
		return
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.Close() })()
	last, data := lifeUnknown, []byte(nil)
	for buf := make([]byte, 64<<10); ; {
		n, err := f.Read(buf)
		if err != nil {
			return
		}
		data = append(data, buf[:n]...)
		now := last
		for {
			e, rest, ok := cutEvent(data)
			if data = rest; !ok {
				break
			}
			now = now.after(e)
		}
		if now == last {
			continue
		}
		last = now
		select {
		case lives <- now:
		case <-i.proc.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// lives acts on what the guest has done to itself.
func (i *instance) lives(ctx context.Context, l life) {
	if l != lifeEnded {
		return
	}
	if s, err := i.state(ctx); err != nil || s != stateCreated { // it has ended, or already runs again
		return
	}
	i.mu.Lock()
	again := i.h.Resets && time.Now().Before(i.again)
	i.mu.Unlock()
	if again {
		err := i.start(ctx)
		if err == nil {
			return
		}
		i.d.log.Warn("vm that has powered itself off does not start again", "vm", i.h.ID, "err", err)
	}
	i.lay(ctx, reasonShutdown)
}

// lay records how the guest ended and then lets the process end, always in this order.
func (i *instance) lay(ctx context.Context, reason string) {
	i.mu.Lock()
	i.reason = reason
	i.mu.Unlock()
	if err := i.h.record(reason); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
	}
	if err := i.call(ctx, "PUT", "vmm.shutdown", nil, nil); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err) && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not end", "vm", i.h.ID, "err", err)
	}
}

// bury removes the resources of an ended process and publishes how it ended.
func (i *instance) bury(ctx context.Context) {
	e, _ := i.proc.Wait(context.WithoutCancel(ctx)) // it has ended already
	i.mu.Lock()
	if i.reason == "" {
		var err error
		if i.reason, err = i.h.lastReason(); err != nil {
			i.d.log.Warn("end of guest not known", "vm", i.h.ID, "err", err)
		}
	}
	if i.reason == "" && i.d.jail.Cgroups.OutOfMemory(i.h.ID, i.h.Dir, i.h.Cgroup) {
		i.exit.Cause = "the kernel of the node killed it, because its cgroup or that of its pod reached the limit of memory"
	}
	cause := i.exit.Cause
	i.exit = ended(i.reason)
	i.exit.Cause, i.exit.Code, i.exit.Signal = cause, e.Code, e.Signal
	i.mu.Unlock()
	i.guest.Close()
	i.memory.Release()
	var recorded error
	if i.reason != "" {
		recorded = i.h.record(i.reason)
	}
	i.d.jail.Logs.Drop(i.h.Dir)
	i.cleanup = errors.Join(recorded, i.d.jail.Clear(i.h.ID, i.h.Dir, i.h.Cgroup))
	i.d.jail.Users.Drop(i.h.UID)
	_ = i.proc.Close()
	close(i.gone)
}
