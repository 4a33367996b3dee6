// Package nodeclient is the typed client of the node API: the engine of a running cocoond, as Go methods.
//
// Its methods have the names, signatures and error classes of the engine's own, so that a door accepts either. It
// starts no daemon and does not retry; a Client may be used by many goroutines.
package nodeclient

import (
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/nodewire"
)

// AnsweredKey is the trailer that cocoond sets on every answer: an error without it comes from the transport.
const AnsweredKey = "cocoon-answered"

const (
	maxMessage  = 16 << 20 // bytes of one message from the daemon; a record with a large environment must fit
	dialTimeout = 10 * time.Second
)

// Client talks to one cocoond.
type Client struct {
	target string
	conn   *grpc.ClientConn
	vms    nodev1.VMsClient
	images nodev1.ImagesClient
	node   nodev1.NodeClient

	snapshots nodev1.SnapshotsClient
	volumes   nodev1.VolumesClient
	plugins   nodev1.PluginsClient

	mu      sync.Mutex
	dialErr error // of the last attempt to connect, nil once it succeeded
}

// Dial prepares a client of the cocoond at the unix socket path; path may be longer than a socket address allows. It
// connects on the first call.
func Dial(path string) (*Client, error) {
	if path == "" {
		return nil, errdefs.Invalidf("the path of cocoond's socket is empty")
	}
	return dial(path, insecure.NewCredentials(), func(ctx context.Context) (net.Conn, error) { return dialUnix(ctx, path) },
		grpc.WithAuthority("cocoond"))
}

// DialTLS prepares a client of the cocoond at the TCP address host:port. cfg must hold the client certificate that the
// node requires.
func DialTLS(addr string, cfg *tls.Config) (*Client, error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, errdefs.Invalidf("node address %q is not host:port", addr)
	}
	cfg = cfg.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(addr)
	}
	return dial(addr, credentials.NewTLS(cfg), func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	}, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}))
}

func dial(target string, creds credentials.TransportCredentials, open func(context.Context) (net.Conn, error), more ...grpc.DialOption) (*Client, error) {
	c := &Client{target: target}
	opts := append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := open(ctx)
			c.mu.Lock()
			c.dialErr = err
			c.mu.Unlock()
			return conn, err
		}),
		// A restarted daemon is back in a second or two; with the default back-off the client would stay disconnected
		// for minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: dialTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithIdleTimeout(0), // a watch may be silent for hours
		grpc.WithUnaryInterceptor(unaryBehalf),
		grpc.WithStreamInterceptor(streamBehalf),
	}, more...)
	conn, err := grpc.NewClient("passthrough:///"+"cocoond", opts...)
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "prepare a client of cocoond at %s: %w", target, err)
	}
	c.conn = conn
	c.vms, c.images, c.node = nodev1.NewVMsClient(conn), nodev1.NewImagesClient(conn), nodev1.NewNodeClient(conn)
	c.snapshots, c.volumes, c.plugins = nodev1.NewSnapshotsClient(conn), nodev1.NewVolumesClient(conn), nodev1.NewPluginsClient(conn)
	return c, nil
}

// unaryBehalf and streamBehalf add to each call the owner on whose behalf it is made.
func unaryBehalf(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, err := nodewire.SendBehalf(ctx)
	if err != nil {
		return grpcerr.ToStatus(err)
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

func streamBehalf(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	ctx, err := nodewire.SendBehalf(ctx)
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	return open(ctx, desc, cc, method, opts...)
}

// Target is the socket path or address that the client was made for.
func (c *Client) Target() string { return c.target }

// Close ends the connection and every call in progress.
func (c *Client) Close() error { return c.conn.Close() }

// dialUnix connects to a socket whose path may exceed the 107 bytes of a socket address: such a path is reached through
// the descriptor of its folder.
func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	if len(path) < len(syscall.RawSockaddrUnix{}.Path) {
		return d.DialContext(ctx, "unix", path)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return d.DialContext(ctx, "unix", "/proc/self/fd/"+itoa(dir.Fd())+"/"+filepath.Base(path))
}

// fail gives err, the result of a call with the given trailer, its error class. Errors of the transport become one
// sentence that tells the user what to do.
func (c *Client) fail(err error, trailer metadata.MD) error {
	if err == nil {
		return nil
	}
	if status.Code(err) != codes.Unavailable || len(trailer.Get(AnsweredKey)) > 0 {
		return grpcerr.FromStatus(err)
	}
	c.mu.Lock()
	dialErr := c.dialErr
	c.mu.Unlock()
	switch {
	case errors.Is(dialErr, fs.ErrPermission):
		return errdefs.New(errdefs.FailedPrecondition, "no permission to talk to cocoond at %s: run as root or as a member of the group cocoon", c.target)
	case dialErr != nil:
		return errdefs.Unavailablef("cannot reach cocoond at %s: is it running? start it with `cocoond` or `cocoon up`", c.target)
	case strings.Contains(c.target, "/"):
		return errdefs.Unavailablef("lost the connection to cocoond at %s: it may be restarting, try again", c.target)
	}
	return errdefs.Unavailablef("no connection to cocoond at %s: is it up, and does it accept this client's certificate?", c.target)
}

// unary makes one call.
func unary[Req, Resp any](ctx context.Context, c *Client, call func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) (*Resp, error) {
	var trailer metadata.MD
	resp, err := call(ctx, req, grpc.Trailer(&trailer))
	if err != nil {
		return nil, c.fail(err, trailer)
	}
	return resp, nil
}

// do makes a call that has no answer.
func do[Req, Resp any](ctx context.Context, c *Client, call func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) error {
	_, err := unary(ctx, c, call, req)
	return err
}

// ask makes one call and decodes its answer.
func ask[Req, Resp, V any](ctx context.Context, c *Client, call func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req, decode func(*Resp) V) (v V, _ error) {
	m, err := unary(ctx, c, call, req)
	if err != nil {
		return v, err
	}
	return decode(m), nil
}

// streaming is a method whose answer is a stream.
type streaming[Req, M any] func(context.Context, *Req, ...grpc.CallOption) (grpc.ServerStreamingClient[M], error)

// list returns every message of a stream, decoded.
func list[Req, M, V any](ctx context.Context, c *Client, call streaming[Req, M], req *Req, decode func(*M) V) ([]V, error) {
	var all []V
	err := follow(ctx, c, call, req, func(m *M) error {
		all = append(all, decode(m))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// follow makes a call and receives its stream.
func follow[Req, M any](ctx context.Context, c *Client, call streaming[Req, M], req *Req, fn func(*M) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := call(ctx, req)
	return receive(c, stream, err, fn)
}

// receive calls fn with every message of a server stream until the stream ends (nil), it fails, or fn fails.
func receive[M any](c *Client, stream grpc.ServerStreamingClient[M], err error, fn func(*M) error) error {
	if err != nil {
		return c.fail(err, nil)
	}
	for {
		m, err := stream.Recv()
		if isEOF(err) {
			return nil
		}
		if err != nil {
			return c.fail(err, stream.Trailer())
		}
		if err := fn(m); err != nil {
			return err
		}
	}
}
