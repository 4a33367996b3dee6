package aggregated

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// fakeGuests echo what they are sent.
type fakeGuests struct {
	mu     sync.Mutex
	pods   []string
	hang   chan struct{} // not nil: connecting waits for it
	fails  error         // of connecting
	failed error         // of the end
	halves int           // how often a client's side was closed

	picture [][]byte // of a screen, in parts
}

func (g *fakeGuests) attach(ctx context.Context, pod types.NamespacedName, in io.Reader, out io.Writer) error {
	g.note("attach " + pod.String())
	return g.echo(ctx, in, out)
}

func (g *fakeGuests) echo(ctx context.Context, in io.Reader, out io.Writer) error {
	if err := g.connect(ctx); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		buf := make([]byte, 100)
		for {
			n, err := in.Read(buf)
			if err != nil {
				ended <- nil
				return
			}
			if string(buf[:n]) == "poweroff" {
				ended <- g.failed
				return
			}
			if _, err := out.Write(buf[:n]); err != nil {
				ended <- err
				return
			}
		}
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *fakeGuests) connect(ctx context.Context) error {
	if g.hang != nil {
		select {
		case <-g.hang:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return g.fails
}

func (g *fakeGuests) note(what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pods = append(g.pods, what)
}

func (g *fakeGuests) calls() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strings.Join(g.pods, ",")
}

func (g *fakeGuests) forward(ctx context.Context, pod types.NamespacedName, port uint16) (tunnel, error) {
	g.note(fmt.Sprintf("forward %s %d", pod, port))
	if err := g.connect(ctx); err != nil {
		return nil, err
	}
	near, far := net.Pipe()
	t := &fakeTunnel{Conn: near, g: g}
	t.stop = context.AfterFunc(ctx, func() { near.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			n, err := far.Read(buf)
			if err != nil || string(buf[:n]) == "quit" {
				far.Close()
				return
			}
			_, _ = far.Write(buf[:n])
		}
	}()
	return t, nil
}

type fakeTunnel struct {
	net.Conn
	g    *fakeGuests
	stop func() bool
}

func (t *fakeTunnel) CloseWrite() error {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.halves++
	return nil
}

// closed returns how often a client's side was closed.
func (g *fakeGuests) closed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.halves
}

func (t *fakeTunnel) Result() error { return t.g.failed }

func (t *fakeTunnel) Close() error {
	t.stop()
	return t.Conn.Close()
}
