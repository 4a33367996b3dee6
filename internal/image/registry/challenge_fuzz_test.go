package registry

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// hostile is a registry, and all servers that it refers to, with responses from a fuzzer.
type hostile struct {
	t        *testing.T
	headers  []string // WWW-Authenticate
	status   int      // of all but the registry itself
	body     string
	location string
	asked    int
}

const fuzzPassword = "hunter2-fuzz"

func (h *hostile) RoundTrip(req *http.Request) (*http.Response, error) {
	if h.asked++; h.asked > 100 {
		h.t.Fatalf("asked %d times", h.asked)
	}
	who := req.Header.Get("Authorization")
	if req.URL.Scheme != "https" && !loopback(req.URL.Hostname()) && who != "" {
		h.t.Errorf("credentials went over %s to %s", req.URL.Scheme, req.URL.Host)
	}
	if strings.Contains(req.URL.RawQuery, fuzzPassword) || strings.Contains(req.URL.Path, fuzzPassword) {
		h.t.Errorf("the password is in a URL")
	}
	res := &http.Response{StatusCode: h.status, Header: http.Header{}, Request: req, ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader(h.body)), ContentLength: int64(len(h.body))}
	if h.location != "" {
		res.Header["Location"] = []string{h.location}
	}
	if strings.HasPrefix(req.URL.Path, "/v2/") && who == "" {
		res.StatusCode, res.Header["Www-Authenticate"] = http.StatusUnauthorized, h.headers
	}
	return res, nil
}

// For any login challenge of a registry, the result is one of our errors or a session, after few requests. The password
// never appears in plain text or in an error.
func FuzzChallenge(f *testing.F) {
	f.Add(`Bearer realm="https://auth.example/token",service="r.example",scope="repository:a/b:pull"`, "", 200, `{"token":"t"}`, "")
	f.Add(`Basic realm="r"`, `Bearer realm="http://169.254.169.254/latest"`, 200, `{"access_token":"t","expires_in":-1}`, "")
	f.Add(`Bearer realm="http://auth.example/",realm=x`, "Negotiate", 302, "", "http://10.0.0.1/")
	f.Add(`Bearer realm="https://[::1"`, `bearer realm="https://r.example/v2/"`, 401, `{"errors":[{"code":"DENIED"}]}`, "//x")
	f.Add(`Bearer realm=https://auth.example/%zz,service=",`, "\x00=", 500, "[", "https://auth.example/again")
	f.Add(`Digest qop="auth, auth-int", nonce="\"`, "", 307, `{"token":1}`, "https://r.example/v2/")
	store, err := local.New(local.Config{Dir: f.TempDir()})
	if err != nil {
		f.Fatal(err)
	}
	c := New(Config{Backoff: time.Nanosecond, Keychain: authn.NewMultiKeychain()}, store)
	repo, err := name.NewRepository("r.example/a/b")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, first, second string, status int, body, location string) {
		h := &hostile{t: t, headers: []string{first}, status: 100 + (status%500+500)%500, body: body, location: location}
		if second != "" {
			h.headers = append(h.headers, second)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		e := endpoint{repo: repo}
		for _, a := range []image.RegistryAuth{{Username: "u", Password: fuzzPassword}, {Token: fuzzPassword}, {Username: "<token>", Token: fuzzPassword}, {}} {
			h.asked = 0
			r := &remote{c: c, repo: repo, idle: func() {}, guard: &guard{e: e, next: &patient{h, time.Nanosecond}}}
			err := r.login(ctx, credential{Authenticator: authn.FromConfig(authConfig(a))})
			if err == nil {
				_, err = r.head(ctx, "latest")
			}
			if err == nil {
				continue
			}
			if errdefs.ClassOf(err) == errdefs.Internal {
				t.Errorf("an error without a class: %v", err)
			}
			if strings.Contains(err.Error(), fuzzPassword) {
				t.Errorf("the password is in an error: %v", err)
			}
		}
	})
}
