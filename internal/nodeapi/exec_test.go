package nodeapi_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestExecCarriesStreamsBothWays(t *testing.T) {
	s := &scripted{exec: func(ctx context.Context, ref string, e guest.Exec, st guest.Streams) (int, error) {
		if ref != "web" || e.Command[0] != "cat" {
			return 0, errdefs.Invalidf("wrong command %v", e)
		}
		_, _ = io.WriteString(st.Stderr, "warn")
		_, err := io.Copy(st.Stdout, st.Stdin)
		return 7, err
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	in := bytes.Repeat([]byte("0123456789abcdef"), 300_000) // 4.8 MB: many windows
	var out, errOut bytes.Buffer
	code, err := c.Exec(t.Context(), "web", guest.Exec{Command: []string{"cat"}}, guest.Streams{Stdin: bytes.NewReader(in), Stdout: &out, Stderr: &errOut})
	if err != nil || code != 7 || errOut.String() != "warn" || !bytes.Equal(out.Bytes(), in) {
		t.Fatalf("code %d, err %v, stderr %q, %d bytes of %d", code, err, errOut.String(), out.Len(), len(in))
	}
}

func TestExecSignalPassesUnreadStdin(t *testing.T) {
	s := &scripted{exec: func(ctx context.Context, _ string, _ guest.Exec, st guest.Streams) (int, error) {
		w := <-st.Resize // never reads stdin
		return int(w.Rows) + <-st.Signals, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	resize, signals := make(chan guest.WinSize, 1), make(chan int)
	endless := reader(func(p []byte) (int, error) { return len(p), nil })
	go func() { resize <- guest.WinSize{Rows: 40, Cols: 80}; signals <- 2 }()
	code, err := c.Exec(t.Context(), "x", guest.Exec{Command: []string{"sleep"}}, guest.Streams{Stdin: endless, Resize: resize, Signals: signals})
	if err != nil || code != 42 {
		t.Fatalf("code %d, %v", code, err)
	}
}

func TestExecWithoutStdinReadsNone(t *testing.T) {
	s := &scripted{exec: func(_ context.Context, _ string, _ guest.Exec, st guest.Streams) (int, error) {
		if st.Stdin != nil {
			return 1, nil
		}
		return 0, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	if code, err := c.Exec(t.Context(), "x", guest.Exec{Command: []string{"true"}}, guest.Streams{}); code != 0 || err != nil {
		t.Fatal(code, err)
	}
}

func TestAttachCarriesStreamsBothWays(t *testing.T) {
	want := guest.Attach{Container: "side", Rows: 40, Cols: 80}
	s := &scripted{attach: func(_ context.Context, ref string, a guest.Attach, st guest.Streams) error {
		if ref != "web" || a != want {
			return errdefs.Invalidf("attach to %s, %+v", ref, a)
		}
		if st.Stdin == nil {
			return nil
		}
		_, _ = io.WriteString(st.Stderr, "warn")
		_, err := io.Copy(st.Stdout, st.Stdin)
		return err
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	in := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	var out, errOut bytes.Buffer
	err := c.Attach(t.Context(), "web", want, guest.Streams{Stdin: bytes.NewReader(in), Stdout: &out, Stderr: &errOut})
	if err != nil || errOut.String() != "warn" || !bytes.Equal(out.Bytes(), in) {
		t.Errorf("%v, stderr %q, %d bytes of %d", err, errOut.String(), out.Len(), len(in))
	}
	if err := c.Attach(t.Context(), "web", want, guest.Streams{}); err != nil {
		t.Errorf("without input: %v", err)
	}
	if err := c.Attach(t.Context(), "db", want, guest.Streams{}); !errdefs.IsInvalid(err) {
		t.Errorf("an error comes back as %v", err)
	}
}

// Input that the caller wants to send is not lost if the connection fails.
func TestForwardReadsWhenConnected(t *testing.T) {
	s := &scripted{forward: func(_ context.Context, ref string, port int, st guest.Streams) error {
		if ref != "web" || port != 80 {
			return errdefs.Unavailablef("nobody listens on port %d of %s", port, ref)
		}
		_, _ = io.WriteString(st.Stdout, "hello ") // a server that sends first
		_, err := io.Copy(st.Stdout, st.Stdin)
		return err
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	in := strings.NewReader("kept")
	if err := c.Forward(t.Context(), "web", 81, guest.Streams{Stdin: in}); !errdefs.IsUnavailable(err) || in.Len() != 4 {
		t.Errorf("%v, %d bytes left", err, in.Len())
	}
	var out bytes.Buffer
	if err := c.Forward(t.Context(), "web", 80, guest.Streams{Stdin: in, Stdout: &out}); err != nil || out.String() != "hello kept" {
		t.Errorf("%v, %q", err, out.String())
	}
}

func TestExecEndsWithItsCaller(t *testing.T) {
	started, killed := make(chan struct{}), make(chan struct{})
	s := &scripted{exec: func(ctx context.Context, _ string, _ guest.Exec, _ guest.Streams) (int, error) {
		close(started)
		<-ctx.Done()
		close(killed)
		return 0, ctx.Err()
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-started; cancel() }()
	_, err := c.Exec(ctx, "x", guest.Exec{Command: []string{"sleep"}}, guest.Streams{Stdin: strings.NewReader("")})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-killed
}

// A client that does not read its output blocks only its own command, after a bounded number of bytes.
func TestSlowReaderIsBounded(t *testing.T) {
	var produced atomic.Int64
	stuck := make(chan struct{})
	s := &scripted{
		exec: func(ctx context.Context, _ string, _ guest.Exec, st guest.Streams) (int, error) {
			buf := make([]byte, 64<<10)
			for ctx.Err() == nil {
				if _, err := st.Stdout.Write(buf); err != nil {
					return 0, err
				}
				produced.Add(int64(len(buf)))
			}
			return 0, ctx.Err()
		},
		inspect: func(string) (vm.Record, error) { return vm.Record{ID: "ok"}, nil },
	}
	c, _ := serve(t, s, nodeapi.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var once atomic.Bool
	slow := writer(func(p []byte) (int, error) {
		if once.CompareAndSwap(false, true) {
			close(stuck)
		}
		<-ctx.Done()
		return 0, ctx.Err()
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = c.Exec(ctx, "x", guest.Exec{Command: []string{"yes"}}, guest.Streams{Stdout: slow})
	}()
	<-stuck
	// The producer stops once the windows are full: wait until two checks agree, and call the server meanwhile.
	for last := int64(-1); last != produced.Load(); {
		last = produced.Load()
		for range 200 {
			if _, err := c.Inspect(t.Context(), "ok"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := produced.Load(); n > 32<<20 {
		t.Errorf("the daemon took %d bytes for a client that reads nothing", n)
	}
	cancel()
	<-ended
}

func TestConsole(t *testing.T) {
	ours, theirs := net.Pipe()
	s := &scripted{console: func(_ context.Context, ref string) (io.ReadWriteCloser, error) {
		if ref != "web" {
			return nil, errdefs.Conflictf("the console of %s is in use", ref)
		}
		return theirs, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	if _, err := c.Console(t.Context(), "other"); errdefs.ClassOf(err) != errdefs.Conflict {
		t.Errorf("busy console: %v", err)
	}
	con, err := c.Console(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(ours, ours) }()
	if _, err := con.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(con, got); err != nil || string(got) != "hello" {
		t.Fatalf("%q, %v", got, err)
	}
	con.Close()
	if _, err := theirs.Read(make([]byte, 1)); err == nil {
		t.Error("the engine's side is still open")
	}
}
