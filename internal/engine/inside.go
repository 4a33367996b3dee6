package engine

import (
	"context"
	"fmt"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/engine/serial"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Exec runs a command in the guest and returns its exit code. It waits for a guest that is starting; for a disk guest
// only briefly, unless its agent has answered since it started: there may be none.
// Errors: NotFound (VM, command), FailedPrecondition when the VM does not run, Unsupported when its guest has no
// agent, Unavailable when the guest does not answer in time or is lost.
func (e *Engine) Exec(caller context.Context, ref string, cmd guest.Exec, streams guest.Streams) (int, error) {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, l, agent, err := e.agentOf(ctx, ref)
	if err != nil {
		return -1, e.life.ended(caller, err)
	}
	if cmd.Container, err = containerOf(m.record(), cmd.Container); err != nil {
		return -1, err
	}
	code, err := agent.Exec(ctx, cmd, streams)
	if err != nil {
		return -1, e.failed(caller, m, l, agent, fmt.Errorf("exec in vm %s: %w", m.name(), err))
	}
	return code, nil
}

// Attach connects to the standard streams of the guest's process; see guest.Attacher. Errors as for Exec.
func (e *Engine) Attach(caller context.Context, ref string, a guest.Attach, streams guest.Streams) error {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, l, agent, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	if a.Container, err = containerOf(m.record(), a.Container); err != nil {
		return err
	}
	attacher, ok := agent.(guest.Attacher)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s attaches nobody; use its console", m.name())
	}
	if err := attacher.Attach(ctx, a, streams); err != nil {
		return e.failed(caller, m, l, agent, fmt.Errorf("attach to vm %s: %w", m.name(), err))
	}
	return nil
}

// Forward connects to a TCP port from inside the guest; see guest.Forwarder. Errors as for Exec.
func (e *Engine) Forward(caller context.Context, ref string, port int, streams guest.Streams) error {
	if port < 1 || port > 1<<16-1 {
		return errdefs.Invalidf("%d is no TCP port", port)
	}
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, l, agent, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	forwarder, ok := agent.(guest.Forwarder)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s connects to nothing; connect to the guest's address", m.name())
	}
	if err := forwarder.Forward(ctx, port, streams); err != nil {
		return e.failed(caller, m, l, agent, fmt.Errorf("connect to port %d of vm %s: %w", port, m.name(), err))
	}
	return nil
}

// Stats asks the guest for its resource usage. Errors as for Exec.
func (e *Engine) Stats(caller context.Context, ref string) (guest.Stats, error) {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, l, agent, err := e.agentOf(ctx, ref)
	if err != nil {
		return guest.Stats{}, e.life.ended(caller, err)
	}
	s, err := agent.Stats(ctx)
	if err != nil {
		return guest.Stats{}, e.failed(caller, m, l, agent, fmt.Errorf("ask vm %s for its stats: %w", m.name(), err))
	}
	return s, nil
}

// diskPatience is how long to wait for a disk guest whose agent has not answered since it started: there may be none.
const diskPatience = time.Second

// failed replaces the error of a call into the guest of m by its real reason.
func (e *Engine) failed(caller context.Context, m *machine, l *link, agent guest.Agent, err error) error {
	if caller.Err() == nil && errdefs.IsUnavailable(err) && l.unheard(agent) {
		return silent(m)
	}
	return e.life.ended(caller, err)
}

// agentOf waits for the agent of a guest that is set up. The session is that of the link.
func (e *Engine) agentOf(ctx context.Context, ref string) (*machine, *link, guest.Agent, error) {
	m, r, err := e.running(ctx, ref)
	if err != nil {
		return nil, nil, nil, err
	}
	if r.link == nil {
		return nil, nil, nil, errdefs.Unsupportedf("vm %s has no guest agent; use its console", m.name())
	}
	patience := e.cfg.AgentTimeout
	if r.link.kind != vm.ImageOCI && !m.record().AgentReady {
		patience = min(patience, diskPatience)
	}
	if r.link.unheard(nil) {
		patience = min(patience, e.cfg.Silence)
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for {
		agent, ready, changed := r.link.peek()
		if ready {
			return m, r.link, agent, nil
		}
		select {
		case <-changed:
		case <-r.ended:
			return nil, nil, nil, errdefs.Preconditionf("vm %s ended before its guest answered", m.name())
		case <-limit.C:
			if err := standsStill(m); err != nil {
				return nil, nil, nil, err
			}
			if r.link.unheard(nil) {
				return nil, nil, nil, silent(m)
			}
			if patience < e.cfg.AgentTimeout {
				return nil, nil, nil, errdefs.Unavailablef("no agent answers in the guest of vm %s; it may be booting still, or its image has no qemu-guest-agent", m.name())
			}
			return nil, nil, nil, errdefs.Unavailablef("the guest of vm %s has not answered for %s; its serial log may say why", m.name(), e.cfg.AgentTimeout)
		case <-ctx.Done():
			return nil, nil, nil, ctx.Err()
		}
	}
}

// Console connects to the serial console of a running VM. The caller closes it. Conflict when somebody else uses it.
func (e *Engine) Console(ctx context.Context, ref string) (io.ReadWriteCloser, error) {
	m, r, err := e.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	c, ok := hypervisor.As[hypervisor.ConsoleOpener](r.inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s gives vm %s no console", m.record().Driver, m.name())
	}
	rwc, err := c.OpenConsole(ctx)
	if err != nil {
		return nil, fmt.Errorf("open console of vm %s: %w", m.name(), err)
	}
	return rwc, nil
}

// Logs calls fn with the output of the main process, from the log on the host. If opts say so or the guest has no
// agent, it uses the output of the serial console, whose lines have no time. With Follow it returns when the VM has
// stopped and everything was delivered.
func (e *Engine) Logs(caller context.Context, ref string, opts guest.LogOptions, fn func(guest.LogEntry) error) error {
	if err := e.life.ready(caller); err != nil {
		return err
	}
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	m, err := e.index.find(ctx, ref)
	if err != nil {
		return err
	}
	if opts.Container, err = containerOf(m.record(), opts.Container); err != nil {
		return err
	}
	if opts.Serial || m.record().ImageType != vm.ImageOCI {
		err = e.serialLog(ctx, m, opts, fn)
	} else {
		log := m.log
		if opts.Container != "" {
			log = m.containers[opts.Container]
		}
		if opts.Previous && !log.HasPrevious() {
			return errdefs.NotFoundf("vm %s has no log of an earlier run", m.name())
		}
		err = log.Read(ctx, opts, fn)
	}
	return e.life.ended(caller, err)
}

func (e *Engine) serialLog(ctx context.Context, m *machine, opts guest.LogOptions, fn func(guest.LogEntry) error) error {
	if opts.Previous {
		return errdefs.Unsupportedf("the serial console of an earlier run is not kept")
	}
	path := consolePath(e.runDir(m.id))
	var ended <-chan struct{}
	r := m.run.Load()
	if r != nil {
		path, ended = r.console, r.ended
	}
	return serial.Read(ctx, path, opts.Tail, opts.Follow && r != nil, ended, fn)
}
