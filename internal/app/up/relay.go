package up

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"

	"golang.org/x/net/netutil"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// mostRelayed is how many connections a relay has at a time; more wait.
const mostRelayed = 1024

// relay passes connections on to a server on loopback. Endpoints of Services may not be on loopback.
type relay struct {
	ln     net.Listener
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// startRelay listens on a free port of addr until Close, and passes connections on to target. They outlive ctx.
func startRelay(ctx context.Context, addr, target string) (*relay, error) {
	ln, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		return nil, errdefs.Unavailablef("listen for guests on %s: %w", addr, err)
	}
	return relayOn(ctx, ln, target), nil
}

// relayOn passes connections to ln on to target until Close. They outlive ctx.
func relayOn(ctx context.Context, ln net.Listener, target string) *relay {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &relay{ln: ln, cancel: cancel}
	r.done.Go(func() {
		limited := netutil.LimitListener(ln, mostRelayed)
		for {
			in, err := limited.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				r.done.Go(func() { pass(ctx, in, target) })
			}
		}
	})
	return r
}

// Port returns the port that r listens on.
func (r *relay) Port() int {
	_, port, _ := net.SplitHostPort(r.ln.Addr().String())
	n, _ := strconv.Atoi(port)
	return n
}

// Close ends all connections and returns when they have ended.
func (r *relay) Close() {
	r.cancel()
	_ = r.ln.Close()
	r.done.Wait()
}

// pass copies what both sides send until both have ended, or ctx does.
func pass(ctx context.Context, in net.Conn, target string) {
	defer in.Close()
	out, err := (&net.Dialer{}).DialContext(ctx, "tcp", target)
	if err != nil {
		return // the client sees the connection end, as if the server had refused it
	}
	defer out.Close()
	stop := context.AfterFunc(ctx, func() { in.Close(); out.Close() })
	defer stop()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, err := io.Copy(way[0], way[1])
			if end, ok := way[0].(interface{ CloseWrite() error }); err == nil && ok {
				_ = end.CloseWrite()
				return
			}
			in.Close()
			out.Close()
		})
	}
	both.Wait()
}
