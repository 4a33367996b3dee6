// Package ociclient speaks the OCI distribution protocol to one repository: it uploads and downloads blobs and
// manifests, with retries, resumption and verified digests.
//
// It knows no snapshots and no images, keeps nothing between sessions, and never writes a file.
package ociclient

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/reach"
)

// Auth are the credentials for a registry: a bearer token, or a user and password. Secret. The zero value is anonymous.
type Auth struct {
	Token    string
	Username string
	Password string
	Identity string // refresh token of docker's login, instead of a password
	CA       []byte // PEM: trusted in addition to the system's certificates
}

// Config tunes a session. Zero values mean the defaults named here.
type Config struct {
	Stall    time.Duration // a connection that transfers nothing for this long is closed; 60 s
	Answer   time.Duration // how long a server may take to begin its answer; 2 × Stall: it may hash and sync what it got
	Backoff  time.Duration // before the second attempt, doubled for each further one; 500 ms
	Attempts int           // of one request, or in a row without progress; 6

	// AnyScheme ignores the scheme of the reference: the session detects whether the host speaks TLS or plain HTTP. Plain
	// HTTP is allowed for loopback hosts and, if Insecure, for all hosts.
	AnyScheme bool
	Insecure  bool          // certificates are not verified
	FailFast  bool          // a failed connection attempt is not repeated: the caller has other hosts to try
	Reach     *reach.Policy // the allowed addresses, also after redirects; nil: all
}

// What a session may do.
const (
	Pull   = "pull"
	Push   = "push,pull"
	Delete = "delete,pull"
)

// maxConnections is how many connections a session keeps open: the number of parallel transfers, plus a few.
const maxConnections = 16

// Session is an authorized connection to a repository. It is safe for concurrent use.
type Session struct {
	ref   Ref
	cfg   Config
	base  string // scheme://host/v2/repository/
	plain *http.Transport
	http  *http.Client
	sent  atomic.Int64
	recv  atomic.Int64

	singles  atomic.Bool // the registry has accepted a blob in one request
	sessions atomic.Bool // the registry needs upload sessions
}

// Moved returns how many bytes of content went over the network, in both directions.
func (s *Session) Moved() int64 { return s.sent.Load() + s.recv.Load() }

// Close drops the connections.
func (s *Session) Close() { s.plain.CloseIdleConnections() }

// Open makes a session for r's repository with the rights that scope names.
// Errors: InvalidArgument (CA), FailedPrecondition (credentials), Unavailable.
func Open(ctx context.Context, r Ref, auth Auth, scope string, cfg Config) (*Session, error) {
	if cfg.Stall <= 0 {
		cfg.Stall = time.Minute
	}
	if cfg.Answer <= 0 {
		cfg.Answer = 2 * cfg.Stall
	}
	if cfg.Backoff <= 0 {
		cfg.Backoff = 500 * time.Millisecond
	}
	if cfg.Attempts <= 0 {
		cfg.Attempts = 6
	}
	plain, err := newTransport(auth.CA, cfg)
	if err != nil {
		return nil, err
	}
	if cfg.AnyScheme {
		r.Scheme = "https" // login sets the scheme that it detects
	}
	s := &Session{ref: r, cfg: cfg, plain: plain, base: r.Scheme + "://" + r.Host + "/v2/" + r.Repository + "/"}
	guarded := &guard{scheme: r.Scheme, any: cfg.AnyScheme, insecure: cfg.Insecure, next: plain}
	var rt http.RoundTripper = &bearer{host: r.Host, token: auth.Token, next: guarded}
	if auth.Token == "" || cfg.AnyScheme {
		if rt, err = s.login(ctx, auth, scope, guarded); err != nil {
			plain.CloseIdleConnections()
			return nil, err
		}
	}
	s.http = &http.Client{Transport: rt, CheckRedirect: guarded.redirect}
	return s, nil
}

// login finds out how the registry expects a user and password, or anonymous access.
func (s *Session) login(ctx context.Context, auth Auth, scope string, rt *guard) (http.RoundTripper, error) {
	opts := []name.Option{}
	if s.ref.Scheme == "http" || s.cfg.AnyScheme && s.cfg.Insecure {
		opts = append(opts, name.Insecure)
	}
	registry, err := name.NewRegistry(s.ref.Host, opts...)
	if err != nil {
		return nil, errdefs.Invalidf("the host %q is not a registry: %w", s.ref.Host, err)
	}
	who := authn.Anonymous
	if auth.Username != "" || auth.Password != "" || auth.Identity != "" || auth.Token != "" {
		who = authn.FromConfig(authn.AuthConfig{Username: auth.Username, Password: auth.Password, IdentityToken: auth.Identity, RegistryToken: auth.Token})
	}
	scopes := []string{"repository:" + s.ref.Repository + ":" + scope}
	return retry(ctx, s, s.cfg.Attempts, func() (http.RoundTripper, error) {
		out, err := transport.NewWithContext(ctx, registry, who, rt, scopes)
		if err == nil {
			return out, nil
		}
		if cert := rt.untrusted.Load(); cert != nil {
			return nil, backoff.Permanent(s.untrusted(cert))
		}
		e, ok := errors.AsType[*transport.Error](err)
		switch {
		case !ok:
			return nil, s.failed(ctx, err)
		case e.StatusCode == http.StatusUnauthorized || e.StatusCode == http.StatusForbidden:
			return nil, backoff.Permanent(errdefs.Preconditionf("%s refuses the credentials for %s (%d %s); give credentials that allow %q there", s.ref.Host, s.ref.Repository, e.StatusCode, http.StatusText(e.StatusCode), scope))
		case !transient(e.StatusCode):
			return nil, backoff.Permanent(errdefs.Unavailablef("%s is not a registry: it answers %d %s", s.ref.Host, e.StatusCode, http.StatusText(e.StatusCode)))
		}
		return nil, errdefs.Unavailablef("%s answers %d %s; try again later", s.ref.Host, e.StatusCode, http.StatusText(e.StatusCode))
	})
}

// newTransport uses HTTP/1.1 only: bulk transfer needs many connections, not many streams of one.
func newTransport(ca []byte, cfg Config) (*http.Transport, error) {
	stall := cfg.Stall
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: cfg.Answer,
		ExpectContinueTimeout: 2 * time.Second,
		IdleConnTimeout:       time.Minute,
		MaxIdleConns:          maxConnections,
		MaxIdleConnsPerHost:   maxConnections,
		DisableCompression:    true, // digests are those of the stored bytes
		WriteBufferSize:       256 << 10,
		ReadBufferSize:        256 << 10,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, InsecureSkipVerify: cfg.Insecure}, //nolint:gosec // only where the operator says so
		TLSNextProto:          map[string]func(string, *tls.Conn) http.RoundTripper{},
	}
	dialer := &net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	t.DialContext = dialer.DialContext
	if cfg.Reach != nil {
		cfg.Reach.Guard(t, dialer)
	}
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &stallConn{Conn: c, stall: 2 * stall}, nil
	}
	if len(ca) == 0 {
		return t, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errdefs.Invalidf("the CA given for the registry holds no certificate in PEM")
	}
	t.TLSClientConfig.RootCAs = pool
	return t, nil
}

// stallConn is a connection that fails when nothing moves in either direction.
type stallConn struct {
	net.Conn

	stall time.Duration
}

func (c *stallConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.stall)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// ReadFrom writes the content of r, in pieces that stay in the processor's cache.
func (c *stallConn) ReadFrom(r io.Reader) (int64, error) {
	buf := sendBuffers.Get().(*[]byte)
	defer sendBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{r}, *buf)
}

var sendBuffers = sync.Pool{New: func() any { b := make([]byte, 128<<10); return &b }}

// Write also moves the deadline of the read that waits for the answer.
func (c *stallConn) Write(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.stall)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// guard stops requests over plain HTTP if the reference says https, and the other way round. With any, it allows plain HTTP
// for loopback hosts and, if insecure, for all hosts.
type guard struct {
	scheme        string
	any, insecure bool
	next          http.RoundTripper
	untrusted     atomic.Pointer[tls.CertificateVerificationError] // why TLS with a host failed
}

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	if g.any {
		return g.either(req)
	}
	if req.URL.Scheme != g.scheme && g.scheme == "https" {
		return nil, errdefs.Preconditionf("%s redirects from https to plain HTTP, which is refused", req.URL.Host)
	}
	if req.URL.Scheme == "https" && g.scheme == "http" && req.URL.Path == "/v2/" { // the handshake tries https first
		return nil, errdefs.Preconditionf("%s must be reached over plain HTTP", req.URL.Host)
	}
	return g.send(req)
}

// send sends a request that is allowed. The bytes of one that is refused are never produced.
func (g *guard) send(req *http.Request) (*http.Response, error) {
	if body, ok := req.Body.(*repeated); ok {
		req = body.sendWith(req)
	}
	return g.next.RoundTrip(req)
}

func (g *guard) either(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme == "http" && !g.insecure && !Loopback(req.URL.Hostname()) {
		return nil, errdefs.Unavailablef("%s answers over plain HTTP only, which is not allowed; to allow it, set insecure in the configuration of that registry", req.URL.Host)
	}
	resp, err := g.send(req)
	if cert, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		g.untrusted.Store(cert) // this is the reason, even if plain HTTP gives another answer later
	}
	return resp, err
}

func (g *guard) redirect(req *http.Request, via []*http.Request) error {
	switch {
	case len(via) >= 10:
		return errdefs.Unavailablef("%s redirects more than 10 times", via[0].URL.Host)
	case g.any: // RoundTrip looks at each request
	case via[0].URL.Scheme == "https" && req.URL.Scheme != "https":
		return errdefs.Preconditionf("%s redirects from https to %s, which is refused", via[0].URL.Host, req.URL.Scheme)
	}
	return nil
}

// bearer adds a token to requests to the registry, and to no other requests.
type bearer struct {
	host  string
	token string
	next  http.RoundTripper
}

func (b *bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Del("Authorization")
	if req.URL.Host == b.host {
		req.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.next.RoundTrip(req)
}

func transient(code int) bool {
	switch code {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// failed classifies the error of a failed request. It marks the error as permanent if a retry cannot help.
func (s *Session) failed(ctx context.Context, err error) error {
	why := s.unreachable(ctx, err)
	if s.permanent(ctx, err) {
		return backoff.Permanent(why)
	}
	return why
}

// permanent reports whether a retry cannot help.
func (s *Session) permanent(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return true
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" && s.cfg.FailFast {
		return true
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok { // plain HTTP where TLS was expected
		return true
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return true
	}
	return errdefs.ClassOf(err) != errdefs.Internal && !errdefs.IsUnavailable(err)
}

// unreachable classifies the error of a failed request. It leaves out URLs: after a redirect they may hold a
// signature.
func (s *Session) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if cert, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return s.untrusted(cert)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if errdefs.ClassOf(err) != errdefs.Internal {
		return err
	}
	if multi := err.Error(); strings.Contains(multi, "://") {
		return errdefs.Unavailablef("%s cannot be reached", s.ref.Host)
	}
	return errdefs.Unavailablef("%s cannot be reached: %w", s.ref.Host, err)
}

func (s *Session) untrusted(cert *tls.CertificateVerificationError) error {
	return errdefs.Preconditionf("the certificate of %s is not trusted (%w); give its CA", s.ref.Host, cert)
}

const maxPause = 30 * time.Second

// pauses is the back-off between attempts, plus or minus a quarter so that many nodes do not retry at once.
func (s *Session) pauses() *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: s.cfg.Backoff, RandomizationFactor: 0.25, Multiplier: 2, MaxInterval: maxPause}
}

// retry calls op until it succeeds, its error is permanent, or it was tried often enough. Between two attempts it waits as
// long as the server asks for, if it does.
func retry[T any](ctx context.Context, s *Session, attempts int, op backoff.Operation[T]) (T, error) {
	out, err := backoff.Retry(ctx, op, backoff.WithBackOff(s.pauses()), backoff.WithMaxTries(uint(attempts)), backoff.WithMaxElapsedTime(0))
	if last, ok := errors.AsType[*backoff.PermanentError](err); ok { // of the last attempt that was allowed
		err = last.Err
	}
	return out, err
}

// retryAfter is the pause that the server asks for, as an error; nil: none.
func retryAfter(resp *http.Response) error {
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > 0 {
		return backoff.RetryAfter(min(seconds, int(maxPause.Seconds())))
	}
	return nil
}

// request is a request that can be repeated.
type request struct {
	method string
	url    string // absolute
	header http.Header
	body   func() io.Reader // nil: no body
	size   int64            // of the body; -1: not known
	what   string           // for errors: "blob sha256:..."
	single bool             // the caller repeats it, not do
}

// do sends the request until the answer does not ask for a retry. The caller closes its body.
func (s *Session) do(ctx context.Context, r request) (*http.Response, error) {
	left := s.cfg.Attempts
	if r.single {
		left = 1
	}
	return retry(ctx, s, left, func() (*http.Response, error) {
		resp, err := s.once(ctx, r)
		left--
		switch {
		case err != nil:
			return nil, s.failed(ctx, err)
		case left > 0 && transient(resp.StatusCode):
			discard(resp)
			return nil, s.refused(resp, r.what)
		}
		return resp, nil
	})
}

func (s *Session) once(ctx context.Context, r request) (*http.Response, error) {
	var body io.Reader = http.NoBody
	if r.body != nil && r.size != 0 {
		b := &repeated{bytes: r.body, n: &s.sent}
		defer b.end()
		body = b
	}
	req, err := http.NewRequestWithContext(ctx, r.method, r.url, body)
	if err != nil {
		return nil, errdefs.Unavailablef("%s gives a location that is not a URL", s.ref.Host)
	}
	req.ContentLength = r.size
	for k, v := range r.header {
		req.Header[k] = v
	}
	req.Header.Set("User-Agent", "cocoon")
	return s.http.Do(req)
}

// discard closes an answer, after reading enough that the connection can be reused.
func discard(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10)
	resp.Body.Close()
}

// explain converts an error status to an error.
func (s *Session) explain(resp *http.Response, what string) error {
	status := fmt.Sprintf("%d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	host := resp.Request.URL.Host
	switch code := resp.StatusCode; {
	case code == http.StatusInsufficientStorage || code == http.StatusRequestEntityTooLarge || quota(resp):
		return errdefs.Exhaustedf("%s has no room for the %s (%s); delete something there or raise its quota", host, what, status)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return errdefs.Preconditionf("%s refuses access to the %s (%s); give credentials that are valid and may do this", host, what, status)
	case code == http.StatusNotFound || code == http.StatusGone:
		return errdefs.NotFoundf("%s has no %s", host, what)
	case code == http.StatusTooManyRequests:
		return errdefs.Unavailablef("%s limits the rate of requests (%s for the %s); try again later, or give credentials", host, status, what)
	case transient(code):
		return errdefs.Unavailablef("%s answers %s for the %s; try again later", host, status, what)
	case code == http.StatusMethodNotAllowed || code == http.StatusNotImplemented:
		return errdefs.Unsupportedf("%s does not support this for the %s (%s)", host, what, status)
	default:
		return errdefs.Unavailablef("%s answers %s for the %s", host, status, what)
	}
}
