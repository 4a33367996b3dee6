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

// forwardGrace is how long a guest may go on answering when the client has said its last word.
const forwardGrace = time.Minute

// portForward carries connections of kubectl port-forward to the guest, any number over one session.
func (s *Server) portForward(w http.ResponseWriter, r *http.Request) {
	s.streams.Add(1)
	defer s.streams.Done()
	handler := vkapi.HandlePortForward(s.forward, vkapi.WithPortForwardStreamIdleTimeout(streamIdle), vkapi.WithPortForwardCreationTimeout(streamCreate))
	gone, stop := onHijack(s.life, w) //nolint:contextcheck // the request ends where the connection is taken over; the server's life ends it
	defer stop()
	handler(gone, mux.SetURLVars(r, map[string]string{"namespace": r.PathValue("namespace"), "pod": r.PathValue("pod")}))
}

// forward carries one connection.
func (s *Server) forward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	conn, err := s.cfg.Backend.Dial(ctx, namespace, pod, int(port))
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
		_ = conn.SetReadDeadline(time.Now().Add(forwardGrace)) // the client may be gone altogether
	}()
	_, err = io.Copy(stream, conn)
	return err
}

// onHijack returns w such that a connection that is taken over from it is closed when ctx ends: nothing else would end a
// session whose client stays. stop lets go of it.
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
