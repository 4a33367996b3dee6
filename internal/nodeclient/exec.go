package nodeclient

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodewire"
)

const stdinChunk = 32 << 10 // bytes

// Exec runs a command in the guest and returns its exit code. Cancelling ctx kills the command. See talk for s.Stdin.
func (c *Client) Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error) {
	return c.talk(ctx, c.vms.Exec, nodewire.EncodeExec(ref, e, s.Stdin != nil), s)
}

// Attach connects to the standard streams of a guest's process; see guest.Attacher. See talk for s.Stdin.
func (c *Client) Attach(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error {
	_, err := c.talk(ctx, c.vms.Attach, nodewire.EncodeAttach(ref, a, s.Stdin != nil), s)
	return err
}

// Forward connects to a TCP port in the guest; see guest.Forwarder. See talk for s.Stdin.
func (c *Client) Forward(ctx context.Context, ref string, port int, s guest.Streams) error {
	_, err := c.talk(ctx, c.vms.Forward, &nodev1.ExecStart{Ref: ref, Port: uint32(max(port, 0))}, s)
	return err
}

// talk carries streams to and from what a call started in the guest, and returns the exit code. It reads s.Stdin only
// after the start. A Read that is in progress at the end finishes on its own, and its bytes are dropped.
func (c *Client) talk(
	ctx context.Context, call func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[nodev1.ExecRequest, nodev1.ExecResponse], error),
	start *nodev1.ExecStart, s guest.Streams,
) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := call(ctx)
	if err != nil {
		cancel()
		return 0, c.fail(err, nil)
	}
	x := &execution{ctx: ctx, client: c, stream: stream, credit: credit{wake: make(chan struct{}, 1)}}
	var pumps sync.WaitGroup
	defer pumps.Wait()
	defer cancel()

	x.send(&nodev1.ExecRequest{Of: &nodev1.ExecRequest_Start{Start: start}})
	if s.Stdin != nil {
		go x.pumpStdin(s.Stdin) // not waited for: a terminal's Read cannot be interrupted
	}
	pumps.Go(func() {
		pump(x, s.Resize, func(w guest.WinSize) *nodev1.ExecRequest {
			return &nodev1.ExecRequest{Of: &nodev1.ExecRequest_Resize{Resize: nodewire.EncodeWinSize(w)}}
		})
	})
	pumps.Go(func() {
		pump(x, s.Signals, func(n int) *nodev1.ExecRequest {
			return &nodev1.ExecRequest{Of: &nodev1.ExecRequest_Signal{Signal: int32(n)}}
		})
	})
	return x.receive(s)
}

// execution is one running call with streams.
type execution struct {
	ctx    context.Context // of the call; it lives as long as the execution
	client *Client
	stream grpc.BidiStreamingClient[nodev1.ExecRequest, nodev1.ExecResponse]
	credit credit

	mu sync.Mutex // guards Send, which must not run concurrently
}

// send drops its error: Recv reports a broken stream, with its status.
func (x *execution) send(m *nodev1.ExecRequest) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.stream.Send(m) == nil
}

func (x *execution) receive(s guest.Streams) (int, error) {
	for {
		m, err := x.stream.Recv()
		if isEOF(err) {
			return 0, errdefs.New(errdefs.Internal, "cocoond ended the command without an exit code")
		}
		if err != nil {
			return 0, x.client.fail(err, x.stream.Trailer())
		}
		switch of := m.GetOf().(type) {
		case *nodev1.ExecResponse_Started:
			x.credit.give(int(of.Started.GetStdinWindow()))
		case *nodev1.ExecResponse_StdinCredit:
			x.credit.give(int(of.StdinCredit))
		case *nodev1.ExecResponse_Stdout:
			err = deliver(s.Stdout, of.Stdout)
		case *nodev1.ExecResponse_Stderr:
			err = deliver(s.Stderr, of.Stderr)
		case *nodev1.ExecResponse_ExitCode:
			return int(of.ExitCode), nil
		}
		if err != nil {
			return 0, err
		}
	}
}

func deliver(w io.Writer, b []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(b)
	return err
}

func (x *execution) pumpStdin(r io.Reader) {
	buf := make([]byte, stdinChunk)
	for {
		allowed, ok := x.credit.take(x.ctx, len(buf))
		if !ok {
			return
		}
		n, err := r.Read(buf[:allowed])
		x.credit.give(allowed - n)
		if n > 0 && !x.send(&nodev1.ExecRequest{Of: &nodev1.ExecRequest_Stdin{Stdin: buf[:n]}}) {
			return
		}
		if err != nil {
			x.send(&nodev1.ExecRequest{Of: &nodev1.ExecRequest_StdinClose{StdinClose: true}})
			return
		}
	}
}

func pump[T any](x *execution, in <-chan T, message func(T) *nodev1.ExecRequest) {
	for {
		select {
		case v, ok := <-in: // a nil channel blocks forever, as intended
			if !ok || !x.send(message(v)) {
				return
			}
		case <-x.ctx.Done():
			return
		}
	}
}

// credit counts the bytes of stdin that may be sent. One goroutine takes; any number may add.
type credit struct {
	mu   sync.Mutex
	n    int
	wake chan struct{} // capacity 1
}

func (c *credit) give(n int) {
	c.mu.Lock()
	c.n += n
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// take waits for credit and takes at most limit of it; false when ctx ended first.
func (c *credit) take(ctx context.Context, limit int) (int, bool) {
	for {
		c.mu.Lock()
		n := min(c.n, limit)
		c.n -= n
		c.mu.Unlock()
		if n > 0 {
			return n, true
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return 0, false
		}
	}
}
