package link_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/guest/link/linktest"
)

// pipe is one transport: the guest's end, and how hosts reach it.
type pipe interface {
	link.Device
	Dial(ctx context.Context) (net.Conn, error)
}

// socketPipe is a socket on which the guest listens, as on its virtio socket.
type socketPipe struct {
	link.Device
	path string
}

func (s socketPipe) Dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", s.path)
}

func newSocket(t *testing.T) pipe {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 8))
	}
	if err != nil {
		t.Fatal(err)
	}
	dev, err := link.NewSocket(os.NewFile(uintptr(fd), path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return socketPipe{dev, path}
}

// each runs a test on every transport.
func each(t *testing.T, test func(t *testing.T, s pipe)) {
	t.Run("serial", func(t *testing.T) { test(t, linktest.New()) })
	t.Run("socket", func(t *testing.T) { test(t, newSocket(t)) })
}

// echo serves sessions that send back what they receive, until the port closes.
func echo(t *testing.T, dev link.Device) {
	t.Helper()
	port := link.NewPort(dev)
	port.HandlePlain(func(m []byte) []byte { return append([]byte("heard "), m...) })
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := port.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	t.Cleanup(func() {
		port.Close()
		<-done
	})
}

func talk(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatalf("write: %v", err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("read: %v", err)
	}
	if string(got) != text {
		t.Fatalf("sent %q, got %q", text, got)
	}
}

func open(t *testing.T, s pipe) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	raw, err := s.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c, err := link.Open(ctx, raw)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTwoHundredAbruptReconnects(t *testing.T) { each(t, testTwoHundredAbruptReconnects) }

func testTwoHundredAbruptReconnects(t *testing.T, s pipe) {
	echo(t, s)
	for i := range 200 {
		c := open(t, s)
		talk(t, c, fmt.Sprintf("hello %d", i))
		if i%2 == 0 { // leave with bytes in transit in both directions
			_, _ = c.Write(bytes.Repeat([]byte("x"), 10000))
		}
		c.Close()
	}
}

func TestHostWaitsForAGuestThatBoots(t *testing.T) { each(t, testHostWaitsForAGuestThatBoots) }

func testHostWaitsForAGuestThatBoots(t *testing.T, s pipe) {
	raw, err := s.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	opened := make(chan error, 1)
	go func() {
		c, err := link.Open(t.Context(), raw)
		if err == nil {
			talk(t, c, "late")
			c.Close()
		}
		opened <- err
	}()
	select {
	case err := <-opened:
		t.Fatalf("opened a session with nobody: %v", err)
	case <-time.After(120 * time.Millisecond):
	}
	echo(t, s)
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
}

func TestOpenEndsWithItsContext(t *testing.T) { each(t, testOpenEndsWithItsContext) }

func testOpenEndsWithItsContext(t *testing.T, s pipe) {
	defer s.Close()
	raw, err := s.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := link.Open(ctx, raw); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}

func TestOpenOnADeadPipeIsUnavailable(t *testing.T) { each(t, testOpenOnADeadPipeIsUnavailable) }

func testOpenOnADeadPipeIsUnavailable(t *testing.T, s pipe) {
	raw, err := s.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	s.Close()
	if _, err := link.Open(t.Context(), raw); !errdefs.IsUnavailable(err) {
		t.Fatalf("got %v", err)
	}
}

func TestClosingThePortEndsAccept(t *testing.T) { each(t, testClosingThePortEndsAccept) }

func testClosingThePortEndsAccept(t *testing.T, s pipe) {
	port := link.NewPort(s)
	done := make(chan error, 1)
	go func() {
		_, err := port.Accept()
		done <- err
	}()
	port.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Fatalf("got %v", err)
	}
}

func TestLargeTransferBothWays(t *testing.T) { each(t, testLargeTransferBothWays) }

func testLargeTransferBothWays(t *testing.T, s pipe) {
	echo(t, s)
	c := open(t, s)
	defer c.Close()
	text := string(bytes.Repeat([]byte("0123456789abcdef"), 1<<16))
	go func() { _, _ = io.WriteString(c, text) }()
	got := make([]byte, len(text))
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("1 MiB came back changed (err %v)", err)
	}
}

func TestPlainMessagesComeFirst(t *testing.T) { each(t, testPlainMessagesComeFirst) }

func testPlainMessagesComeFirst(t *testing.T, s pipe) {
	echo(t, s)
	ask := func(c net.Conn, text string) {
		t.Helper()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if got, err := link.Ask(c, []byte(text)); err != nil || string(got) != "heard "+text {
			t.Fatalf("answer %q, %v", got, err)
		}
	}
	for i := range 50 {
		c := open(t, s)
		for j := range i % 3 {
			ask(c, fmt.Sprint(i, j, string(bytes.Repeat([]byte("x"), i*1000))))
		}
		if i%7 == 0 { // leaves before it has sent anything else
			c.Close()
			continue
		}
		talk(t, c, fmt.Sprintf("hello %d", i))
		if i%2 == 0 {
			_, _ = c.Write(bytes.Repeat([]byte("x"), 10000))
		}
		c.Close()
	}
}

// TestNextHostDoesNotWaitForTheEndOfTheLast ends sessions only after the next one was opened and used.
func TestNextHostDoesNotWaitForTheEndOfTheLast(t *testing.T) {
	each(t, testNextHostDoesNotWaitForTheEndOfTheLast)
}

func testNextHostDoesNotWaitForTheEndOfTheLast(t *testing.T, s pipe) {
	defer s.Close()
	port := link.NewPort(s)
	port.HandlePlain(func(m []byte) []byte { return m })
	sessions := make(chan net.Conn, 1)
	go func() {
		defer close(sessions)
		for {
			c, err := port.Accept()
			if err != nil {
				return
			}
			sessions <- c
		}
	}()
	first := open(t, s)
	if _, err := io.WriteString(first, "one"); err != nil {
		t.Fatal(err)
	}
	guest := <-sessions
	buf := make([]byte, 10)
	if n, err := guest.Read(buf); err != nil || string(buf[:n]) != "one" {
		t.Fatalf("%q, %v", buf[:n], err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := guest.Read(buf)
		ended <- err
	}()
	first.Close()
	second := open(t, s) // the guest's end of the first session is still open
	if got, err := link.Ask(second, []byte("two")); err != nil || string(got) != "two" {
		t.Fatalf("%q, %v", got, err)
	}
	if n, err := guest.Write([]byte("for nobody")); n != 10 || err != nil {
		t.Errorf("a write of the first session: %d, %v", n, err)
	}
	if _, err := io.WriteString(second, "three"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the first session ended with %v", err)
	}
	if _, err := guest.Read(buf); !errors.Is(err, io.EOF) {
		t.Errorf("and then with %v", err)
	}
	guest.Close()
	guest = <-sessions
	if n, err := guest.Read(buf); err != nil || string(buf[:n]) != "three" {
		t.Errorf("the second session begins with %q, %v", buf[:n], err)
	}
	if _, err := guest.Write([]byte("four")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(second, buf[:4]); err != nil || string(buf[:4]) != "four" {
		t.Errorf("the second host got %q, %v", buf[:4], err)
	}
	second.Close()
	port.Close()
	guest.Close()
	<-sessions
}

// A guest that was saved and resumes elsewhere still has its old host, which says nothing any more. The next one is served.
func TestNextHostTakesOver(t *testing.T) {
	s := newSocket(t)
	echo(t, s)
	old := open(t, s)
	defer old.Close()
	talk(t, old, "before")
	for range 3 {
		next := open(t, s)
		defer next.Close()
		talk(t, next, "after")
	}
	_ = old.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.Copy(io.Discard, old); err != nil {
		t.Errorf("the old host is told: %v", err)
	}
}
