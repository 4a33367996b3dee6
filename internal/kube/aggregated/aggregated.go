// Package aggregated is the aggregated API subresources.kubevirt.io: it starts, stops and restarts VirtualMachines, and opens
// consoles, screens and ports of their guests, for virtctl. At the same address it gives the tokens of uploads (upload.cdi.kubevirt.io), and passes uploads on.
//
// It keeps no state: it reads and changes objects through the API server, and reaches guests through the attach and port-forward
// of their pods. It makes no pods and starts no VM; the controllers do.
package aggregated

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

// Group is the name of the API group.
const Group = "subresources.kubevirt.io"

// UploadGroup and UploadVersion name the API that gives tokens of uploads.
const (
	UploadGroup   = "upload.cdi.kubevirt.io"
	UploadVersion = "v1beta1"
)

// Versions are the served versions of the group, the preferred one first. They are the same.
var Versions = []string{"v1", "v1alpha3"}

// Options configure a Server. All are required.
type Options struct {
	Addr        string                                               // HOST:PORT to listen on
	Certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error) // asked for at each connection
	Config      *rest.Config                                         // access to the API server: attach, port-forward, SubjectAccessReviews, the configuration of its proxy
	Client      client.Client                                        // reads and changes VirtualMachines, their instances and pods; its reads must not be cached
	Uploads     Uploads
	Metrics     *Metrics
	Log         *slog.Logger
}

// Uploads takes disks for claims.
type Uploads interface {
	// ServeHTTP takes an upload from anybody who has a token.
	http.Handler
	// Token returns a token for an upload to a claim. Errors: NotFound, FailedPrecondition, Unavailable.
	Token(ctx context.Context, namespace, claim string) (string, error)
}

// Server serves the API. Several servers may run at a time.
type Server struct {
	opts   Options
	access access
	guests guests
	tokens chan struct{} // one for each open stream

	handler http.Handler
	streams sync.WaitGroup // for which http.Server does not wait
	life    context.Context
}

const (
	maxStreams     = 1024 // consoles, screens and forwarded connections at a time
	requestTimeout = 25 * time.Second
	connectTimeout = 20 * time.Second // of a stream
	shutdownGrace  = 5 * time.Second
)

// New returns a server. It does not listen before Start.
func New(o Options) (*Server, error) {
	switch {
	case o.Certificate == nil:
		return nil, errdefs.Invalidf("the API %s needs a certificate", Group)
	case o.Config == nil || o.Client == nil || o.Uploads == nil || o.Metrics == nil || o.Log == nil:
		return nil, errdefs.Invalidf("the API %s needs access to the API server, a place for uploads, metrics and a logger", Group)
	}
	if _, _, err := net.SplitHostPort(o.Addr); err != nil {
		return nil, errdefs.Invalidf("the address %q of the API %s must be HOST:PORT: %w", o.Addr, Group, err)
	}
	kube, err := kubernetes.NewForConfig(o.Config)
	if err != nil {
		return nil, fmt.Errorf("create client for the API %s: %w", Group, err)
	}
	a, err := newFrontProxy(kube, kube.AuthorizationV1())
	if err != nil {
		return nil, err
	}
	return newServer(o, a, podStreams{config: o.Config}), nil
}

func newServer(o Options, a access, g guests) *Server {
	s := &Server{opts: o, access: a, guests: g, tokens: make(chan struct{}, maxStreams), life: context.Background()}
	guarded := s.guard(http.HandlerFunc(s.dispatch))
	s.handler = s.observe(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, upload.Prefix) { // its token says what a client may do
			s.opts.Uploads.ServeHTTP(w, r)
			return
		}
		guarded.ServeHTTP(w, r)
	}))
	return s
}

// Ready reports whether the server can tell who sends a request.
// Errors: Unavailable until the API server has said by which certificates its proxy is known.
func (s *Server) Ready() error { return s.access.ready() }

// Start serves until ctx ends, and returns when all streams have ended.
// Errors: FailedPrecondition if it cannot listen.
func (s *Server) Start(ctx context.Context) error {
	l, err := net.Listen("tcp", s.opts.Addr)
	if err != nil {
		return errdefs.Preconditionf("listen for the API %s: %w; choose another address, or stop the program that uses this one", Group, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var background sync.WaitGroup
	background.Go(func() { s.access.run(ctx) })
	defer background.Wait()
	defer cancel()
	return s.serve(ctx, l)
}

func (s *Server) serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.life = ctx
	srv := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: 30 * time.Second, ReadTimeout: time.Minute, WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(s.opts.Log.Handler(), slog.LevelDebug),
	}
	// Streams hijack the connection, which HTTP/2 does not allow. Who the client is decides access, at each request.
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: s.opts.Certificate, ClientAuth: tls.RequestClientCert, NextProtos: []string{"http/1.1"}}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(tls.NewListener(l, config)) }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		limited, stop := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
		_ = srv.Shutdown(limited)
		stop()
		_ = srv.Close()
		err = <-ended
	}
	cancel()
	s.streams.Wait()
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the API %s: %w", Group, err)
	}
	return nil
}
