package engine

import (
	"context"
	"fmt"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/engine/serial"
	"cocoonstack.io/cocoon/internal/engine/session"
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
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return -1, e.life.ended(caller, err)
	}
	if cmd.Container, err = containerOf(c.m.record(), cmd.Container); err != nil {
		return -1, err
	}
	code, err := c.agent.Exec(ctx, cmd, streams)
	if err != nil {
		return -1, c.failed(caller, fmt.Errorf("exec in vm %s: %w", c.m.name(), err))
	}
	return code, nil
}

// Attach connects to the standard streams of the guest's process; see guest.Attacher. Errors as for Exec.
func (e *Engine) Attach(caller context.Context, ref string, a guest.Attach, streams guest.Streams) error {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	if a.Container, err = containerOf(c.m.record(), a.Container); err != nil {
		return err
	}
	attacher, ok := c.agent.(guest.Attacher)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s does not support attach; use the console of the VM", c.m.name())
	}
	if err := attacher.Attach(ctx, a, streams); err != nil {
		return c.failed(caller, fmt.Errorf("attach to vm %s: %w", c.m.name(), err))
	}
	return nil
}

// Forward connects to a TCP port from inside the guest; see guest.Forwarder. Errors as for Exec.
func (e *Engine) Forward(caller context.Context, ref string, port int, streams guest.Streams) error {
	if port < 1 || port > 1<<16-1 {
		return errdefs.Invalidf("invalid TCP port %d", port)
	}
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	forwarder, ok := c.agent.(guest.Forwarder)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s does not support port forwarding; connect to the guest's address", c.m.name())
	}
	if err := forwarder.Forward(ctx, port, streams); err != nil {
		return c.failed(caller, fmt.Errorf("connect to port %d of vm %s: %w", port, c.m.name(), err))
	}
	return nil
}

// Stats asks the guest for its resource usage. Errors as for Exec.
func (e *Engine) Stats(caller context.Context, ref string) (guest.Stats, error) {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return guest.Stats{}, e.life.ended(caller, err)
	}
	s, err := c.agent.Stats(ctx)
	if err != nil {
		return guest.Stats{}, c.failed(caller, fmt.Errorf("ask vm %s for its stats: %w", c.m.name(), err))
	}
	return s, nil
}

// Describe asks the guest what it is. Errors as for Exec; Unsupported for a container image, whose guest is ours.
func (e *Engine) Describe(caller context.Context, ref string) (guest.Description, error) {
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return guest.Description{}, e.life.ended(caller, err)
	}
	describer, ok := c.agent.(guest.Describer)
	if !ok {
		return guest.Description{}, errdefs.Unsupportedf("the agent in the guest of vm %s does not tell what its guest is; run a command in it", c.m.name())
	}
	d, err := describer.Describe(ctx)
	if err != nil {
		return guest.Description{}, c.failed(caller, fmt.Errorf("ask vm %s what it is: %w", c.m.name(), err))
	}
	return d, nil
}

// SetLogins sets passwords and SSH keys in the guest. Errors as for Exec; InvalidArgument, Unsupported for a container image, whose guest has no
// users who log in.
func (e *Engine) SetLogins(caller context.Context, ref string, l guest.Logins) error {
	if err := l.Validate(); err != nil {
		return err
	}
	ctx, cancel := e.life.bound(caller)
	defer cancel()
	c, err := e.agentOf(ctx, ref)
	if err != nil {
		return e.life.ended(caller, err)
	}
	setter, ok := c.agent.(guest.LoginSetter)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s sets no passwords and SSH keys; put them into its image", c.m.name())
	}
	if err := setter.SetLogins(ctx, l); err != nil {
		return c.failed(caller, fmt.Errorf("set logins in vm %s: %w", c.m.name(), err))
	}
	return nil
}

// diskPatience is how long to wait for a disk guest whose agent has not answered since it started: there may be none.
const diskPatience = time.Second

// call is a call into the guest of m, in the session of link.
type call struct {
	m     *machine
	link  *session.Link
	agent guest.Agent
}

// failed replaces the error of a call by its real reason.
func (c call) failed(caller context.Context, err error) error {
	if caller.Err() == nil && errdefs.IsUnavailable(err) && c.link.Unheard(c.agent) {
		return silent(c.m)
	}
	return c.m.life.ended(caller, c.m.orEnded(err))
}

// agentOf waits for the agent of a guest that is set up.
func (n *node) agentOf(ctx context.Context, ref string) (call, error) {
	m, r, err := n.running(ctx, ref)
	if err != nil {
		return call{}, err
	}
	if err := awake(m.record()); err != nil {
		return call{}, fmt.Errorf("vm %s: %w", m.name(), err)
	}
	if !r.link.HasAgent() {
		return call{}, errdefs.Unsupportedf("vm %s has no guest agent; use its console", m.name())
	}
	patience := n.cfg.AgentTimeout
	if !r.link.OurAgent() && !m.record().AgentReady {
		patience = min(patience, diskPatience)
	}
	if r.link.Unheard(nil) {
		patience = min(patience, n.cfg.Silence)
	}
	agent, err := r.link.Ready(ctx, patience)
	switch {
	case err == nil:
		return call{m, r.link, agent}, nil
	case ctx.Err() != nil:
		return call{}, ctx.Err()
	case errdefs.IsFailedPrecondition(err):
		return call{}, errdefs.Preconditionf("vm %s ended before its guest answered", m.name())
	}
	if err := standsStill(m); err != nil {
		return call{}, err
	}
	if r.link.Unheard(nil) {
		return call{}, silent(m)
	}
	if patience < n.cfg.AgentTimeout {
		return call{}, errdefs.Unavailablef("no agent answers in the guest of vm %s; the guest may still be booting, or its image has no qemu-guest-agent", m.name())
	}
	return call{}, errdefs.Unavailablef("the guest of vm %s has not answered for %s; its serial log may say why", m.name(), n.cfg.AgentTimeout)
}

// Console connects to the serial console of a running VM. The caller closes it. Conflict when somebody else uses it.
func (e *Engine) Console(ctx context.Context, ref string) (io.ReadWriteCloser, error) {
	m, r, err := e.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	c, ok := hypervisor.As[hypervisor.ConsoleOpener](r.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s has no console for vm %s", m.record().Driver, m.name())
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
	m, err := e.vms.find(ctx, ref)
	if err != nil {
		return err
	}
	if opts.Container, err = containerOf(m.record(), opts.Container); err != nil {
		return err
	}
	if opts.Serial || m.record().ImageType != vm.ImageOCI && opts.Container == "" {
		err = m.serialLog(ctx, opts, fn)
	} else {
		log := m.logs.Of(opts.Container)
		if opts.Previous && !log.HasPrevious() {
			return errdefs.NotFoundf("vm %s has no log of an earlier run", m.name())
		}
		err = log.Read(ctx, opts, fn)
	}
	return e.life.ended(caller, err)
}

func (m *machine) serialLog(ctx context.Context, opts guest.LogOptions, fn func(guest.LogEntry) error) error {
	if opts.Previous {
		return errdefs.Unsupportedf("the serial log of an earlier run is not kept")
	}
	path := process.ConsolePath(m.dirs.run(m.id))
	var ended <-chan struct{}
	r := m.run.Load()
	if r != nil {
		path, ended = r.Console, r.Ended()
	}
	return serial.Read(ctx, path, opts.Tail, opts.From, opts.Follow && r != nil, ended, fn)
}

// silent explains why calls into m end. The state of the guest is not known: only its process exists.
func silent(m *machine) error {
	if err := standsStill(m); err != nil {
		return err
	}
	return errdefs.Unavailablef("the guest of vm %s has stopped answering; look at its serial log, or restart the VM", m.name())
}
