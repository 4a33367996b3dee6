// Package qga is the host's side of qemu-guest-agent, which disk guests bring themselves. It implements the guest
// contract with the agent's JSON protocol on a virtio-serial port.
//
// The protocol runs one command at a time and has no streams: the output of a command arrives when the command has
// ended. It has no terminal and no main process. So a guest is never set up here (cloud-init does that) and has no log
// and no exit code. Commands that the guest's operator has switched off in the agent are Unsupported. The package does
// not reconnect: when a session is lost it ends, and its owner must connect again.
package qga

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// How often a silent guest is asked again. The agent finds what was written during boot as soon as it opens its port,
// so repeating only helps when another reader consumed it. For an image without agent it costs next to nothing.
const (
	askFirst = time.Second
	askMost  = 30 * time.Second
)

// patience is the timeout of an answer. Emulated guests are slow, and some commands wait for the guest's disks.
const patience = 30 * time.Second

// heartbeat is how often an idle session is checked. A guest that reboots does not close the port.
const heartbeat = time.Minute

// Connector connects to qemu-guest-agent. The zero value is ready.
type Connector struct{}

var _ guest.Connector = Connector{}

// Connect implements guest.Connector.
func (Connector) Connect(ctx context.Context, dial guest.Dial) (guest.Agent, error) {
	conn, err := dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("reach qemu-guest-agent: %w", context.Cause(ctx))
		}
		return nil, errdefs.Unavailablef("reach qemu-guest-agent: %w", err)
	}
	p := newPort(conn)
	if err := p.greet(ctx); err != nil {
		_ = p.close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("wait for qemu-guest-agent: %w", context.Cause(ctx))
		}
		return nil, errdefs.Unavailablef("wait for qemu-guest-agent: %w", err)
	}
	return &session{port: p, turn: make(chan struct{}, 1)}, nil
}

// greet waits until an agent answers.
func (p *port) greet(ctx context.Context) error {
	pauses := backoff.ExponentialBackOff{InitialInterval: askFirst, Multiplier: 2, MaxInterval: askMost}
	for ctx.Err() == nil {
		err := p.sync(ctx, time.Now().Add(pauses.NextBackOff()))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return ctx.Err()
}

// session is one conversation with the agent of a guest.
type session struct {
	turn   chan struct{} // holds one token while a command is in progress
	port   *port         // owned by the holder of turn
	dirty  bool          // owned by the holder of turn: an answer may still come that nobody waits for
	frozen atomic.Bool
}

var (
	_ guest.Agent           = (*session)(nil)
	_ guest.FreezeReporter  = (*session)(nil)
	_ guest.NetworkReporter = (*session)(nil)
	_ guest.Resumer         = (*session)(nil)
	_ guest.ClockReader     = (*session)(nil)
	_ guest.ClockSetter     = (*session)(nil)
	_ guest.MountReporter   = (*session)(nil)
	_ guest.Describer       = (*session)(nil)
	_ guest.LoginSetter     = (*session)(nil)
)

// Done implements guest.Agent.
func (s *session) Done() <-chan struct{} { return s.port.gone }

// Close implements guest.Agent.
func (s *session) Close() error { return s.port.close() }

// lost ends the session because of err.
func (s *session) lost(err error) error {
	_ = s.Close()
	return errdefs.Unavailablef("the link to qemu-guest-agent was lost: %w", err)
}

// take waits for its turn to use the link, and drops old answers that are still in it.
func (s *session) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
	case <-s.port.gone:
		return errdefs.Unavailablef("the link to qemu-guest-agent was lost")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if !s.dirty {
		return nil
	}
	err := s.port.sync(ctx, time.Now().Add(patience))
	switch {
	case err == nil:
		s.dirty = false
		return nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	default:
		err = s.lost(err)
	}
	<-s.turn
	return err
}

// call runs one command in the agent. result may be nil; limit is the maximum length of the answer, in bytes.
func (s *session) call(ctx context.Context, command string, args, result any, limit int) error {
	if err := s.take(ctx); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer func() { <-s.turn }()
	s.dirty = true // until the answer has arrived
	err := s.port.send(ctx, command, args, time.Now().Add(patience))
	var line []byte
	if err == nil {
		line, err = s.port.line(ctx, limit, time.Now().Add(patience))
	}
	return s.understand(ctx, command, line, err, result)
}

// understand turns the answer into the result, or into an error of the contract.
func (s *session) understand(ctx context.Context, command string, line []byte, err error, result any) error {
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", command, context.Cause(ctx))
	case errors.Is(err, errLong):
		return errdefs.Exhaustedf("%s: the answer of qemu-guest-agent is too long; write the output to a file instead", command)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errdefs.Unavailablef("%s: qemu-guest-agent has not answered for %s", command, patience)
	default:
		return fmt.Errorf("%s: %w", command, s.lost(err))
	}
	err = decode(line, result)
	refused := new(refusal)
	switch {
	case err == nil:
		s.dirty = false
		return nil
	case !errors.As(err, &refused):
		return errdefs.Unavailablef("%s: %w", command, err)
	}
	s.dirty = false
	switch {
	case refused.Class != classUnknown:
		return errdefs.New(errdefs.FailedPrecondition, "%s: %w", command, refused)
	case s.frozen.Load():
		return errdefs.Preconditionf("%s: the file systems of the guest are frozen; thaw them first", command)
	}
	return errdefs.Unsupportedf("%s: the guest's qemu-guest-agent does not have this command or has disabled it", command)
}

// Info implements guest.Agent.
func (s *session) Info(ctx context.Context) (guest.Info, error) {
	var r struct {
		Version string `json:"version"`
	}
	if err := s.call(ctx, "guest-info", nil, &r, answerLimit); err != nil {
		return guest.Info{}, err
	}
	info := guest.Info{Version: printable(r.Version), SetUp: true}
	out, err := s.capture(ctx, "cat", "/proc/sys/kernel/random/boot_id", "/proc/uptime")
	if err == nil {
		info.BootID, info.UptimeMS = parseBoot(out)
	} else if ctx.Err() != nil || errdefs.IsUnavailable(err) {
		return guest.Info{}, err
	}
	return info, nil // unknown where the guest has no /proc or allows no commands
}

// Setup implements guest.Agent. It does nothing: the guest gets its identity from cloud-init.
func (s *session) Setup(context.Context, guest.Setup) error { return nil }

// Logs implements guest.Agent. There are no logs: it waits for the end of the session.
func (s *session) Logs(ctx context.Context, _ uint64, _ func(guest.LogEntry) error) error {
	select {
	case <-s.port.gone:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Wait implements guest.Agent. A guest that boots itself has no main process, so Wait lasts until the session ends. It
// checks the session at every heartbeat.
func (s *session) Wait(ctx context.Context) (guest.Exit, error) {
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-s.port.gone:
			return guest.Exit{}, errdefs.Unavailablef("the link to qemu-guest-agent was lost")
		case <-ctx.Done():
			return guest.Exit{}, context.Cause(ctx)
		case <-beat.C:
		}
		if err := s.ping(ctx); err != nil && ctx.Err() == nil {
			return guest.Exit{}, s.lost(err)
		}
	}
}

// ping checks that the agent answers. An agent that is busy with a long command does not count as lost.
func (s *session) ping(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		s.dirty = true
		<-s.turn
	default:
		return nil
	}
	if err := s.take(ctx); err != nil {
		return err
	}
	<-s.turn
	return nil
}

// AckExit implements guest.Agent.
func (s *session) AckExit(context.Context) error {
	return errdefs.Unsupportedf("a guest with qemu-guest-agent has no main process")
}

// Poweroff implements guest.Agent. The guest takes the time it needs: the agent has no grace period, so the caller must
// enforce it. The agent answers this command only when it fails. So a second request follows, and an answer to that one
// alone means that the shutdown did not fail.
func (s *session) Poweroff(ctx context.Context, _ time.Duration) error {
	const command = "guest-shutdown"
	ctx, cancel := context.WithTimeout(ctx, shutdownPatience)
	defer cancel()
	if err := s.take(ctx); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer func() { <-s.turn }()
	s.dirty = true
	limit := time.Now().Add(patience)
	err := s.port.send(ctx, command, map[string]string{"mode": "powerdown"}, limit)
	if err != nil {
		return s.understand(ctx, command, nil, err, nil)
	}
	line, err := s.port.settle(ctx, limit)
	if line == nil && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)) { // it is already off
		return nil
	}
	if line == nil && err == nil {
		s.dirty = false
		return nil
	}
	return s.understand(ctx, command, line, err, nil)
}

// shutdownPatience is the timeout for the answer that a guest refuses to power off; the caller then has other means.
const shutdownPatience = 10 * time.Second
