package registry

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
)

const (
	service        = "epoch"
	anonymousToken = "anonymous" // token for anonymous clients, where they may pull: many clients treat a missing token as an error
	tokenLife      = time.Hour   // after this, clients ask again
	maxForm        = 64 << 10
)

// origin returns the URL at which clients reach the registry.
func (g *Registry) origin(r *http.Request) string {
	if g.cfg.PublicURL != "" {
		return strings.TrimSuffix(g.cfg.PublicURL, "/")
	}
	scheme := "http"
	if r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		scheme = "https"
	}
	return scheme + "://" + r.Host
}

// challenge tells a client where to get a token.
func (g *Registry) challenge(r *request, f failure) string {
	text := fmt.Sprintf("Bearer realm=%q,service=%q", g.origin(r.Request)+"/v2/token", service)
	if r.route.Name != "" && content.CodeOf(f.err) != content.NameInvalid {
		actions := map[access.Action]string{access.Pull: "pull", access.Push: "pull,push", access.Delete: "pull,push,delete"}[f.action]
		text += fmt.Sprintf(",scope=%q", "repository:"+r.route.Name+":"+actions)
	}
	if f.invalid {
		text += `,error="invalid_token"`
	}
	return text
}

// token returns a valid token unchanged: the client's token is already the one to use.
func (g *Registry) token(r *request) error {
	if err := r.methods(http.MethodGet, http.MethodPost); err != nil {
		return err
	}
	secret, given, err := credentials(r.Request)
	if err != nil {
		return named(content.Unauthorized, err)
	}
	if r.Method == http.MethodPost && !given {
		r.Body = http.MaxBytesReader(r.w, r.Body, maxForm)
		if err := r.ParseForm(); err != nil {
			return named(content.Unauthorized, errdefs.Invalidf("the form is not readable: %w", err))
		}
		secret = r.PostForm.Get("refresh_token")
		secret = cmp.Or(secret, r.PostForm.Get("password"))
		given = secret != ""
	}
	if !given || secret == anonymousToken {
		if !g.cfg.AnonymousPull {
			return &failure{status: http.StatusUnauthorized, code: content.Unauthorized, err: errdefs.Preconditionf("this needs a token: give any user name, and the token as the password")}
		}
		secret = anonymousToken
	} else if r.who, err = g.tokens.Check(secret, g.now()); err != nil {
		g.metrics.refused.Inc()
		return &failure{status: http.StatusUnauthorized, code: content.Unauthorized, err: err, invalid: true}
	}
	r.w.Header().Set("Cache-Control", "no-store")
	return r.json(http.StatusOK, "application/json", map[string]any{
		"token": secret, "access_token": secret, "expires_in": int(tokenLife.Seconds()), "issued_at": g.now().UTC().Format(time.RFC3339),
	})
}
