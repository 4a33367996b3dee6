// Package registry is the HTTP door of a registry: the OCI distribution specification, downloads of disks and snapshots
// (/dl/), tokens, health and metrics.
//
// Package content stores the data, package access decides on rights. The package does not listen: a Registry is an
// http.Handler.
package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

// Checker returns the identity of a token.
type Checker interface {
	Check(secret string, now time.Time) (access.Identity, error)
}

// Config configures the door.
type Config struct {
	PublicURL     string // how clients reach the registry, "https://host"; "": derived from each request
	AnonymousPull bool   // clients without a token may pull
	VerifyReads   bool   // hash what is sent
	GCInterval    time.Duration
	ScrubInterval time.Duration // 0: never
}

// Registry serves one content.
type Registry struct {
	cfg     Config
	content *content.Content
	tokens  Checker
	log     *slog.Logger
	now     func() time.Time
	metrics *metrics
	sums    sums

	unpacked *unpacked
}

// New returns a registry. It registers its metrics in reg.
func New(cfg Config, c *content.Content, tokens Checker, reg *prometheus.Registry, log *slog.Logger) *Registry {
	return &Registry{cfg: cfg, content: c, tokens: tokens, log: log, now: time.Now, metrics: newMetrics(reg, c), unpacked: newUnpacked()}
}

// Run does the periodic background work until ctx ends.
func (g *Registry) Run(ctx context.Context) {
	var scrub <-chan time.Time
	if g.cfg.ScrubInterval > 0 {
		t := time.NewTicker(g.cfg.ScrubInterval)
		defer t.Stop()
		scrub = t.C
	}
	collect := time.NewTicker(max(g.cfg.GCInterval, time.Second))
	defer collect.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-collect.C:
			_, err = g.collect(ctx)
		case <-scrub:
			_, err = g.scrub(ctx)
		}
		if err != nil && ctx.Err() == nil {
			g.log.Warn("background work failed; it is tried again next time", "err", err)
		}
	}
}

func (g *Registry) collect(ctx context.Context) (content.Collected, error) {
	began := time.Now()
	done, err := g.content.Collect(ctx, false)
	g.metrics.collected(done, time.Since(began), err)
	if done != (content.Collected{}) {
		g.log.Info("garbage collected", "op", "gc", "blobs", done.Blobs, "bytes", done.Bytes, "manifests", done.Manifests, "uploads", done.Uploads, "dur", time.Since(began))
	}
	return done, err
}

func (g *Registry) scrub(ctx context.Context) (content.Scrubbed, error) {
	began := time.Now()
	done, err := g.content.Scrub(ctx)
	g.log.Info("scrubbed", "op", "scrub", "objects", done.Objects, "bytes", done.Bytes, "damaged", done.Damaged, "dur", time.Since(began))
	return done, err
}

// request is one request and what was parsed from it.
type request struct {
	*http.Request
	w     *recorder
	route reference.Route
	who   access.Identity
}

// ServeHTTP answers a request.
func (g *Registry) ServeHTTP(w http.ResponseWriter, hr *http.Request) {
	r := &request{Request: hr, route: reference.Path(hr.URL.Path)}
	rec := &recorder{ResponseWriter: w, control: http.NewResponseController(w), metrics: g.metrics}
	r.w = rec
	if hr.Body != nil {
		hr.Body = &body{ReadCloser: hr.Body, control: rec.control, metrics: g.metrics}
	}
	_ = rec.control.SetWriteDeadline(time.Time{}) // a leftover of the previous request on this connection
	began := time.Now()
	g.metrics.inFlight.Inc()
	defer func() {
		g.metrics.inFlight.Dec()
		g.metrics.request(r.route.Kind, hr.Method, rec.status, time.Since(began))
		g.log.Debug("request", "op", r.route.Kind.String(), "method", hr.Method, "repository", r.route.Name, "status", rec.status, "who", r.who.Name, "dur", time.Since(began))
	}()
	w.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	err := g.serve(r) //nolint:contextcheck // the request carries it
	switch {
	case err == nil:
	case rec.status != 0: // too late for an error response: the client must not take a partial body as complete
		g.log.Info("response broken off", "op", r.route.Kind.String(), "repository", r.route.Name, "err", err)
		panic(http.ErrAbortHandler)
	default:
		g.fail(r, err)
	}
}

func (g *Registry) serve(r *request) error {
	if r.route.Kind == reference.None {
		return g.side(r)
	}
	if r.route.Kind == reference.Token {
		return g.token(r)
	}
	var err error
	if r.who, err = g.identify(r); err != nil {
		return err
	}
	if r.route.Name != "" {
		if err := reference.Name(r.route.Name); err != nil {
			return named(content.NameInvalid, err)
		}
	}
	to := g.resources()[r.route.Kind]
	if err := r.methods(to.methods...); err != nil {
		return err
	}
	if r.route.Name != "" {
		need := action(r)
		if r.route.Kind == reference.Upload {
			need = access.Push // its status too
		}
		if !r.who.Allows(need, r.route.Name) {
			return g.denied(r, need)
		}
	}
	return to.serve(r)
}

// resource is a resource of the specification: the methods that it allows, and its handler, which runs after the check of
// rights.
type resource struct {
	methods []string
	serve   func(*request) error
}

func (g *Registry) resources() map[reference.Kind]resource {
	const get, head, put, post, patch, del = http.MethodGet, http.MethodHead, http.MethodPut, http.MethodPost, http.MethodPatch, http.MethodDelete
	return map[reference.Kind]resource{
		reference.Base:      {[]string{get, head}, g.base},
		reference.Catalog:   {[]string{get, head}, g.catalog},
		reference.Manifest:  {[]string{get, head, put, del}, g.manifest},
		reference.Blob:      {[]string{get, head, put, del}, g.blob},
		reference.Uploads:   {[]string{post}, g.uploads},
		reference.Upload:    {[]string{get, patch, put, del}, g.upload},
		reference.Tags:      {[]string{get, head}, g.tags},
		reference.Referrers: {[]string{get, head}, g.referrers},
		reference.Download:  {[]string{get, head}, g.download},
	}
}

// side serves paths that are not in the specification.
func (g *Registry) side(r *request) error {
	switch r.URL.Path {
	case "/healthz":
		if err := r.methods(http.MethodGet, http.MethodHead); err != nil {
			return err
		}
		r.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, err := r.w.Write([]byte("ok\n"))
		return err
	case "/metrics":
		if err := r.methods(http.MethodGet); err != nil {
			return err
		}
		g.metrics.handler.ServeHTTP(r.w, r.Request)
		return nil
	case "/api/gc", "/api/scrub":
		return g.admin(r)
	}
	return &failure{status: http.StatusNotFound, err: errdefs.NotFoundf("this path does not exist; the API is below /v2/")}
}

// admin runs the commands "epoch gc" and "epoch scrub" in the server.
func (g *Registry) admin(r *request) error {
	var err error
	if r.who, err = g.identify(r); err != nil {
		return err
	}
	if err := r.methods(http.MethodPost); err != nil {
		return err
	}
	if !r.who.Everything() {
		return g.denied(r, access.Delete)
	}
	var done any
	if r.URL.Path == "/api/gc" {
		done, err = g.collect(r.Context())
	} else {
		done, err = g.scrub(r.Context())
	}
	if err != nil {
		return err
	}
	return r.json(http.StatusOK, "application/json", done)
}

func (g *Registry) base(r *request) error {
	return r.json(http.StatusOK, "application/json", struct{}{})
}

// denied refuses a request that its sender has no right to. An anonymous sender is asked for a token first.
func (g *Registry) denied(r *request, action access.Action) error {
	if r.who.Name == "" {
		return &failure{status: http.StatusUnauthorized, code: content.Unauthorized, err: errdefs.Preconditionf("this needs a token"), action: action}
	}
	err := errdefs.Preconditionf("token %s has no scope for this", r.who.Name)
	if r.route.Name != "" {
		err = errdefs.Preconditionf("token %s may not %s in repository %s", r.who.Name, action, r.route.Name)
	}
	return &failure{status: http.StatusForbidden, code: content.Denied, err: err}
}

// identify returns the sender of a request. A wrong token is an error; no token is an anonymous sender, where allowed.
func (g *Registry) identify(r *request) (access.Identity, error) {
	secret, given, err := credentials(r.Request)
	if err == nil && (!given || secret == anonymousToken && g.cfg.AnonymousPull) {
		// The base path always answers 401 to anonymous clients: this is how they learn where to get tokens.
		if g.cfg.AnonymousPull && (given || r.route.Kind != reference.Base) {
			return access.Anonymous(), nil
		}
		err = errdefs.Preconditionf("this needs a token: Authorization: Bearer TOKEN, or any user name and the token as the password")
	}
	if err == nil {
		var id access.Identity
		if id, err = g.tokens.Check(secret, g.now()); err == nil {
			return id, nil
		}
		g.metrics.refused.Inc()
	}
	return access.Identity{}, &failure{status: http.StatusUnauthorized, code: content.Unauthorized, err: err, action: action(r), invalid: given}
}

// action returns the action that a request needs a right for.
func action(r *request) access.Action {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		return access.Pull
	case http.MethodDelete:
		if r.route.Kind != reference.Upload {
			return access.Delete
		}
	}
	return access.Push
}

func credentials(r *http.Request) (secret string, given bool, err error) {
	text := r.Header.Get("Authorization")
	if text == "" {
		return "", false, nil
	}
	if _, password, ok := r.BasicAuth(); ok {
		return password, password != "", nil
	}
	scheme, secret, _ := strings.Cut(text, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return "", true, errdefs.Invalidf("the Authorization header is neither Bearer nor Basic")
	}
	secret = strings.TrimSpace(secret)
	return secret, secret != "", nil
}

// methods refuses a request with a method that is not allowed.
func (r *request) methods(allowed ...string) error {
	if slices.Contains(allowed, r.Method) {
		return nil
	}
	return &failure{status: http.StatusMethodNotAllowed, code: content.Unsupported, allow: strings.Join(allowed, ", "), err: errdefs.Unsupportedf("%s is not possible here", r.Method)}
}

func named(c content.Code, err error) error {
	if _, ok := errors.AsType[*failure](err); ok {
		return err
	}
	return &failure{code: c, err: err}
}

// location returns the path of a resource in the request's repository. It is relative: only the client knows the host
// name that it used.
func (r *request) location(format string, args ...any) string {
	return "/v2/" + r.route.Name + "/" + fmt.Sprintf(format, args...)
}
