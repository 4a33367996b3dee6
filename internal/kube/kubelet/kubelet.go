// Package kubelet serves the part of the kubelet's HTTPS API that kubectl and the API server use: exec, attach, port-forward,
// logs, lists of pods, health. Every request is authenticated and authorized as in the kubelet.
//
// The package accesses pods only through its Backend and does not control their lifecycle.
package kubelet

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// Backend gives access to the pods.
type Backend interface {
	GetPods(ctx context.Context) ([]*corev1.Pod, error)
	Exec(ctx context.Context, namespace, pod, container string, e guest.Exec, s guest.Streams) (int, error)
	Logs(ctx context.Context, namespace, pod, container string, o guest.LogOptions, fn func(guest.LogEntry) error) error
	// Attach connects to the standard files of a container.
	Attach(ctx context.Context, namespace, pod, container string, a guest.Attach, s guest.Streams) error
	// Display and Screenshot are those of guest.Displays.
	Display(ctx context.Context, namespace, pod, container string, keep bool) (io.ReadWriteCloser, error)
	Screenshot(ctx context.Context, namespace, pod, container string, wake bool) ([]byte, error)
	// Describe is that of guest.Describes.
	Describe(ctx context.Context, namespace, pod, container string) (guest.Description, error)
	// Freeze and Thaw are those of guest.Freezes.
	Freeze(ctx context.Context, namespace, pod, container string, most time.Duration) error
	Thaw(ctx context.Context, namespace, pod, container string) (held bool, err error)
	// Forward copies data between stream and a TCP port of the pod's guest until the guest closes its side.
	Forward(ctx context.Context, namespace, pod string, port int, stream io.ReadWriter) error
}

// Config configures a Server. TLS must hold a certificate.
type Config struct {
	Addr    string // host:port to listen on
	TLS     *tls.Config
	Auth    Auth
	Backend Backend
	Healthy func() error // nil: always healthy
	// More are additional routes, by http.ServeMux pattern, behind the same authentication.
	More map[string]http.Handler
	Log  *slog.Logger
}

// Server is the kubelet API of one virtual node.
type Server struct {
	cfg     Config
	handler http.Handler
	streams sync.WaitGroup // sessions, for which http.Server does not wait
	life    context.Context

	pictures pictures
}

// Limits of a streaming session, as in the kubelet.
const (
	streamIdle   = 4 * time.Hour
	streamCreate = 30 * time.Second
)

// New returns a server. It does not listen before Listen.
func New(cfg Config) (*Server, error) {
	if cfg.TLS == nil || cfg.Auth == nil || cfg.Backend == nil || cfg.Log == nil {
		return nil, errdefs.Invalidf("the kubelet API needs TLS, authentication, a backend and a logger")
	}
	if _, _, err := net.SplitHostPort(cfg.Addr); err != nil {
		return nil, errdefs.Invalidf("kubelet API address %q: %w", cfg.Addr, err)
	}
	s := &Server{cfg: cfg}
	mux := http.NewServeMux()
	for pattern, h := range map[string]http.HandlerFunc{
		"/exec/{namespace}/{pod}/{container}": s.exec, "/exec/{namespace}/{pod}/{uid}/{container}": s.exec,
		"/attach/{namespace}/{pod}/{container}": s.attach, "/attach/{namespace}/{pod}/{uid}/{container}": s.attach,
		"/portForward/{namespace}/{pod}": s.portForward, "/portForward/{namespace}/{pod}/{uid}": s.portForward,
	} {
		mux.HandleFunc("POST "+pattern, h)
		mux.HandleFunc("GET "+pattern, h)
	}
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", s.logs)
	mux.HandleFunc("GET /pods", s.list(func(*corev1.Pod) bool { return true }))
	for _, pattern := range []string{"GET /runningpods", "GET /runningpods/{$}"} {
		mux.HandleFunc(pattern, s.list(running))
	}
	mux.HandleFunc("GET /healthz", s.healthz)
	for pattern, h := range cfg.More {
		mux.Handle(pattern, h)
	}
	s.handler = s.guard(mux)
	return s, nil
}

// Listen opens the port, so that a port conflict is detected before the node reports that it is ready.
func (s *Server) Listen() (net.Listener, error) {
	l, err := net.Listen("tcp", s.cfg.Addr)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "kubelet API: %w; choose another port, or stop the program that uses this one", err)
	}
	return l, nil
}

// Run serves on l until ctx ends, then closes all sessions and returns when they have ended.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	s.life = ctx
	cfg := s.cfg.TLS.Clone()
	cfg.NextProtos = []string{"http/1.1"} // streams hijack the connection, which HTTP/2 does not allow
	srv := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(tls.NewListener(l, cfg)) }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = srv.Close()
		err = <-ended
	}
	s.streams.Wait()
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve kubelet API: %w", err)
	}
	return nil
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	if s.cfg.Healthy != nil {
		if err := s.cfg.Healthy(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	_, _ = w.Write([]byte("ok"))
}

// list answers with the pods for which wanted returns true.
func (s *Server) list(wanted func(*corev1.Pod) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		pods, err := s.cfg.Backend.GetPods(r.Context())
		if err != nil {
			s.fail(w, err)
			return
		}
		list := corev1.PodList{Items: []corev1.Pod{}}
		list.Kind, list.APIVersion = "PodList", "v1"
		for _, p := range pods {
			if wanted(p) {
				list.Items = append(list.Items, *p)
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}
}

// running reports whether any container of the pod runs.
func running(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.State.Running != nil })
}

// fail answers with the HTTP status of the error's class. kubectl shows the text.
func (s *Server) fail(w http.ResponseWriter, err error) {
	http.Error(w, err.Error(), statusOf(err))
}

func statusOf(err error) int {
	switch errdefs.ClassOf(err) {
	case errdefs.NotFound:
		return http.StatusNotFound
	case errdefs.InvalidArgument, errdefs.FailedPrecondition, errdefs.Unsupported:
		return http.StatusBadRequest
	case errdefs.Conflict:
		return http.StatusConflict
	case errdefs.ResourceExhausted:
		return http.StatusTooManyRequests
	case errdefs.Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}
