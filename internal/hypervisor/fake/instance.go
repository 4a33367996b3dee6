package fake

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Instance is one running fake VM.
type Instance struct {
	d      *Driver
	v      *machine
	closed chan struct{}
	once   func()
}

var (
	_ hypervisor.Instance      = (*Instance)(nil)
	_ hypervisor.ConsoleOpener = (*Instance)(nil)
	_ hypervisor.GuestDialer   = (*Instance)(nil)
	_ hypervisor.Pauser        = (*Instance)(nil)
	_ hypervisor.DiskWatcher   = (*Instance)(nil)
)

func newInstance(d *Driver, v *machine) *Instance {
	i := &Instance{d: d, v: v, closed: make(chan struct{})}
	i.once = sync.OnceFunc(func() { close(i.closed) })
	return i
}

// Handle implements hypervisor.Instance.
func (i *Instance) Handle() hypervisor.Handle {
	b, err := json.Marshal(handle{Name, handleVersion, i.v.Plan.ID, i.v.PID, i.v.Run})
	if err != nil {
		panic(err) // strings and numbers always marshal
	}
	return b
}

// PID implements hypervisor.Instance. It is above any pid of a real process.
func (i *Instance) PID() int {
	if i.gone() {
		return 0
	}
	return i.v.PID
}

func (i *Instance) gone() bool {
	select {
	case <-i.v.gone:
		return true
	default:
		return false
	}
}

// usable runs the fault hook and returns an error if the VM has ended.
func (i *Instance) usable(ctx context.Context, op Op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if i.gone() {
		return errdefs.NotFoundf("VM %s has ended", i.v.Plan.ID)
	}
	return i.d.fault(op, i.v.Plan.ID)
}

// State implements hypervisor.Instance.
func (i *Instance) State(ctx context.Context) (hypervisor.RunState, error) {
	if err := i.usable(ctx, OpState); err != nil {
		return "", err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if i.v.Paused {
		return hypervisor.Paused, nil
	}
	return hypervisor.Running, nil
}

// Shutdown implements hypervisor.Instance.
func (i *Instance) Shutdown(ctx context.Context) error {
	if err := i.usable(ctx, OpShutdown); err != nil {
		return err
	}
	if i.v.Behaviour.IgnoreShutdown {
		return nil
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if i.v.Behaviour.Shutdown <= 0 && !i.v.Paused {
		h.endLocked(i.v, PowerOff)
		return nil
	}
	if i.v.Asked.IsZero() && i.v.Ended == "" {
		i.v.Asked = time.Now()
		h.schedule(i.v)
		return h.save(i.v)
	}
	return nil
}

// Kill implements hypervisor.Instance.
func (i *Instance) Kill(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := i.d.fault(OpKill, i.v.Plan.ID); err != nil {
		return err
	}
	return i.d.host.kill(i.v)
}

// Wait implements hypervisor.Instance.
func (i *Instance) Wait(ctx context.Context) (hypervisor.Exit, error) {
	if i.gone() {
		return i.v.Ended.exit(), nil
	}
	select {
	case <-i.v.gone:
		return i.v.Ended.exit(), nil
	case <-i.closed:
		return hypervisor.Exit{Code: -1}, errdefs.Preconditionf("wait for VM %s: the instance was closed", i.v.Plan.ID)
	case <-ctx.Done():
		return hypervisor.Exit{Code: -1}, ctx.Err()
	}
}

// Close implements hypervisor.Instance.
func (i *Instance) Close() error {
	i.once()
	return nil
}

// Pause implements hypervisor.Pauser.
func (i *Instance) Pause(ctx context.Context) error { return i.setPaused(ctx, true) }

// Resume implements hypervisor.Pauser.
func (i *Instance) Resume(ctx context.Context) error { return i.setPaused(ctx, false) }

func (i *Instance) setPaused(ctx context.Context, paused bool) error {
	if err := i.usable(ctx, OpState); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if !paused && i.v.Plan.Paused { // it boots now
		if err := os.WriteFile(i.ConsoleLog(), booted(i.v.Plan), 0o600); err != nil {
			return errdefs.Unavailablef("boot fake VM %s: %w", i.v.Plan.ID, err)
		}
		i.v.Plan.Paused = false
	}
	i.v.Paused = paused
	if !paused && i.v.Fault != nil && i.v.Fault.Stands {
		i.v.setFault(nil)
	}
	h.schedule(i.v)
	return h.save(i.v)
}

// DiskFault implements hypervisor.DiskWatcher.
func (i *Instance) DiskFault(ctx context.Context) (*hypervisor.DiskFault, <-chan struct{}, error) {
	if err := i.usable(ctx, OpState); err != nil {
		return nil, nil, err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if i.v.faulted == nil {
		i.v.faulted = make(chan struct{})
	}
	return i.v.Fault, i.v.faulted, nil
}

// setFault changes the fault of v. Preconditions: the caller holds the host's lock.
func (v *machine) setFault(f *hypervisor.DiskFault) {
	v.Fault = f
	if v.faulted != nil {
		close(v.faulted)
		v.faulted = nil
	}
}

// Paused reports whether the guest of the running VM id is paused.
func (h *Host) Paused(id vm.ID) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[id]
	if v == nil || v.Ended != "" {
		return false, errdefs.NotFoundf("no fake VM %s runs", id)
	}
	return v.Paused, nil
}

// Fault makes a disk of the running VM id fail. If the fault says so, the guest is then paused.
func (h *Host) Fault(id vm.ID, f hypervisor.DiskFault) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[id]
	if v == nil || v.Ended != "" {
		return errdefs.NotFoundf("no fake VM %s runs", id)
	}
	v.Paused = v.Paused || f.Stands
	v.setFault(&f)
	return h.save(v)
}

// ConsoleLog implements hypervisor.ConsoleOpener.
func (i *Instance) ConsoleLog() string { return filepath.Join(i.v.Plan.Dir, consoleLog) }

// OpenConsole implements hypervisor.ConsoleOpener. The fake guest echoes its input.
func (i *Instance) OpenConsole(ctx context.Context) (io.ReadWriteCloser, error) {
	if err := i.usable(ctx, OpDial); err != nil {
		return nil, err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if i.v.busy {
		return nil, errdefs.Conflictf("the console of VM %s is already open; it has room for one", i.v.Plan.ID)
	}
	ours, theirs := net.Pipe()
	go func() { // ends when either side closes
		_, _ = io.Copy(theirs, theirs)
		_ = theirs.Close()
	}()
	i.v.busy = true
	return i.track(ours, func() { i.v.busy = false })
}

// DialGuest implements hypervisor.GuestDialer.
func (i *Instance) DialGuest(ctx context.Context) (net.Conn, error) {
	if err := i.usable(ctx, OpDial); err != nil {
		return nil, err
	}
	if i.d.cfg.Guest == nil || i.v.Plan.Agent == "" {
		return nil, errdefs.Unavailablef("fake VM %s has no agent", i.v.Plan.ID)
	}
	conn, err := i.d.cfg.Guest(ctx, i.v.Plan)
	if err != nil {
		return nil, fmt.Errorf("dial fake VM %s: %w", i.v.Plan.ID, err)
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	return i.track(conn, func() {})
}

// track makes c end with the VM. Preconditions: the caller holds the host's lock.
func (i *Instance) track(c net.Conn, free func()) (net.Conn, error) {
	if i.v.Ended != "" {
		_ = c.Close()
		return nil, errdefs.NotFoundf("VM %s has ended", i.v.Plan.ID)
	}
	if i.v.conns == nil {
		i.v.conns = map[net.Conn]struct{}{}
	}
	i.v.conns[c] = struct{}{}
	return &conn{Conn: c, free: sync.OnceFunc(func() {
		i.d.host.mu.Lock()
		defer i.d.host.mu.Unlock()
		delete(i.v.conns, c)
		free()
	})}, nil
}

type conn struct {
	net.Conn
	free func()
}

func (c *conn) Close() error {
	defer c.free()
	return c.Conn.Close()
}
