package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/cri-streaming/pkg/streaming"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"cocoonstack.io/cocoon/internal/guest"
)

// urls serves the streams of exec, attach and port-forward. It listens on loopback only, and a client needs the token of the URL that
// the kubelet has asked for, which is valid once and for a minute.
type urls struct {
	server   streaming.Server
	listener net.Listener
}

func newURLs(s *Service) (*urls, error) {
	l, err := (&net.ListenConfig{}).Listen(s.life, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for exec, attach and port-forward: %w", err)
	}
	cfg := streaming.DefaultConfig
	cfg.Addr = l.Addr().String()
	cfg.BaseURL = &url.URL{Scheme: "http", Host: cfg.Addr}
	server, err := streaming.NewServer(cfg, streams{s})
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("serve exec, attach and port-forward: %w", err)
	}
	return &urls{server, l}, nil
}

// headerTime limits how long a client may take to say what it wants.
const headerTime = 10 * time.Second

func (u *urls) run(ctx context.Context) error {
	server := &http.Server{Handler: u.server, ReadHeaderTimeout: headerTime}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		<-gctx.Done()
		return server.Close()
	})
	g.Go(func() error {
		if err := server.Serve(u.listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve exec, attach and port-forward: %w", err)
		}
		return nil
	})
	return g.Wait()
}

// streams implements streaming.Runtime.
type streams struct{ s *Service }

// Exec runs a command in a container.
func (t streams) Exec(ctx context.Context, id string, cmd []string, in io.Reader, out, err io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize) error {
	r, e, failed := t.s.running(ctx, id)
	if failed != nil {
		return failed
	}
	code, failed := t.s.engine.Exec(ctx, string(r.ID), guest.Exec{Container: e.Spec.Name, Command: cmd, TTY: tty}, ends(ctx, in, out, err, resize))
	if failed == nil && code != 0 {
		failed = utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return failed
}

// Attach connects to the streams of a container.
func (t streams) Attach(ctx context.Context, id string, in io.Reader, out, err io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize) error {
	r, e, failed := t.s.running(ctx, id)
	if failed != nil {
		return failed
	}
	if r.Boots(e.Spec.Name) {
		return t.console(ctx, r, ends(ctx, in, out, err, resize))
	}
	return t.s.engine.Attach(ctx, string(r.ID), guest.Attach{Container: e.Spec.Name}, ends(ctx, in, out, err, resize))
}

// PortForward connects to a port from inside the guest.
func (t streams) PortForward(ctx context.Context, id string, port int32, stream io.ReadWriteCloser) error {
	r, err := t.s.sandbox(ctx, id)
	if err != nil {
		return err
	}
	if r.BootContainer != "" { // nothing of ours is in the guest
		return dial(ctx, r, port, stream)
	}
	return t.s.engine.Forward(ctx, string(r.ID), int(port), guest.Streams{Stdin: stream, Stdout: stream})
}

// ends returns the streams of a client. Interfaces that hold no stream become nil.
func ends(ctx context.Context, in io.Reader, out, err io.WriteCloser, resize <-chan remotecommand.TerminalSize) guest.Streams {
	var s guest.Streams
	if in != nil {
		s.Stdin = in
	}
	if out != nil {
		s.Stdout = out
	}
	if err != nil {
		s.Stderr = err
	}
	if resize != nil {
		sizes := make(chan guest.WinSize)
		s.Resize = sizes
		go func() {
			defer close(sizes)
			for size := range resize {
				select {
				case sizes <- guest.WinSize{Rows: size.Height, Cols: size.Width}:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return s
}
