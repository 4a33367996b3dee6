package firecracker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// instance is one running VM. One goroutine supervises it.
type instance struct {
	*jail.Life

	d     *Driver
	h     handle
	guest jail.Channel
	pager *attendant    // nil: it needs none
	whole chan struct{} // is closed when the pager has done its work; nil: there was none

	beginning *jail.Beginning
}

var (
	_ hypervisor.Instance      = (*instance)(nil)
	_ hypervisor.ConsoleOpener = (*instance)(nil)
	_ hypervisor.DiskGrower    = (*instance)(nil)
	_ hypervisor.GuestDialer   = (*instance)(nil)
	_ hypervisor.LinkOpener    = (*instance)(nil)
	_ hypervisor.Pauser        = (*instance)(nil)
	_ hypervisor.Snapshotter   = (*instance)(nil)
)

func newInstance(d *Driver, h handle, raw hypervisor.Handle, p *proc.Process) *instance {
	return &instance{Life: d.jail.NewLife(h.Handle, raw, p), d: d, h: h, beginning: jail.NewBeginning()}
}

// call sends a request that costs the process no time.
func (i *instance) call(ctx context.Context, verb, path string, body, answer any) error {
	return jail.Answered(ctx, i.d.cfg.AnswerTime, func(ctx context.Context) error { return i.callLong(ctx, verb, path, body, answer) })
}

// callLong is call for what may take the process any time.
func (i *instance) callLong(ctx context.Context, verb, path string, body, answer any) error {
	if err := i.Alive(); err != nil {
		return err
	}
	conn, err := jail.DialPrivate(ctx, i.Proc, rootPrivate, apiSocket, i.h.UID)
	if err != nil {
		return i.OrEnded(err)
	}
	return i.OrEnded(call(ctx, conn, verb, path, body, answer))
}

// The states of a VM as the program names them.
const (
	stateRunning = "Running"
	statePaused  = "Paused"
	stateNone    = "Not started" // it was launched paused
)

func (i *instance) state(ctx context.Context) (string, error) {
	var info struct {
		State string `json:"state"`
	}
	if !i.complete() {
		wait, cancel := context.WithTimeout(ctx, patienceLate)
		defer cancel()
		err := i.callLong(wait, "GET", "/", nil, &info)
		if err != nil && ctx.Err() == nil && wait.Err() != nil { // it waits for memory, and so runs
			return stateRunning, nil
		}
		if err != nil {
			return "", err
		}
	} else if err := i.call(ctx, "GET", "/", nil, &info); err != nil {
		return "", err
	}
	if !slices.Contains([]string{stateRunning, statePaused, stateNone}, info.State) {
		return "", errdefs.Unavailablef("Firecracker says that its state is %.40q", info.State)
	}
	return info.State, nil
}

// State implements hypervisor.Instance.
func (i *instance) State(ctx context.Context) (hypervisor.RunState, error) {
	s, err := i.state(ctx)
	switch {
	case err != nil:
		return "", fmt.Errorf("state of VM %s: %w", i.h.ID, err)
	case s == stateRunning:
		return hypervisor.Running, nil
	}
	return hypervisor.Paused, nil
}

// Shutdown implements hypervisor.Instance. The power button of this machine is Ctrl+Alt+Del.
func (i *instance) Shutdown(ctx context.Context) error {
	s, err := i.state(ctx)
	if err == nil && s == stateNone && i.beginning.PressLater() {
		return nil
	}
	if err == nil {
		err = i.press(ctx)
	}
	return i.Named(err)
}

// press presses the button. While the guest has not read the keys of some earlier presses, there is no room for more, and none is needed.
func (i *instance) press(ctx context.Context) error {
	err := i.call(ctx, "PUT", "/actions", action{"SendCtrlAltDel"}, nil)
	if refused, ok := errors.AsType[*apiError](err); ok {
		i.d.log.Debug("power button not pressed again", "vm", i.h.ID, "err", refused)
		return nil
	}
	return err
}

// Pause implements hypervisor.Pauser.
func (i *instance) Pause(ctx context.Context) error {
	s, err := i.state(ctx)
	if err == nil && s == stateRunning {
		err = i.call(ctx, "PATCH", "/vm", runState{"Paused"}, nil)
	}
	return i.Named(err)
}

// Resume implements hypervisor.Pauser.
func (i *instance) Resume(ctx context.Context) error {
	s, err := i.state(ctx)
	switch {
	case err != nil:
	case s == statePaused:
		err = i.call(ctx, "PATCH", "/vm", runState{"Resumed"}, nil)
	case s == stateNone:
		err = i.beginning.Begin(ctx, i.start, i.press)
	}
	return i.Named(err)
}

// start begins a guest that was launched paused. It may have begun already, by a request whose answer nobody heard.
func (i *instance) start(ctx context.Context) error {
	err := i.call(ctx, "PUT", "/actions", action{"InstanceStart"}, nil)
	if err == nil {
		return nil
	}
	if s, lost := i.state(ctx); lost != nil || s == stateNone {
		return err
	}
	return nil
}

// GrowDisk implements hypervisor.DiskGrower.
func (i *instance) GrowDisk(ctx context.Context, serial string, size int64) error {
	n, err := i.ToGrow(i.h.Disks, diskPath, serial, size)
	if err != nil {
		return err
	}
	r := grown(n)
	return i.Named(i.call(ctx, r.Verb, r.Path, r.Body, nil))
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
	conn, err := i.guest.Dial(ctx, i.Proc, i.connect)
	return conn, i.Named(err)
}

// connect opens the channel to the agent once.
func (i *instance) connect(ctx context.Context) (net.Conn, error) {
	conn, err := jail.DialPrivate(ctx, i.Proc, rootPrivate, agentSocket, i.h.UID)
	if err != nil {
		return nil, err
	}
	if err := jail.ConnectGuest(ctx, conn, vm.AgentPort); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// supervise waits for the end of the guest, of the process or of the instance, and handles that end.
func (i *instance) supervise(ctx context.Context) {
	tick := time.NewTicker(haltLook)
	defer tick.Stop()
	for h := (halt{}); ; {
		select {
		case <-ctx.Done():
			i.pager.release()
			i.Detach()
			return
		case <-i.pager.over():
			i.unattended(ctx)
		case <-i.Proc.Done():
			i.bury(ctx)
			return
		case <-tick.C:
			if i.over(ctx, &h) {
				i.lay(ctx)
			}
		}
	}
}

// lay records that the guest has powered itself off, and then ends the process, always in this order.
func (i *instance) lay(ctx context.Context) {
	if err := i.h.Record(jail.ReasonShutdown); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
		return
	}
	if err := i.Proc.Kill(ctx); err != nil && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not end", "vm", i.h.ID, "err", err)
	}
}

// bury removes the resources of an ended process and publishes how it ended.
func (i *instance) bury(ctx context.Context) {
	e, _ := i.Proc.Wait(context.WithoutCancel(ctx)) // it has ended already
	reason, err := i.h.lastReason()
	if err != nil {
		i.d.log.Warn("end of guest not known", "vm", i.h.ID, "err", err)
	}
	exit := i.h.exit(reason)
	if reason == "" || e.Signal == 0 { // otherwise the guest has ended, whoever then ended the process
		exit.Code, exit.Signal = e.Code, e.Signal
	}
	i.guest.Close()
	err = i.pager.end(ctx)
	if reason != "" {
		err = errors.Join(err, i.h.Record(reason))
	}
	i.Bury(exit, err)
}
