package capsulectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

const (
	callTime    = 30 * time.Second // of a call without a stream
	connectTime = 10 * time.Second
	aliveTime   = 20 * time.Second // between two signs of life

	chunkSize  = 1 << 20  // bytes of one message of a transfer
	maxMessage = 16 << 20 // bytes of one answer
)

// again is how soon a machine that reboots is tried again.
var again = backoff.Config{BaseDelay: time.Second, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 3 * time.Second}

// client is a connection to one machine.
type client struct {
	conn *grpc.ClientConn
	name string // of the context, or the address
	addr string

	unreached atomic.Pointer[error] // why the last attempt to connect failed
	stranger  atomic.Pointer[error] // why the last certificate was refused

	clock clock
}

func (c *client) capsule() capsulev1.CapsuleServiceClient {
	return capsulev1.NewCapsuleServiceClient(c.conn)
}

func (c *client) identity() capsulev1.IdentityServiceClient {
	return capsulev1.NewIdentityServiceClient(c.conn)
}

func (c *client) workloads() capsulev1.WorkloadServiceClient {
	return capsulev1.NewWorkloadServiceClient(c.conn)
}

func (c *client) volumes() capsulev1.VolumeServiceClient {
	return capsulev1.NewVolumeServiceClient(c.conn)
}

func (c *client) images() capsulev1.ImageServiceClient {
	return capsulev1.NewImageServiceClient(c.conn)
}

func (c *client) network() capsulev1.NetworkServiceClient {
	return capsulev1.NewNetworkServiceClient(c.conn)
}

func (c *client) close() { _ = c.conn.Close() }

// dial makes a client for the machine at addr with this certificate. It connects with the first call.
func dial(name, addr, fingerprint string, more ...grpc.DialOption) (*client, error) {
	return (&client{name: name, addr: addr}).dial(fingerprint, more...)
}

func (c *client) dial(fingerprint string, more ...grpc.DialOption) (*client, error) {
	addr := c.addr
	conn, err := grpc.NewClient("passthrough:///"+addr, append([]grpc.DialOption{
		grpc.WithTransportCredentials(&pinned{credentials.NewTLS(capsulewire.PinnedTLS(fingerprint)), c}),
		grpc.WithContextDialer(c.connect), grpc.WithUnaryInterceptor(c.unary), grpc.WithStreamInterceptor(c.stream),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: aliveTime, Timeout: connectTime, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: connectTime}),
	}, more...)...)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "the address %s: %w", addr, err)
	}
	c.conn = conn
	return c, nil
}

func (c *client) connect(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: connectTime}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		c.unreached.Store(&err)
		return nil, err
	}
	c.unreached.Store(nil)
	return conn, nil
}

// pinned remembers why a certificate was refused, which gRPC only passes on as text.
type pinned struct {
	credentials.TransportCredentials
	c *client
}

func (p *pinned) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := p.TransportCredentials.ClientHandshake(ctx, authority, conn)
	switch {
	case err == nil:
		p.c.stranger.Store(nil)
	case errdefs.Is(err, errdefs.Unauthenticated):
		p.c.stranger.Store(&err)
	}
	return secure, info, err
}

func (p *pinned) Clone() credentials.TransportCredentials {
	return &pinned{p.TransportCredentials.Clone(), p.c}
}

// unary bounds a call and gives its error a class and the remedy.
func (c *client) unary(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(o, grpc.Trailer(&trailer))...)
	if c.clock.learn(err, trailer) {
		err = invoke(ctx, method, req, reply, conn, o...)
	}
	return c.fault(err)
}

func (c *client) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, o ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if !c.clock.known.Load() { // a stream cannot be begun again when its token was refused
		_, _ = c.identity().WhoAmI(ctx, &capsulev1.WhoAmIRequest{}) // if it fails, so does the stream
	}
	s, err := open(ctx, desc, conn, method, o...)
	if err != nil {
		return nil, c.fault(err)
	}
	return &faultStream{s, c}, nil
}

type faultStream struct {
	grpc.ClientStream
	c *client
}

func (s *faultStream) RecvMsg(m any) error { return s.c.fault(s.ClientStream.RecvMsg(m)) }
func (s *faultStream) SendMsg(m any) error { return s.c.fault(s.ClientStream.SendMsg(m)) }

// fault gives what a call returned a class, and one sentence with the remedy.
func (c *client) fault(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	code, plain := status.Code(err), grpcerr.FromStatus(err)
	switch code {
	case codes.Unavailable:
		if why := c.stranger.Load(); why != nil {
			return errdefs.New(errdefs.Unauthenticated, "%s at %s is not the machine that was adopted: %w; if you installed it anew, run `capsulectl context rm %s`"+
				" and adopt it again, otherwise somebody may be in between", c.name, c.addr, *why, c.name)
		}
		if why := c.unreached.Load(); why != nil {
			return errdefs.New(errdefs.Unavailable, "%s cannot be reached at %s: %w; `capsulectl discover` shows the machines that are on, and where", c.name, c.addr, *why)
		}
		return errdefs.New(errdefs.Unavailable, "the connection to %s at %s ended: %w", c.name, c.addr, plain)
	case codes.Unauthenticated:
		return errdefs.New(errdefs.Unauthenticated, "%s does not accept this key: %w; if it was never enrolled, `capsulectl key show` prints it for an operator of %s,"+
			" who runs `capsulectl key add`; if it was, compare the clocks", c.name, plain, c.name)
	case codes.PermissionDenied:
		return errdefs.New(errdefs.PermissionDenied, "%w; `capsulectl whoami` shows your role, and an operator with the role admin can give you another", plain)
	case codes.Unimplemented:
		return errdefs.New(errdefs.Unsupported, "%s cannot do this, at least in its version: %w", c.name, plain)
	case codes.DeadlineExceeded:
		return errdefs.New(errdefs.DeadlineExceeded, "%s did not answer in time: %w", c.name, plain)
	default:
		return plain
	}
}

// open makes a client for the context that --capsule means.
func (a *app) open() (*client, error) { return a.openAt("") }

// openAt is open for a machine that is at another address than its context says; "": at that.
func (a *app) openAt(addr string) (*client, error) {
	dir, err := a.configDir()
	if err != nil {
		return nil, err
	}
	contexts, err := config.Load(dir)
	if err != nil {
		return nil, err
	}
	name, x, err := contexts.Resolve(a.target)
	if err != nil {
		return nil, err
	}
	if x.Addr == "" || x.CapsuleID == "" || !capsulewire.IsFingerprint(x.TLSFingerprint) || x.KeyPath == "" {
		return nil, errdefs.Invalidf("the context %s lacks an address, ID, fingerprint or key; run `capsulectl context rm %s` and adopt it again", name, name)
	}
	key, err := config.LoadKey(x.KeyPath)
	if err != nil {
		return nil, fmt.Errorf("the context %s: %w", name, err)
	}
	c := &client{name: name, addr: cmp.Or(addr, x.Addr)}
	return c.dial(x.TLSFingerprint, grpc.WithPerRPCCredentials(capsulewire.CredentialsAt(key, x.CapsuleID, c.clock.now)))
}

// calling makes a command of fn, which runs with a connection to the machine.
func (a *app) calling(fn func(ctx context.Context, c *client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.open()
		if err != nil {
			return err
		}
		defer c.close()
		return fn(cmd.Context(), c, args)
	}
}

// sender is the part of a stream that takes chunks.
type sender[M any] interface{ Send(M) error }

// sendAll sends what is read in messages. When the other side has ended the stream it stops without an error, because the answer says
// why.
func sendAll[M any](s sender[M], r io.Reader, chunk func([]byte) M) error {
	for {
		buf := make([]byte, chunkSize) // gRPC may keep it
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			switch err := s.Send(chunk(buf[:n])); {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return errdefs.New(errdefs.InvalidArgument, "read what is sent: %w", err)
		}
	}
}

// receiver is the part of a stream that gives chunks.
type receiver[M any] interface{ Recv() (M, error) }

// chunks reads a stream of chunks.
type chunks[M any] struct {
	from receiver[M]
	data func(M) []byte
	rest []byte
}

func (c *chunks[M]) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		m, err := c.from.Recv()
		if err != nil {
			return 0, err
		}
		c.rest = c.data(m)
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// writeAll writes a stream of chunks.
func writeAll[M any](w io.Writer, from receiver[M], data func(M) []byte) error {
	_, err := io.Copy(w, &chunks[M]{from: from, data: data})
	return err
}
