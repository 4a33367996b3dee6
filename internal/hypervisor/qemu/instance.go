package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/proc"
)

// instance is one running VM. Two goroutines serve it: one supervises, one reads QMP.
type instance struct {
	*jail.Life

	d *Driver
	h handle

	shares servers
	lost   chan string // passes why the VM cannot go on, from those who watch its servers to the supervisor

	shutdown chan string // passes the reason of a SHUTDOWN event from the QMP reader to the supervisor

	mu      sync.Mutex
	client  *qmp.Client   // nil while not connected
	changed chan struct{} // closed and replaced when client changes
	reason  string        // why the guest ended, "" if it has not
	again   time.Time     // until then, a guest that powers itself off starts again
	cause   string        // why it was ended from outside
	guest   net.Conn

	earsMu sync.Mutex // separate from mu, which is held during a connect
	ears   map[*ear]bool

	faults faults // faults of its disks
}

var (
	_ hypervisor.Instance      = (*instance)(nil)
	_ hypervisor.ConsoleOpener = (*instance)(nil)
	_ hypervisor.GuestDialer   = (*instance)(nil)
	_ hypervisor.Pauser        = (*instance)(nil)
	_ hypervisor.Snapshotter   = (*instance)(nil)
	_ hypervisor.Linker        = (*instance)(nil)
	_ hypervisor.NICSwapper    = (*instance)(nil)
	_ hypervisor.DiskFlattener = (*instance)(nil)
	_ hypervisor.DiskWatcher   = (*instance)(nil)
	_ hypervisor.DiskPlugger   = (*instance)(nil)
	_ hypervisor.NICPlugger    = (*instance)(nil)
	_ hypervisor.Resizer       = (*instance)(nil)
)

func newInstance(d *Driver, h handle, raw hypervisor.Handle, p *proc.Process) *instance {
	return &instance{
		Life: d.jail.NewLife(h.Handle, raw, p), d: d, h: h,
		shutdown: make(chan string, 1), lost: make(chan string, 1), changed: make(chan struct{}),
	}
}

// run starts supervision, which outlives ctx. client may be nil; then supervision connects first.
func (i *instance) run(ctx context.Context, client *qmp.Client) {
	i.watchServers()
	i.Supervise(ctx, func(ctx context.Context) { i.supervise(ctx, client) })
}

// State implements hypervisor.Instance.
func (i *instance) State(ctx context.Context) (hypervisor.RunState, error) {
	c, err := i.connected(ctx)
	if err != nil {
		return "", fmt.Errorf("state of VM %s: %w", i.h.ID, err)
	}
	s, err := status(ctx, c)
	if err != nil {
		return "", i.OrEnded(err)
	}
	switch s {
	case "running":
		return hypervisor.Running, nil
	case "shutdown", "guest-panicked":
		return hypervisor.Ended, nil
	}
	return hypervisor.Paused, nil
}

func status(ctx context.Context, c *qmp.Client) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := c.Execute(ctx, "query-status", nil, &s)
	return s.Status, err
}

// Shutdown implements hypervisor.Instance.
func (i *instance) Shutdown(ctx context.Context) error { return i.command(ctx, "system_powerdown") }

// Pause implements hypervisor.Pauser.
func (i *instance) Pause(ctx context.Context) error { return i.command(ctx, "stop") }

// Resume implements hypervisor.Pauser. It also ends a save that an earlier daemon left unfinished.
func (i *instance) Resume(ctx context.Context) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.settle(ctx, c))
	}
	if err == nil {
		err = i.OrEnded(cont(ctx, c))
	}
	return i.Named(err)
}

func (i *instance) command(ctx context.Context, name string) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(c.Execute(ctx, name, nil, nil))
	}
	return i.Named(err)
}

// OpenConsole implements hypervisor.ConsoleOpener.
func (i *instance) OpenConsole(ctx context.Context) (io.ReadWriteCloser, error) {
	return i.TakeConsole(func() (io.ReadWriteCloser, error) { return i.dial(ctx, consoleSocket) })
}

// DialGuest implements hypervisor.GuestDialer. The port accepts one stream: a new one closes the previous one, as a caller that
// reconnects wants.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.guest != nil {
		_ = i.guest.Close()
		i.guest = nil
	}
	conn, err := i.dial(ctx, agentSocket)
	if err != nil {
		return nil, err
	}
	i.guest = conn
	return conn, nil
}

func (i *instance) dial(ctx context.Context, socket string) (net.Conn, error) {
	if err := i.Alive(); err != nil {
		return nil, err
	}
	conn, err := jail.Dial(ctx, i.h.Dir, socket)
	return conn, i.Named(err)
}

// event runs on the QMP reader's goroutine.
func (i *instance) event(e qmp.Event) {
	i.tell(e)
	i.faults.hear(e)
	if e.Name != "SHUTDOWN" {
		return
	}
	var data struct {
		Guest  bool   `json:"guest"`
		Reason string `json:"reason"`
	}
	if json.Unmarshal(e.Data, &data) != nil || !data.Guest {
		return
	}
	select {
	case i.shutdown <- data.Reason:
	default: // the first one counts
	}
}

// connected returns the QMP connection. It waits while the connection is being made.
func (i *instance) connected(ctx context.Context) (*qmp.Client, error) {
	for {
		i.mu.Lock()
		c, changed := i.client, i.changed
		i.mu.Unlock()
		if c != nil {
			return c, nil
		}
		select {
		case <-changed:
		case <-i.Proc.Done():
			return nil, i.Alive()
		case <-i.Closed():
			return nil, errdefs.Preconditionf("the instance of VM %s was closed", i.h.ID)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (i *instance) setClient(c *qmp.Client) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.client = c
	close(i.changed)
	i.changed = make(chan struct{})
}

// supervise keeps one QMP connection open until the guest, the process or the instance ends, and handles that end.
func (i *instance) supervise(ctx context.Context, client *qmp.Client) {
	pauses := backoff.ExponentialBackOff{InitialInterval: 50 * time.Millisecond, RandomizationFactor: 0.25, Multiplier: 2, MaxInterval: 5 * time.Second}
	for {
		if client == nil {
			client = i.connect(ctx)
		}
		delay := pauses.NextBackOff()
		if client != nil {
			delay = 0
			pauses.Reset()
			i.setClient(client)
			i.attend(ctx, client)
			i.setClient(nil)
			_ = client.Close()
			client = nil
		}
		if i.over(ctx, delay) {
			return
		}
	}
}

// over waits for delay before the next attempt to connect. It returns true, after it has released everything, if the process or
// the instance has ended.
func (i *instance) over(ctx context.Context, delay time.Duration) bool {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		i.Detach()
		i.shares.close()
		return true
	case cause := <-i.lost:
		i.abandon(ctx, cause)
		return false
	case <-i.Proc.Done():
		i.bury(ctx)
		return true
	case <-timer.C:
		return false
	}
}

const connectLimit = 10 * time.Second

func (i *instance) connect(ctx context.Context) *qmp.Client {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	conn, err := jail.Dial(ctx, i.h.Dir, qmpSocket)
	if err != nil {
		return nil
	}
	client, err := qmp.Open(ctx, conn, i.event)
	if err != nil {
		return nil
	}
	// An earlier daemon may have been killed during a save. Then no process reads what QEMU writes, and the guest may stay
	// paused.
	if err := i.settle(ctx, client); err != nil {
		i.d.log.Warn("migration of an earlier save does not end", "vm", i.h.ID, "err", err)
	}
	if err := i.learnFault(ctx, client); err != nil {
		i.d.log.Debug("disk faults not read", "vm", i.h.ID, "err", err)
	}
	return client
}

// attend serves one connection until it, the process or the instance ends.
func (i *instance) attend(ctx context.Context, c *qmp.Client) {
	// The guest may have ended before the connection existed.
	if s, err := status(ctx, c); err == nil && s == "shutdown" {
		i.lay(ctx, c, i.pending(jail.ReasonShutdown))
	}
	for {
		select {
		case reason := <-i.shutdown:
			if reason == jail.ReasonShutdown && i.startAgain(ctx, c) {
				continue
			}
			i.lay(ctx, c, reason)
		case cause := <-i.lost:
			i.abandon(ctx, cause)
			return
		case <-c.Done():
			return
		case <-i.Proc.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// pending returns the reason from an event if one has arrived, otherwise guess.
func (i *instance) pending(guess string) string {
	select {
	case reason := <-i.shutdown:
		return reason
	default:
		return guess
	}
}

// lay records how the guest ended and then lets the process end, always in this order.
func (i *instance) lay(ctx context.Context, c *qmp.Client, reason string) {
	i.mu.Lock()
	if i.reason == "" {
		i.reason = reason
	}
	reason = i.reason
	i.mu.Unlock()
	if err := i.h.Record(reason); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
	}
	if err := c.Execute(ctx, "quit", nil, nil); err != nil && !errdefs.IsUnavailable(err) && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not quit", "vm", i.h.ID, "err", err)
	}
}

// bury removes the resources of an ended process and publishes how it ended.
func (i *instance) bury(ctx context.Context) {
	e, _ := i.Proc.Wait(context.WithoutCancel(ctx)) // it has ended already
	i.mu.Lock()
	if i.reason == "" {
		i.reason, _ = i.h.Recorded() // an earlier daemon may have recorded it and died
	}
	exit := ended(i.reason)
	exit.Cause, exit.Code, exit.Signal = i.cause, e.Code, e.Signal
	if i.guest != nil {
		_ = i.guest.Close()
	}
	i.mu.Unlock()
	failed := i.shares.kill(context.WithoutCancel(ctx))
	i.shares.close()
	i.Bury(exit, failed)
}
