package cloudhypervisor

import (
	"context"
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
	"cocoonstack.io/cocoon/internal/proc"
)

// instance is one running VM. Two goroutines serve it: one supervises, one reads events.
type instance struct {
	*jail.Life

	d     *Driver
	h     handle
	guest jail.Channel
	turn  chan struct{} // has room for one who changes the devices of the guest

	beginning *jail.Beginning

	mu     sync.Mutex
	again  time.Time // until then, a guest that powers itself off starts again
	reason string    // why the guest ended, "" if it has not
}

var (
	_ hypervisor.Instance      = (*instance)(nil)
	_ hypervisor.ConsoleOpener = (*instance)(nil)
	_ hypervisor.DiskGrower    = (*instance)(nil)
	_ hypervisor.DiskPlugger   = (*instance)(nil)
	_ hypervisor.GuestDialer   = (*instance)(nil)
	_ hypervisor.LinkOpener    = (*instance)(nil)
	_ hypervisor.NICPlugger    = (*instance)(nil)
	_ hypervisor.Pauser        = (*instance)(nil)
	_ hypervisor.Resetter      = (*instance)(nil)
	_ hypervisor.Snapshotter   = (*instance)(nil)
)

func newInstance(d *Driver, h handle, raw hypervisor.Handle, p *proc.Process) *instance {
	return &instance{Life: d.jail.NewLife(h.Handle, raw, p), d: d, h: h, turn: make(chan struct{}, 1), beginning: jail.NewBeginning()}
}

// call sends a request that costs the process no time.
func (i *instance) call(ctx context.Context, verb, method string, body, answer any, files ...*os.File) error {
	return jail.Answered(ctx, i.d.cfg.AnswerTime, func(ctx context.Context) error { return i.callLong(ctx, verb, method, body, answer, files...) })
}

// callLong is call for what may take the process any time.
func (i *instance) callLong(ctx context.Context, verb, method string, body, answer any, files ...*os.File) error {
	if err := i.Alive(); err != nil {
		return err
	}
	conn, err := jail.Dial(ctx, i.h.Dir, apiSocket)
	if err != nil {
		return i.OrEnded(err)
	}
	return i.OrEnded(call(ctx, conn, verb, method, body, answer, files...))
}

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

// State implements hypervisor.Instance.
func (i *instance) State(ctx context.Context) (hypervisor.RunState, error) {
	s, err := i.state(ctx)
	switch {
	case err != nil:
		return "", fmt.Errorf("state of VM %s: %w", i.h.ID, err)
	case s == stateRunning:
		return hypervisor.Running, nil
	case s == stateCreated && i.beginning.Begun():
		return hypervisor.Ended, nil
	}
	return hypervisor.Paused, nil
}

// bootTime is how long the program may take to make a machine with that much memory.
func (d *Driver) bootTime(memory int64, huge bool) time.Duration {
	if huge {
		return d.cfg.LaunchTime + time.Duration(memory>>30)*time.Second
	}
	return d.cfg.LaunchTime
}

// start begins the guest. It may have begun already, by a request whose answer nobody heard.
func (i *instance) start(ctx context.Context) error {
	boot := func(ctx context.Context) error { return i.callLong(ctx, "PUT", "vm.boot", nil, nil) }
	if err := jail.Answered(ctx, i.d.bootTime(i.h.Memory, i.h.Huge), boot); err != nil {
		if s, lost := i.state(ctx); lost != nil || s == stateCreated {
			return err
		}
	}
	if i.h.Resets {
		return nil
	}
	return unlinkKernel(i.Proc)
}

// recall finds out whether the guest has begun. An earlier daemon may have been killed before it took its kernel away.
func (i *instance) recall() {
	if l, err := i.h.life(); err == nil && l == lifeUnknown {
		return
	}
	i.beginning.HasBegun()
	if i.h.Resets {
		return
	}
	if err := unlinkKernel(i.Proc); err != nil {
		i.d.log.Warn("guest would start again when it resets", "vm", i.h.ID, "err", err)
	}
}

// Shutdown implements hypervisor.Instance.
func (i *instance) Shutdown(ctx context.Context) error {
	if i.beginning.PressLater() {
		return nil
	}
	return i.Named(i.press(ctx))
}

func (i *instance) press(ctx context.Context) error {
	return i.call(ctx, "PUT", "vm.power-button", nil, nil)
}

// Pause implements hypervisor.Pauser.
func (i *instance) Pause(ctx context.Context) error {
	s, err := i.State(ctx)
	if err != nil || s != hypervisor.Running {
		return err
	}
	return i.Named(i.call(ctx, "PUT", "vm.pause", nil, nil))
}

// Resume implements hypervisor.Pauser.
func (i *instance) Resume(ctx context.Context) error {
	if err := i.beginning.Begin(ctx, i.start, i.press); err != nil {
		return i.Named(err)
	}
	s, err := i.State(ctx)
	if err != nil || s != hypervisor.Paused {
		return err
	}
	return i.Named(i.call(ctx, "PUT", "vm.resume", nil, nil))
}

// resets returns Unsupported for a guest that ends when it resets.
func (i *instance) resets() error {
	if err := i.Alive(); err != nil {
		return err
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
	return i.Named(i.call(ctx, "PUT", "vm.reboot", nil, nil))
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

// OpenConsole implements hypervisor.ConsoleOpener.
func (i *instance) OpenConsole(context.Context) (io.ReadWriteCloser, error) {
	return i.TakeConsole(func() (io.ReadWriteCloser, error) { return jail.OpenConsole(i.Proc, fdConsole, i.ConsoleLog()) })
}

// DialGuest implements hypervisor.GuestDialer. It waits until the agent listens.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	if !i.h.Agent {
		return nil, errdefs.Preconditionf("VM %s has no channel for an agent", i.h.ID)
	}
	conn, err := i.guest.Dial(ctx, i.Proc, i.dialAgent)
	return conn, i.Named(err)
}

// supervise follows the events of the guest until the process or the instance ends, and handles that end.
func (i *instance) supervise(ctx context.Context) {
	lives := make(chan life)
	go i.follow(ctx, lives)
	for {
		select {
		case <-ctx.Done():
			i.Detach()
			return
		case <-i.Proc.Done():
			i.bury(ctx)
			return
		case l := <-lives:
			i.lives(ctx, l)
		}
	}
}

// follow passes the life of the guest on, each time that its events change it.
func (i *instance) follow(ctx context.Context, lives chan<- life) {
	f, err := jail.Follow(filepath.Join(i.h.Dir, eventLog), 0, i.Proc.Done())
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
		case <-i.Proc.Done():
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
	i.lay(ctx, jail.ReasonShutdown)
}

// lay records how the guest ended and then lets the process end, always in this order.
func (i *instance) lay(ctx context.Context, reason string) {
	i.mu.Lock()
	i.reason = reason
	i.mu.Unlock()
	if err := i.h.Record(reason); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
	}
	if err := i.call(ctx, "PUT", "vmm.shutdown", nil, nil); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err) && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not end", "vm", i.h.ID, "err", err)
	}
}

// bury removes the resources of an ended process and publishes how it ended.
func (i *instance) bury(ctx context.Context) {
	e, _ := i.Proc.Wait(context.WithoutCancel(ctx)) // it has ended already
	i.mu.Lock()
	reason := i.reason
	i.mu.Unlock()
	var err error
	if reason == "" {
		if reason, err = i.h.lastReason(); err != nil {
			i.d.log.Warn("end of guest not known", "vm", i.h.ID, "err", err)
			err = nil
		}
	}
	exit := jail.Ended(reason)
	exit.Code, exit.Signal = e.Code, e.Signal
	i.guest.Close()
	if reason != "" {
		err = i.h.Record(reason)
	}
	i.Bury(exit, err)
}
