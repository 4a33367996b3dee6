// Package agent is the host's side of our own guest agent: it implements the guest contract with gRPC over one session
// of package link.
//
// It does not keep logs, retry calls or reconnect: when a session is lost it ends, and its owner must connect again.
package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits on what a possibly hostile guest can make the host hold. Sizes are bytes.
const (
	maxMessage   = 256 << 10 // the largest expected message is a piece of output, 32 KiB
	streamWindow = 64 << 10
	connWindow   = 1 << 20
	maxHeaders   = 16 << 10
)

// Connector connects to our agent. The zero value is ready.
type Connector struct{}

var _ guest.Connector = Connector{}

// Connect implements guest.Connector.
func (Connector) Connect(ctx context.Context, dial guest.Dial) (guest.Agent, error) {
	raw, err := dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("reach the guest agent: %w", context.Cause(ctx))
		}
		return nil, errdefs.Unavailablef("reach the guest agent: %w", err)
	}
	stream, err := link.Open(ctx, raw)
	if err != nil {
		raw.Close()
		return nil, err
	}
	return newSession(stream), nil //nolint:contextcheck // the session outlives ctx
}

// session is one connection to an agent. gRPC starts with the first call, except for Resumed, which can work without
// it.
type session struct {
	stream *watched
	client guestv1.GuestClient // of the session itself, which starts gRPC
	plain  chan struct{}       // holds a token while no call runs and gRPC has not started
	begun  chan struct{}       // closed when gRPC has started and conn is set
	conn   *grpc.ClientConn
	late   *time.Timer // starts gRPC
	once   sync.Once
}

var _ guest.Agent = (*session)(nil)

// silence is how long a session may be without gRPC. Only gRPC detects that the link is lost.
const silence = 250 * time.Millisecond

func newSession(stream net.Conn) *session {
	s := &session{
		stream: &watched{Conn: stream, done: make(chan struct{})}, plain: make(chan struct{}, 1), begun: make(chan struct{}),
	}
	s.client = guestv1.NewGuestClient(s)
	s.plain <- struct{}{}
	s.late = time.AfterFunc(silence, func() { _, _ = s.rpc(context.Background()) })
	return s
}

// Invoke implements grpc.ClientConnInterface.
func (s *session) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	conn, err := s.rpc(ctx)
	if err != nil {
		return err
	}
	return conn.Invoke(ctx, method, args, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface.
func (s *session) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	conn, err := s.rpc(ctx)
	if err != nil {
		return nil, err
	}
	return conn.NewStream(ctx, desc, method, opts...)
}

// rpc returns the gRPC connection, and starts gRPC if needed.
func (s *session) rpc(ctx context.Context) (*grpc.ClientConn, error) {
	select {
	case <-s.begun:
		return s.conn, nil
	default:
	}
	select {
	case <-s.begun:
		return s.conn, nil
	case <-s.stream.done:
		return nil, errdefs.Unavailablef("the session with the guest agent is over")
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-s.plain: // nobody takes it again
	}
	var err error
	if s.conn, err = dialOver(s.stream); err != nil {
		s.plain <- struct{}{}
		return nil, fmt.Errorf("open session with the guest agent: %w", err)
	}
	s.conn.Connect()
	close(s.begun)
	return s.conn, nil
}

// dialOver returns a client whose only connection is stream.
func dialOver(stream net.Conn) (*grpc.ClientConn, error) {
	var used atomic.Bool
	return grpc.NewClient("passthrough:///guest",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if used.Swap(true) {
				return nil, errors.New("the session with the guest agent is over")
			}
			return stream, nil
		}),
		grpc.WithIdleTimeout(0), // an idle session is healthy
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithStaticStreamWindowSize(streamWindow),
		grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	)
}

// watched reports when gRPC has closed the stream, which it does as soon as the stream fails.
type watched struct {
	net.Conn
	done chan struct{}
	once sync.Once
}

func (w *watched) Close() error {
	err := w.Conn.Close()
	w.once.Do(func() { close(w.done) })
	return err
}

// Done implements guest.Agent.
func (s *session) Done() <-chan struct{} { return s.stream.done }

// Close implements guest.Agent.
func (s *session) Close() error {
	var err error
	s.once.Do(func() {
		s.late.Stop()
		select {
		case <-s.begun:
			err = s.conn.Close()
			_ = s.stream.Close() // gRPC may not have started to use it yet
			return
		default:
		}
		_ = s.stream.Close() // interrupts a plain message in progress
		select {
		case <-s.begun:
			err = s.conn.Close()
		case <-s.plain: // gRPC cannot start any more
		}
	})
	return err
}

// failure converts err of a call to an error of the contract.
func (s *session) failure(ctx context.Context, what string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	_, answered := status.FromError(err)
	err = grpcerr.FromStatus(err)
	select {
	case <-s.stream.done: // whatever error the call returned
		return errdefs.Unavailablef("%s: the link to the guest was lost: %s", what, err)
	default:
	}
	if answered && (errdefs.Is(err, errdefs.Canceled) || errdefs.Is(err, errdefs.DeadlineExceeded)) { // and ctx has not ended
		return errdefs.Unavailablef("%s: the guest ended the call: %s", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Info implements guest.Agent.
func (s *session) Info(ctx context.Context) (guest.Info, error) {
	r, err := s.client.Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return guest.Info{}, s.failure(ctx, "ask the guest agent", err)
	}
	return infoOf(r), nil
}

// Setup implements guest.Agent.
func (s *session) Setup(ctx context.Context, g guest.Setup) error {
	r := &guestv1.SetupRequest{Hostname: g.Hostname, Nics: nics(g.NICs), Hosts: g.Hosts, Resolver: g.Resolver, NowUnixNano: time.Now().UnixNano()}
	if g.Process != nil {
		r.Process = process(*g.Process)
	}
	if r.Sandbox = g.Sandbox; r.Sandbox {
		if err := s.able(ctx, guestv1.AbilitySandbox, "wait for containers"); err != nil {
			return err
		}
	}
	r.Restart = string(g.Restart)
	for _, c := range g.Sysctls {
		r.Sysctls = append(r.Sysctls, &guestv1.Sysctl{Name: c.Name, Value: c.Value})
	}
	for _, c := range g.Containers {
		r.Containers = append(r.Containers, encodeContainer(c))
	}
	for _, v := range g.Volumes {
		m := volume(v)
		m.Layers, m.Serial = g.VolumeLayers[v.Name], g.VolumeSerials[v.Name]
		r.Volumes = append(r.Volumes, m)
	}
	r.Mounts = mounts(g.Mounts)
	reply, err := s.client.Setup(ctx, r)
	if err != nil {
		return s.failure(ctx, "set up the guest", err)
	}
	return waiting(reply)
}

func encodeContainer(c guest.Container) *guestv1.Container {
	return &guestv1.Container{
		Name: c.Name, Kind: string(c.Kind), Process: process(c.Process), Layers: c.Layers, Mounts: mounts(c.Mounts), Run: int32(c.Run),
		Manual: c.Manual, Hold: c.Hold, Root: c.Root, MessagePath: c.MessagePath, MessageFromLog: c.MessageFromLog,
		Resources: resources(c.Resources), Restart: restart(c.Restart), Volumes: ownVolumes(c.Volumes),
		OwnPids: c.PIDs.Own, PidsOf: c.PIDs.Of,
	}
}

func ownVolumes(all []guest.OwnVolume) (out []*guestv1.Volume) {
	for _, v := range all {
		m := &guestv1.Volume{Name: v.Name, Kind: string(vm.VolumeImage), Layers: v.Layers}
		if v.Device != "" {
			m.Kind, m.Serial, m.ReadOnly = string(vm.VolumeDisk), v.Device, v.ReadOnly
		}
		out = append(out, m)
	}
	return out
}

func restart(r vm.Restart) *guestv1.Restart {
	if r.Policy == "" {
		return nil
	}
	m := &guestv1.Restart{Policy: string(r.Policy)}
	for _, rule := range r.Rules {
		one := &guestv1.RestartRule{Not: rule.Not}
		for _, code := range rule.Codes {
			one.Codes = append(one.Codes, int32(code))
		}
		m.Rules = append(m.Rules, one)
	}
	return m
}

func resources(r *vm.Resources) *guestv1.Resources {
	if r == nil {
		return nil
	}
	return &guestv1.Resources{CpuLimit: r.CPULimit, CpuWeight: r.CPUWeight, MemoryLimit: r.MemoryLimit, OomScoreAdj: int32(r.OOMScoreAdj)}
}

func process(p vm.Process) *guestv1.Process {
	return &guestv1.Process{
		Args: append(append([]string(nil), p.Entrypoint...), p.Args...),
		Env:  environ(p.Env), Workdir: p.WorkDir, User: p.User, Tty: p.TTY,
		Stdin: p.Stdin, StdinOnce: p.StdinOnce, ReadOnlyRoot: p.ReadOnlyRoot,
		Security: security(p.Security), StopSignal: p.StopSignal, FileKeys: fileKeys(p.FileKeys),
	}
}

func fileKeys(list []vm.FileKey) (out []*guestv1.FileKey) {
	for _, k := range list {
		out = append(out, &guestv1.FileKey{Name: k.Name, Volume: k.Volume, Path: k.Path, Key: k.Key, Optional: k.Optional, Absent: k.Absent})
	}
	return out
}

func security(s *vm.Security) *guestv1.Security {
	if s == nil {
		return nil
	}
	return &guestv1.Security{
		Capabilities: s.Capabilities, NoNewPrivileges: s.NoNewPrivileges, Groups: s.Groups, StrictGroups: s.StrictGroups, Filtered: s.Filtered,
		Masked: s.Masked, ReadOnly: s.ReadOnly, SystemCalls: systemCalls(s.SystemCalls),
	}
}

func mounts(list []vm.Mount) (out []*guestv1.Mount) {
	for _, m := range list {
		out = append(out, &guestv1.Mount{Volume: m.Volume, Path: m.Path, SubPath: m.SubPath, ReadOnly: m.ReadOnly, Device: m.Device})
	}
	return out
}

func environ(env []vm.EnvVar) []*guestv1.EnvVar {
	var out []*guestv1.EnvVar
	for _, e := range env {
		out = append(out, &guestv1.EnvVar{Name: e.Name, Value: e.Value})
	}
	return out
}

// Logs implements guest.Agent.
func (s *session) Logs(ctx context.Context, after uint64, fn func(guest.LogEntry) error) error {
	return s.logs(ctx, &guestv1.LogsRequest{After: after}, fn)
}

func (s *session) logs(ctx context.Context, r *guestv1.LogsRequest, fn func(guest.LogEntry) error) error {
	return follow(ctx, s, "read the guest's log", s.client.Logs, r, func(e *guestv1.LogEntry) error { return fn(entryOf(e)) })
}

// follow opens a stream and calls fn with each of its messages, until it ends or fn fails.
func follow[R, M any](
	ctx context.Context, s *session, what string,
	open func(context.Context, *R, ...grpc.CallOption) (grpc.ServerStreamingClient[M], error), r *R, fn func(*M) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream when fn fails
	stream, err := open(ctx, r)
	if err != nil {
		return s.failure(ctx, what, err)
	}
	for {
		m, err := stream.Recv()
		if ended(err) {
			return nil
		}
		if err != nil {
			return s.failure(ctx, what, err)
		}
		if err := fn(m); err != nil {
			return err
		}
	}
}

// Wait implements guest.Agent.
func (s *session) Wait(ctx context.Context) (guest.Exit, error) {
	r, err := s.client.Wait(ctx, &guestv1.WaitRequest{})
	if err != nil {
		return guest.Exit{}, s.failure(ctx, "wait for the guest's main process", err)
	}
	return guest.Exit{
		Code: code(r.GetCode()), StartedAt: time.Unix(0, r.GetStartedUnixNano()), FinishedAt: time.Unix(0, r.GetFinishedUnixNano()),
	}, nil
}

// AckExit implements guest.Agent.
func (s *session) AckExit(ctx context.Context) error {
	_, err := s.client.AckExit(ctx, &guestv1.AckExitRequest{})
	return s.failure(ctx, "acknowledge the exit code", err)
}

// Poweroff implements guest.Agent.
func (s *session) Poweroff(ctx context.Context, grace time.Duration) error {
	_, err := s.client.Poweroff(ctx, &guestv1.PoweroffRequest{GraceMs: grace.Milliseconds()})
	return s.failure(ctx, "power off the guest", err)
}

// Stats implements guest.Agent.
func (s *session) Stats(ctx context.Context) (guest.Stats, error) {
	r, err := s.client.Stats(ctx, &guestv1.StatsRequest{})
	if err != nil {
		return guest.Stats{}, s.failure(ctx, "read the guest's resources", err)
	}
	return statsOf(r), nil
}
