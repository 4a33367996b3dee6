package chunked_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// tokens is a registry that requires a bearer token: the given one, or one from its token server, each valid for 50
// requests.
type tokens struct {
	mu    sync.Mutex
	n     int
	valid map[string]int // remaining uses
}

func (a *tokens) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !a.admit(w, r) {
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (a *tokens) admit(w http.ResponseWriter, r *http.Request) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.URL.Path == "/token" {
		if u, p, _ := r.BasicAuth(); u != "user" || p != "password" {
			w.WriteHeader(http.StatusUnauthorized)
			return false
		}
		a.n++
		token := "sesame" + strconv.Itoa(a.n)
		a.valid[token] = 50
		_ = json.NewEncoder(w).Encode(map[string]any{"token": token})
		return false
	}
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if a.valid[token]--; a.valid[token] < 0 {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/token",service="test",scope="repository:vm/web:pull,push"`)
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	return true
}

func sesame() *tokens { return &tokens{valid: map[string]int{"sesame": 1 << 30}} }

func TestCredentials(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	static := serve(t, sesame().wrap) + "/vm/web:v1"
	c := client(t, s, nil)
	for name, auth := range map[string]snapshot.Auth{"none": {}, "another token": {Token: "other"}, "another password": {Username: "user", Password: "secret"}} {
		_, push := c.Push(t.Context(), h, static, auth, nil)
		_, pull := c.Pull(t.Context(), static, "x", auth, nil)
		_, digest := c.Digest(t.Context(), static, auth)
		for _, err := range []error{push, pull, digest, check(t, c, static, auth), c.Delete(t.Context(), static, auth)} {
			if !errdefs.IsFailedPrecondition(err) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	good := snapshot.Auth{Token: "sesame"}
	if err := check(t, c, static, good); err != nil {
		t.Error(err)
	}
	if _, err := c.Push(t.Context(), h, static, good, nil); err != nil {
		t.Error(err)
	}
	if err := c.Delete(t.Context(), static, good); err != nil {
		t.Error(err)
	}
	if err := c.Delete(t.Context(), static, good); err != nil {
		t.Errorf("deleting what is gone: %v", err)
	}
	if _, err := c.Digest(t.Context(), static, good); !errdefs.IsNotFound(err) {
		t.Errorf("%v", err)
	}
	// Tokens of a token server are renewed whenever they expire.
	a := &tokens{valid: map[string]int{}}
	if _, err := c.Push(t.Context(), h, serve(t, a.wrap)+"/vm/web:v1", snapshot.Auth{Username: "user", Password: "password"}, nil); err != nil || a.n < 3 {
		t.Errorf("%v, after %d tokens", err, a.n)
	}
}

// TestCredentialsStayWithTheirHost makes a registry serve its blobs from another host.
func TestCredentialsStayWithTheirHost(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	var elsewhere *httptest.Server
	var redirected atomic.Int64
	host := serve(t, func(next http.Handler) http.Handler {
		elsewhere = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if got := r.Header.Get("Authorization"); got != "" {
				t.Errorf("the other host was told %q", got)
			}
			redirected.Add(1)
			next.ServeHTTP(w, r)
		}))
		t.Cleanup(elsewhere.Close)
		return sesame().wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && isBlob(r) {
				http.Redirect(w, r, elsewhere.URL+r.URL.Path, http.StatusTemporaryRedirect)
				return
			}
			next.ServeHTTP(w, r)
		}))
	})
	c := client(t, s, nil)
	auth := snapshot.Auth{Token: "sesame"}
	if _, err := c.Push(t.Context(), h, host+"/vm/web:v1", auth, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Pull(t.Context(), host+"/vm/web:v1", "x", auth, nil); err != nil || redirected.Load() == 0 {
		t.Errorf("%v after %d redirects", err, redirected.Load())
	}
}
