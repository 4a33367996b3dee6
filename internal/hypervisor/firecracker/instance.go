package firecracker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// instance is one running VM. One goroutine supervises it.
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
	exit     hypervisor.Exit
	cleanup  error // error of removing the resources

	mu      sync.Mutex
	pressed bool // the power button was pressed before the guest began
}

var (
	_ hypervisor.Instance      = (*instance)(nil)
	_ hypervisor.ConsoleOpener = (*instance)(nil)
	_ hypervisor.DiskGrower    = (*instance)(nil)
	_ hypervisor.GuestDialer   = (*instance)(nil)
	_ hypervisor.Linker        = (*instance)(nil)
	_ hypervisor.Pauser        = (*instance)(nil)
	_ hypervisor.Snapshotter   = (*instance)(nil)
)

func newInstance(d *Driver, h handle, p *proc.Process) *instance {
	return &instance{d: d, h: h, proc: p, finished: make(chan struct{}), gone: make(chan struct{})}
}

// adopt finds the process of h again.
func (d *Driver) adopt(ctx context.Context, h handle) (*instance, error) {
	p, err := proc.Open(h.PID, h.Start, marker(h.UUID))
	if err != nil {
		if errdefs.IsNotFound(err) && !answers(ctx, h) {
			err = d.joinClear(err, h)
		}
		return nil, err
	}
	d.jail.Users.Hold(h.UID)
	return newInstance(d, h, p), nil
}

// answers reports whether a later run of the VM listens in the runtime folder. If so, the files there do not belong to the ended run.
func answers(ctx context.Context, h handle) bool {
	conn, err := jail.DialPrivate(ctx, filepath.Join(h.Dir, privateDir), apiSocket, h.UID)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// run starts supervision, which outlives ctx.
func (i *instance) run(ctx context.Context) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	i.life, i.close = life, end
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

// private is the folder in which the process has its sockets.
func (i *instance) private() string { return filepath.Join(i.h.Dir, privateDir) }

func (i *instance) call(ctx context.Context, verb, path string, body, answer any) error {
	select {
	case <-i.proc.Done():
		return i.endedError()
	default:
	}
	conn, err := jail.DialPrivate(ctx, i.private(), apiSocket, i.h.UID)
	if err != nil {
		return i.orEnded(err)
	}
	return i.orEnded(call(ctx, conn, verb, path, body, answer))
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
	stateRunning = "Running"
	statePaused  = "Paused"
	stateNone    = "Not started" // it was launched paused
)

func (i *instance) state(ctx context.Context) (string, error) {
	var info struct {
		State string `json:"state"`
	}
	if err := i.call(ctx, "GET", "/", nil, &info); err != nil {
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

func (i *instance) named(err error) error {
	if err != nil {
		return fmt.Errorf("VM %s: %w", i.h.ID, err)
	}
	return nil
}

// Shutdown implements hypervisor.Instance. The power button of this machine is Ctrl+Alt+Del.
func (i *instance) Shutdown(ctx context.Context) error {
	s, err := i.state(ctx)
	if err == nil && s == stateNone {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.pressed = true
		return nil
	}
	if err == nil {
		err = i.press(ctx)
	}
	return i.named(err)
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
	return i.named(err)
}

// Resume implements hypervisor.Pauser.
func (i *instance) Resume(ctx context.Context) error {
	s, err := i.state(ctx)
	switch {
	case err != nil:
	case s == statePaused:
		err = i.call(ctx, "PATCH", "/vm", runState{"Resumed"}, nil)
	case s == stateNone:
		err = i.begin(ctx)
	}
	return i.named(err)
}

// begin starts a guest that was launched paused.
func (i *instance) begin(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.call(ctx, "PUT", "/actions", action{"InstanceStart"}, nil); err != nil {
		return err
	}
	if !i.pressed {
		return nil
	}
	i.pressed = false
	return i.press(ctx)
}

// GrowDisk implements hypervisor.DiskGrower.
func (i *instance) GrowDisk(ctx context.Context, serial string, size int64) error {
	select {
	case <-i.proc.Done():
		return i.endedError()
	default:
	}
	n := slices.IndexFunc(i.h.Disks, func(d drive) bool { return d.Serial == serial && serial != "" })
	if n < 0 || i.h.Disks[n].ReadOnly {
		return errdefs.Invalidf("VM %s has no disk %q that can be written to", i.h.ID, serial)
	}
	st, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", i.h.PID, diskPath(n))) // the process cannot change what is there
	switch {
	case err != nil:
		return i.named(i.orEnded(errdefs.Unavailablef("look at disk %s: %w", serial, err)))
	case st.Mode().IsRegular() && st.Size() > size:
		return errdefs.Invalidf("disk %s of VM %s has %d bytes, more than %d", serial, i.h.ID, st.Size(), size)
	}
	r := grown(n)
	return i.named(i.call(ctx, r.Verb, r.Path, r.Body, nil))
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
	conn, err := i.guest.Dial(ctx, i.proc, i.connect)
	return conn, i.named(err)
}

// connect opens the channel to the agent once.
func (i *instance) connect(ctx context.Context) (net.Conn, error) {
	conn, err := jail.DialPrivate(ctx, i.private(), agentSocket, i.h.UID)
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
	defer close(i.finished)
	tick := time.NewTicker(haltLook)
	defer tick.Stop()
	for h := (halt{}); ; {
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
		case <-tick.C:
			if i.over(ctx, &h) {
				i.lay(ctx)
			}
		}
	}
}

// lay records that the guest has powered itself off, and then ends the process, always in this order.
func (i *instance) lay(ctx context.Context) {
	if err := i.h.record(reasonShutdown); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
		return
	}
	if err := i.proc.Kill(ctx); err != nil && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not end", "vm", i.h.ID, "err", err)
	}
}

// bury removes the resources of an ended process and publishes how it ended.
func (i *instance) bury(ctx context.Context) {
	e, _ := i.proc.Wait(context.WithoutCancel(ctx)) // it has ended already
	reason, err := i.h.lastReason()
	if err != nil {
		i.d.log.Warn("end of guest not known", "vm", i.h.ID, "err", err)
	}
	i.exit = ended(reason)
	if reason == "" || e.Signal == 0 { // otherwise the guest has ended, whoever then ended the process
		i.exit.Code, i.exit.Signal = e.Code, e.Signal
	}
	if reason == "" && i.d.jail.Cgroups.OutOfMemory(i.h.ID, i.h.Dir, i.h.Cgroup) {
		i.exit.Cause = "the kernel of the node killed it, because its cgroup or that of its pod reached the limit of memory"
	}
	i.guest.Close()
	i.memory.Release()
	var recorded error
	if reason != "" {
		recorded = i.h.record(reason)
	}
	i.d.jail.Logs.Drop(i.h.Dir)
	i.cleanup = errors.Join(recorded, i.d.jail.Clear(i.h.ID, i.h.Dir, i.h.Cgroup))
	i.d.jail.Users.Drop(i.h.UID)
	_ = i.proc.Close()
	close(i.gone)
}
