package nodeclient

import (
	"context"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Console connects to the VM's serial console. ctx limits only the connecting; the console stays open until Close.
func (c *Client) Console(ctx context.Context, ref string) (io.ReadWriteCloser, error) {
	return c.connect(ctx, c.vms.Console, &nodev1.ConsoleRequest{Of: &nodev1.ConsoleRequest_Ref{Ref: ref}})
}

// Display connects to the VM's screen; see guest.Displays. ctx limits only the connecting.
func (c *Client) Display(ctx context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	return c.connect(ctx, c.vms.Display, &nodev1.ConsoleRequest{Of: &nodev1.ConsoleRequest_Display{Display: &nodev1.DisplayOpen{Ref: ref, Keep: keep}}})
}

// Screenshot returns what the VM's screen shows, as a PNG.
func (c *Client) Screenshot(ctx context.Context, ref string, wake bool) (png []byte, err error) {
	err = follow(ctx, c, c.vms.Screenshot, &nodev1.ScreenshotRequest{Ref: ref, Wake: wake}, func(m *nodev1.ExportResponse) error {
		png = append(png, m.GetChunk()...)
		return nil
	})
	return png, err
}

// connect opens a stream whose first request is first.
func (c *Client) connect(ctx context.Context, open func(context.Context, ...grpc.CallOption) (nodev1.VMs_ConsoleClient, error), first *nodev1.ConsoleRequest) (io.ReadWriteCloser, error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	stream, err := open(life)
	if err != nil {
		cancel()
		return nil, c.fail(err, nil)
	}
	con := &console{client: c, stream: stream, cancel: cancel}
	// Recv returns the status of a failed Send.
	_ = stream.Send(first)
	if _, err := stream.Recv(); err != nil {
		cancel()
		return nil, c.fail(err, stream.Trailer())
	}
	if !stop() {
		cancel()
		return nil, ctx.Err()
	}
	return con, nil
}

type console struct {
	client *Client
	stream nodev1.VMs_ConsoleClient
	cancel context.CancelFunc

	left []byte // received and not read; Read is for one goroutine

	mu   sync.Mutex // guards Send
	once sync.Once  // guards Close
}

func (c *console) Read(p []byte) (int, error) {
	for len(c.left) == 0 {
		m, err := c.stream.Recv()
		if err != nil {
			c.cancel() // the stream has ended; its context is not needed any more
		}
		if isEOF(err) {
			return 0, io.EOF
		}
		if err != nil {
			return 0, c.client.fail(err, c.stream.Trailer())
		}
		c.left = m.GetData()
	}
	n := copy(p, c.left)
	c.left = c.left[n:]
	return n, nil
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for sent := 0; sent < len(p); {
		part := p[sent:min(len(p), sent+stdinChunk)]
		if err := c.stream.Send(&nodev1.ConsoleRequest{Of: &nodev1.ConsoleRequest_Data{Data: part}}); err != nil {
			return sent, errdefs.Unavailablef("the connection was closed by the other side")
		}
		sent += len(part)
	}
	return len(p), nil
}

// closePatience is the timeout for the last written bytes to reach the guest.
const closePatience = time.Second

// Close ends the connection once the node has received all written bytes; it does not wait long for a guest that does
// not read.
func (c *console) Close() error {
	c.once.Do(func() {
		time.AfterFunc(closePatience, c.cancel) // also ends a Write that holds the lock
		c.mu.Lock()
		defer c.mu.Unlock()
		_ = c.stream.CloseSend() // Read sees the node's end of the stream
	})
	return nil
}
