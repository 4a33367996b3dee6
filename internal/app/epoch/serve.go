package epoch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"cocoonstack.io/cocoon/internal/app/service"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
)

const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10
	streamWindow  = 4 << 20 // what a client may send ahead in HTTP/2; the default is slow over long distances
)

// server is a registry with its listeners.
type server struct {
	cfg      *Config
	log      *slog.Logger
	registry *registry.Registry
	metrics  *prometheus.Registry
	lock     *os.File
}

// newServer opens the data. It serves nothing yet.
func newServer(ctx context.Context, cfg *Config, log *slog.Logger) (*server, error) {
	tokens, err := access.Open(cfg.TokenFile, cfg.StaticToken, log)
	if err != nil {
		return nil, err
	}
	store, err := cfg.store(ctx)
	if err != nil {
		return nil, err
	}
	s := &server{cfg: cfg, log: log, metrics: prometheus.NewRegistry()}
	if s.lock, err = lockDir(ctx, cfg.Data); err != nil {
		return nil, err
	}
	c, err := content.New(ctx, store, content.Config{
		Quota: cfg.Quota, Grace: cfg.GCGrace, UploadTTL: cfg.UploadTTL, Untagged: cfg.GCUntagged, Log: log,
		Uploads: content.UploadLimits{PerOwner: cfg.MaxPerToken, Total: cfg.MaxUploads},
	})
	if err != nil {
		s.lock.Close()
		return nil, err
	}
	s.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.registry = registry.New(registry.Config{
		PublicURL: cfg.PublicURL, AnonymousPull: cfg.AnonymousPull, VerifyReads: cfg.VerifyReads,
		GCInterval: cfg.GCInterval, ScrubInterval: cfg.ScrubInterval,
	}, c, tokens, s.metrics, log)
	return s, nil
}

// run serves until ctx ends, then gives open requests some time to finish.
func (s *server) run(ctx context.Context) error {
	defer s.lock.Close()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.Addr)
	if err != nil {
		return errdefs.Preconditionf("serve on %s: %w", s.cfg.Addr, err)
	}
	srv := &http.Server{Handler: s.registry, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
	serve := func() error { return srv.Serve(l) }
	if s.cfg.TLSCert != "" {
		cert, err := loadCertificate(s.cfg.TLSCert, s.cfg.TLSKey, s.log)
		if err != nil {
			l.Close()
			return err
		}
		srv.TLSConfig = &tls.Config{GetCertificate: cert.get, MinVersion: tls.VersionTLS12}
		srv.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: streamWindow, MaxReceiveBufferPerConnection: 4 * streamWindow}
		serve = func() error { return srv.ServeTLS(l, "", "") }
	} else if host, _, err := net.SplitHostPort(l.Addr().String()); err != nil || !net.ParseIP(host).IsLoopback() {
		s.log.Warn("plain HTTP on an address that others can reach: tokens and guest memory cross the network unencrypted; give --tls-cert", "addr", l.Addr().String())
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	work, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { s.registry.Run(work) })
	failed := make(chan error, 2)
	if s.cfg.MetricsAddr != "" {
		wg.Go(func() { failed <- s.serveMetrics(work) })
	}
	go func() { failed <- serve() }() // ends with srv
	s.log.Info("serving", "addr", l.Addr().String(), "data", s.cfg.Data)
	service.Ready(s.log)
	defer service.Stopping(s.log)
	wg.Go(func() { _ = service.Watchdog(work, s.alive, s.log) })
	if s.cfg.ready != nil {
		s.cfg.ready(l.Addr().String())
	}
	select {
	case err := <-failed:
		_ = srv.Close()
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.shutdownPatience)
	defer cancel()
	if err := srv.Shutdown(patient); err != nil {
		s.log.Info("requests were cut off; clients can resume their uploads")
		_ = srv.Close()
	}
	return nil
}

// alive sends the registry a request as a client would: it fails when the data cannot be reached, and blocks when
// access to the data blocks.
func (s *server) alive(ctx context.Context) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/healthz", http.NoBody)
	if err != nil {
		return err
	}
	var w answer
	s.registry.ServeHTTP(&w, r)
	if w.status >= http.StatusBadRequest {
		return errdefs.Unavailablef("the registry answers its own health check with status %d", w.status)
	}
	return nil
}

// answer is a response of which only the status is used.
type answer struct {
	header http.Header
	status int
}

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

func (a *answer) Write(p []byte) (int, error) { return len(p), nil }
func (a *answer) WriteHeader(status int)      { a.status = status }

// serveMetrics is for networks that must not reach the registry itself.
func (s *server) serveMetrics(ctx context.Context) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.MetricsAddr)
	if err != nil {
		return errdefs.Preconditionf("serve metrics on %s: %w", s.cfg.MetricsAddr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	return srv.Serve(l)
}

// lockDir makes this process the only user of a data folder, until the file is closed or the process ends.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := filelock.Take(ctx, filepath.Join(dir, "epoch.lock"))
	switch {
	case errors.Is(err, filelock.ErrTaken):
		return nil, errdefs.Existsf("another epoch uses %s; stop it, give another --data, or talk to it with --server", dir)
	case err != nil:
		return nil, errdefs.Preconditionf("lock the data folder: %w", err)
	}
	return f, nil
}

const lookEvery = 10 * time.Second

// certificate is a serving certificate that is reloaded when its files change, so that it can be renewed without a
// restart. While the new files are invalid, the old certificate stays in use.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	pair   *tls.Certificate
	seen   [2]time.Time
	looked time.Time
}

func loadCertificate(cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log, looked: time.Now(), seen: modified(cert, key)}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, errdefs.Preconditionf("serving certificate: %w", err)
	}
	c.pair = &pair
	return c, nil
}

func modified(paths ...string) (at [2]time.Time) {
	for i, p := range paths {
		if fi, err := os.Stat(p); err == nil {
			at[i] = fi.ModTime()
		}
	}
	return at
}

// get is tls.Config.GetCertificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.looked) < lookEvery {
		return c.pair, nil
	}
	c.looked = time.Now()
	at := modified(c.cert, c.key)
	if at == c.seen {
		return c.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.log.Warn("serving certificate unusable, the previous one stays in use", "err", err)
		return c.pair, nil
	}
	c.pair, c.seen = &pair, at
	c.log.Info("serving certificate reloaded")
	return c.pair, nil
}
