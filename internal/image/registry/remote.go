package registry

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// endpoint is one place that may hold a repository.
type endpoint struct {
	repo   name.Repository
	cfg    RegistryConfig
	mirror bool
	known  bool  // the operator configured it
	err    error // the configuration of this place is wrong
}

// endpoints returns the mirrors of a repository's registry and the registry itself.
func (c *Client) endpoints(repo name.Repository) []endpoint {
	host := repo.RegistryStr()
	cfg, ok := c.cfg.Registries[host]
	if !ok && sameHost("docker.io", host) {
		for _, alias := range dockerHub {
			if cfg, ok = c.cfg.Registries[alias]; ok {
				break
			}
		}
	}
	var out []endpoint
	for _, m := range cfg.Mirrors {
		m = strings.TrimSuffix(m, "/")
		for _, scheme := range []string{"https://", "http://"} {
			m = strings.TrimPrefix(m, scheme)
		}
		mcfg := c.cfg.Registries[strings.SplitN(m, "/", 2)[0]]
		r, err := name.NewRepository(m+"/"+repo.RepositoryStr(), nameOptions(mcfg)...)
		if err != nil {
			err = errdefs.Invalidf("the mirror %q of %s is no registry: %w", m, host, err)
		}
		out = append(out, endpoint{repo: r, cfg: mcfg, mirror: true, known: true, err: err})
	}
	self, err := name.NewRepository(repo.Name(), nameOptions(cfg)...)
	return append(out, endpoint{repo: self, cfg: cfg, known: ok, err: err})
}

func nameOptions(cfg RegistryConfig) []name.Option {
	if cfg.Insecure {
		return []name.Option{name.Insecure}
	}
	return nil
}

// remote is a repository that accepted our login.
type remote struct {
	c     *Client
	repo  name.Repository
	base  string // https://host/v2/repository/
	http  *http.Client
	guard *guard
	idle  func()
	entry *image.RegistryAuth // entry of the request that was accepted; nil: the host's, or none
}

func (r *remote) close() { r.idle() }

// connect finds credentials that the registry accepts.
func (c *Client) connect(ctx context.Context, e endpoint, id string, auth []image.RegistryAuth) (*remote, error) {
	if e.err != nil {
		return nil, e.err
	}
	plain, err := c.newTransport(e)
	if err != nil {
		return nil, err
	}
	var failed error
	tries := c.credentials(ctx, e.repo, auth)
	for _, a := range tries {
		r := &remote{c: c, repo: e.repo, idle: plain.CloseIdleConnections, entry: a.entry, guard: &guard{e: e, next: &patient{plain, c.cfg.Backoff}}}
		if failed = r.login(ctx, a); failed == nil {
			failed = r.admits(ctx, id, len(tries) > 1)
		}
		if failed == nil {
			return r, nil
		}
		if !errdefs.IsFailedPrecondition(failed) {
			break
		}
	}
	plain.CloseIdleConnections()
	return nil, failed
}

// login does the registry's authentication handshake.
func (r *remote) login(ctx context.Context, a credential) error {
	rt, err := transport.NewWithContext(ctx, r.repo.Registry, a.Authenticator, r.guard, []string{r.repo.Scope(transport.PullScope)})
	if err != nil {
		return r.unreachable(ctx, err)
	}
	r.http = &http.Client{Transport: rt}
	// The transport sets the scheme that it detected.
	r.base = "https://" + r.repo.RegistryStr() + "/v2/" + r.repo.RepositoryStr() + "/"
	return nil
}

// admits asks whether the credentials are valid for this image, if there are others to try. Only a refusal counts: other
// errors show up later.
func (r *remote) admits(ctx context.Context, id string, others bool) error {
	if !others {
		return nil
	}
	if _, err := r.head(ctx, id); errdefs.IsFailedPrecondition(err) {
		return err
	}
	return nil
}

// unreachable classifies the error of a failed request.
func (r *remote) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	host := r.repo.RegistryStr()
	if cert := r.guard.untrusted.Load(); cert != nil { // even if plain HTTP gave another answer later
		return errdefs.Unavailablef("the certificate of %s is not trusted (%w); name its CA in the configuration of that registry", host, cert.Err)
	}
	if e, ok := errors.AsType[*transport.Error](err); ok {
		switch e.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return errdefs.Preconditionf("%s refuses the credentials for %s (%d %s); give ones that may pull it", host, r.repo.Name(), e.StatusCode, http.StatusText(e.StatusCode))
		case http.StatusTooManyRequests:
			return errdefs.Unavailablef("%s limits how often one may pull (429); try again later or give credentials", host)
		}
		return errdefs.Unavailablef("%s answers %d %s; try again later", host, e.StatusCode, http.StatusText(e.StatusCode))
	}
	if errdefs.ClassOf(err) != errdefs.Internal {
		return err
	}
	return errdefs.Unavailablef("%s cannot be reached: %w", host, bare(err))
}

// bare strips the URL from an error of the HTTP client: it may hold a signature after a redirect.
func bare(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

func (r *remote) do(ctx context.Context, method, path string, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, r.base+path, nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return nil, r.unreachable(ctx, err)
	}
	return resp, nil
}

var accepted = func() http.Header {
	var all []string
	for _, t := range []types.MediaType{types.OCIImageIndex, types.DockerManifestList, types.OCIManifestSchema1, types.DockerManifestSchema2, types.DockerManifestSchema1Signed, types.DockerManifestSchema1} {
		all = append(all, string(t))
	}
	return http.Header{"Accept": {strings.Join(all, ", ")}}
}()

// head returns the digest that id refers to now.
func (r *remote) head(ctx context.Context, id string) (string, error) {
	resp, err := r.do(ctx, http.MethodHead, "manifests/"+id, accepted)
	if err != nil {
		return "", err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", explain(resp, r.repo.Name()+" "+id)
	}
	return resp.Header.Get("Docker-Content-Digest"), nil
}

// manifest reads a manifest or an index, and verifies it if id is a digest.
func (r *remote) manifest(ctx context.Context, id string) (raw []byte, media types.MediaType, digest string, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.c.cfg.Stall)
	defer cancel()
	what := "the manifest " + r.repo.Name() + " " + id
	resp, err := r.do(ctx, http.MethodGet, "manifests/"+id, accepted)
	if err != nil {
		return nil, "", "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, "", "", explain(resp, strings.TrimPrefix(what, "the "))
	}
	raw, err = io.ReadAll(io.LimitReader(resp.Body, maxMetadata+1))
	switch {
	case err != nil:
		return nil, "", "", r.unreachable(ctx, err)
	case len(raw) > maxMetadata:
		return nil, "", "", errdefs.Invalidf("%s is larger than %d bytes: not plausible", what, maxMetadata)
	}
	sum := sha256.Sum256(raw)
	digest = "sha256:" + hex.EncodeToString(sum[:])
	if alg, _, isDigest := strings.Cut(id, ":"); isDigest {
		if alg != "sha256" {
			return nil, "", "", errdefs.Invalidf("%s is named by the digest algorithm %q; only sha256 is known", what, alg)
		}
		if digest != id {
			return nil, "", "", errdefs.DataLossf("%s has the digest %s: %s serves something else", what, digest, r.repo.RegistryStr())
		}
	}
	media, _, _ = cutMedia(resp.Header.Get("Content-Type"))
	return raw, media, digest, nil
}

func cutMedia(s string) (types.MediaType, string, bool) {
	a, b, ok := strings.Cut(s, ";")
	return types.MediaType(strings.TrimSpace(a)), b, ok
}

// newTransport returns a transport for one registry, with its trusted certificates.
func (c *Client) newTransport(e endpoint) (*http.Transport, error) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.TLSHandshakeTimeout, t.ResponseHeaderTimeout = 10*time.Second, 30*time.Second
	dialer := &net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	t.DialContext = dialer.DialContext
	if c.cfg.Reach != nil && !e.known { // also for the places of tokens and blobs that it names
		c.cfg.Reach.Guard(t, dialer)
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: e.cfg.Insecure} //nolint:gosec // only where the administrator says so
	if e.cfg.CA == "" {
		return t, nil
	}
	pem, err := os.ReadFile(e.cfg.CA)
	if err != nil {
		return nil, errdefs.Preconditionf("the CA of %s cannot be read: %w", e.repo.RegistryStr(), err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errdefs.Preconditionf("the CA file %s of %s holds no certificate", e.cfg.CA, e.repo.RegistryStr())
	}
	t.TLSClientConfig.RootCAs = pool
	return t, nil
}

// guard blocks requests over plain HTTP unless the configuration allows it. Loopback is allowed, as in docker.
type guard struct {
	e         endpoint
	next      http.RoundTripper
	untrusted atomic.Pointer[tls.CertificateVerificationError] // certificate error of a refused TLS server
}

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme == "http" && !g.e.cfg.Insecure && !loopback(req.URL.Hostname()) {
		return nil, errdefs.Unavailablef("%s is reached over plain HTTP only, which is not allowed; make it insecure in the configuration of that registry", req.URL.Host)
	}
	resp, err := g.next.RoundTrip(req)
	if cert, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		g.untrusted.Store(cert)
	}
	return resp, err
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// patient retries requests when a server was too busy.
type patient struct {
	next    http.RoundTripper
	backoff time.Duration
}

const (
	attempts  = 4
	maxPause  = 30 * time.Second
	maxErrors = 1 << 20 // bytes of an error's body that are read so that the connection can be reused
)

func transient(code int) bool {
	switch code {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

func (p *patient) RoundTrip(req *http.Request) (*http.Response, error) {
	pause := p.backoff
	for n := 1; ; n++ {
		resp, err := p.next.RoundTrip(req)
		if n == attempts || req.Body != nil && req.Body != http.NoBody || err == nil && !transient(resp.StatusCode) || err != nil && permanent(err) {
			return resp, err
		}
		wait := pause
		if err == nil {
			if s, perr := time.ParseDuration(resp.Header.Get("Retry-After") + "s"); perr == nil && s > wait && p.backoff >= time.Second {
				wait = min(s, maxPause)
			}
			_, _ = io.CopyN(io.Discard, resp.Body, maxErrors)
			resp.Body.Close()
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-req.Context().Done():
			t.Stop()
			return nil, req.Context().Err()
		}
		pause *= 2
	}
}

// permanent reports whether a retry cannot help.
func permanent(err error) bool {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok { // plain HTTP where TLS was expected
		return true
	}
	if errdefs.ClassOf(err) != errdefs.Internal { // an error of our own, from guard
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
