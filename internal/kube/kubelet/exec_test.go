package kubelet

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// commands returns the commands that the tests run in the guest.
func commands(t *testing.T) map[string]func(context.Context, guest.Exec, guest.Streams) (int, error) {
	return map[string]func(context.Context, guest.Exec, guest.Streams) (int, error){
		"seven": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			fmt.Fprint(s.Stdout, "out")
			fmt.Fprint(s.Stderr, "err")
			return 7, nil
		},
		"cat": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			_, err := io.Copy(s.Stdout, s.Stdin)
			return 0, err
		},
		"size": func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error) {
			if !e.TTY || s.Stderr != nil {
				t.Errorf("no terminal, or a terminal with stderr: %+v", e)
			}
			for {
				select {
				case w, ok := <-s.Resize:
					if !ok {
						return 1, errors.New("sizes ended")
					}
					fmt.Fprintf(s.Stdout, "%dx%d;", w.Cols, w.Rows)
					if w.Cols == 132 {
						return 0, nil
					}
				case <-ctx.Done():
					return 1, ctx.Err()
				}
			}
		},
		"broken": func(context.Context, guest.Exec, guest.Streams) (int, error) {
			return 0, errdefs.Unavailablef("the guest does not answer")
		},
		"wait": func(ctx context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			fmt.Fprint(s.Stdout, "waiting")
			<-ctx.Done()
			fmt.Fprint(s.Stdout, "never seen")
			return 137, ctx.Err()
		},
		"big": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			_, err := s.Stdout.Write(bytes.Repeat([]byte("0123456789abcdef"), 1<<16))
			return 0, err
		},
	}
}

// executors returns clients with both transports: SPDY, which the API server uses, and a websocket.
func (n *node) executors(t *testing.T, pod, command string, o remotecommand.StreamOptions) map[string]remotecommand.Executor {
	t.Helper()
	q := url.Values{"command": {command}}
	for key, on := range map[string]bool{"input": o.Stdin != nil, "output": o.Stdout != nil, "error": o.Stderr != nil && !o.Tty, "tty": o.Tty} {
		if on {
			q.Set(key, "1")
		}
	}
	u, err := url.Parse(n.addr + "/exec/default/" + pod + "/c?" + q.Encode())
	if err != nil {
		t.Fatal(err)
	}
	cfg := &rest.Config{Host: n.addr, BearerToken: "good", TLSClientConfig: rest.TLSClientConfig{CAData: n.caPEM()}}
	overSPDY, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
	if err != nil {
		t.Fatal(err)
	}
	overSocket, err := remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
	if err != nil {
		t.Fatal(err)
	}
	return map[string]remotecommand.Executor{"spdy": overSPDY, "websocket": overSocket}
}

func (n *node) caPEM() []byte {
	c := &tls.Config{RootCAs: n.pool, InsecureSkipVerify: true} //nolint:gosec // fetches the certificate that the test trusts afterwards
	conn, err := tls.Dial("tcp", strings.TrimPrefix(n.addr, "https://"), c)
	if err != nil {
		return nil
	}
	defer conn.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: conn.ConnectionState().PeerCertificates[0].Raw})
}

// both runs a command over both transports.
func both(t *testing.T, n *node, pod, command string, options func() remotecommand.StreamOptions, check func(t *testing.T, o remotecommand.StreamOptions, err error)) {
	for _, name := range []string{"spdy", "websocket"} {
		t.Run(name, func(t *testing.T) {
			o := options()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			err := n.executors(t, pod, command, o)[name].StreamWithContext(ctx, o)
			check(t, o, err)
		})
	}
}

func TestExecExitCodeAndStreams(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "seven",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			code := clientexec.CodeExitError{}
			if !errors.As(err, &code) || code.Code != 7 {
				t.Errorf("error %v, want exit code 7", err)
			}
			if o.Stdout.(*bytes.Buffer).String() != "out" || o.Stderr.(*bytes.Buffer).String() != "err" {
				t.Errorf("output %q and %q", o.Stdout, o.Stderr)
			}
		})
}

func TestExecStdinEnds(t *testing.T) {
	n := serve(t)
	long := strings.Repeat("line\n", 50000)
	both(t, n, "web", "cat",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{Stdin: strings.NewReader(long), Stdout: &bytes.Buffer{}}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if err != nil {
				t.Error(err)
			}
			if got := o.Stdout.(*bytes.Buffer).String(); got != long {
				t.Errorf("%d bytes came back of %d", len(got), len(long))
			}
		})
}

func TestExecMuchOutput(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "big",
		func() remotecommand.StreamOptions { return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}} },
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if got := o.Stdout.(*bytes.Buffer).Len(); err != nil || got != 1<<20 {
				t.Errorf("%d bytes, %v", got, err)
			}
		})
}

// window is a terminal that changes its size after the first size was sent.
type window struct {
	mu    sync.Mutex
	sizes []remotecommand.TerminalSize
}

func (w *window) Next() *remotecommand.TerminalSize {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sizes) == 0 {
		return nil
	}
	s := w.sizes[0]
	w.sizes = w.sizes[1:]
	return &s
}

func TestExecTerminalSizes(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "size",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{
				Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Tty: true,
				TerminalSizeQueue: &window{sizes: []remotecommand.TerminalSize{{Width: 80, Height: 24}, {Width: 132, Height: 50}}},
			}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if got := o.Stdout.(*bytes.Buffer).String(); err != nil || got != "80x24;132x50;" {
				t.Errorf("sizes %q, %v", got, err)
			}
		})
}

func TestExecErrorsAreTold(t *testing.T) {
	n := serve(t)
	for _, tc := range []struct{ pod, command, want string }{
		{"web", "broken", "the guest does not answer"},
		{"nobody", "cat", `pod "nobody" not found`},
	} {
		both(t, n, tc.pod, tc.command,
			func() remotecommand.StreamOptions { return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}} },
			func(t *testing.T, _ remotecommand.StreamOptions, err error) {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error %v, want %q", err, tc.want)
				}
			})
	}
}

// signal is a writer that signals each write.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func (s *signal) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.c) })
	return len(p), nil
}

func TestExecEndsWithItsClient(t *testing.T) {
	n := serve(t)
	for _, name := range []string{"spdy", "websocket"} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan struct{})
			wait := commands(t)["wait"]
			n.backend.commands["wait"] = func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error) {
				defer close(ended)
				return wait(ctx, e, s)
			}
			out := &signal{c: make(chan struct{})}
			o := remotecommand.StreamOptions{Stdout: out}
			ctx, cancel := context.WithCancel(t.Context())
			returned := make(chan struct{})
			go func() {
				defer close(returned)
				_ = n.executors(t, "web", "wait", o)[name].StreamWithContext(ctx, o)
			}()
			<-out.c
			cancel()
			<-returned
			select {
			case <-ended:
			case <-time.After(time.Minute):
				t.Error("the command still runs after its client disconnected")
			}
		})
	}
}
