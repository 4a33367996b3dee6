package kubelet

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/gorilla/mux"
	vkapi "github.com/virtual-kubelet/virtual-kubelet/node/api"
)

// forwardGrace is how long a guest may keep sending after the client has closed its side.
const forwardGrace = time.Minute

// portForward forwards connections of kubectl port-forward to the guest. One session carries any number of connections.
func (s *Server) portForward(w http.ResponseWriter, r *http.Request) {
	s.streams.Add(1)
	defer s.streams.Done()
	handler := vkapi.HandlePortForward(s.forward, vkapi.WithPortForwardStreamIdleTimeout(streamIdle), vkapi.WithPortForwardCreationTimeout(streamCreate))
	gone, stop := onHijack(s.life, w) //nolint:contextcheck // the request's context does not end a hijacked connection; the server's context does
	defer stop()
	handler(gone, mux.SetURLVars(r, map[string]string{"namespace": r.PathValue("namespace"), "pod": r.PathValue("pod")}))
}

// forward forwards one connection.
func (s *Server) forward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	end := &graceStream{ReadWriter: stream, cancel: cancel}
	defer end.stop()
	return s.cfg.Backend.Forward(ctx, namespace, pod, int(port), end)
}

// graceStream cancels the connection forwardGrace after its client has closed its side, because the client may be gone.
type graceStream struct {
	io.ReadWriter
	cancel func()

	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

func (l *graceStream) Read(p []byte) (int, error) {
	n, err := l.ReadWriter.Read(p)
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.timer == nil && !l.over {
			l.timer = time.AfterFunc(forwardGrace, l.cancel)
		}
	}
	return n, err
}

func (l *graceStream) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	if l.timer != nil {
		l.timer.Stop()
	}
}

// onHijack wraps w so that its hijacked connection is closed when ctx ends, because a session would otherwise last as long as
// its client. The second result stops watching ctx.
func onHijack(ctx context.Context, w http.ResponseWriter) (http.ResponseWriter, func() bool) {
	h := &hijackable{ResponseWriter: w}
	return h, context.AfterFunc(ctx, h.end)
}

type hijackable struct {
	http.ResponseWriter
	mu   sync.Mutex
	conn net.Conn
	over bool
}

func (h *hijackable) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	if h.conn != nil {
		h.conn.Close()
	}
}

// Hijack implements http.Hijacker.
func (h *hijackable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return c, rw, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn = c; h.over {
		c.Close()
	}
	return c, rw, nil
}
