package ociclient

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// hostile is a registry, and every server that it sends us to, that answers as a fuzzer says.
type hostile struct {
	t        *testing.T
	headers  []string // WWW-Authenticate
	retry    string   // Retry-After
	status   int      // of everything but the registry itself
	body     string
	location string
	any      bool // plain HTTP may be tried
	asked    int
}

const fuzzPassword = "hunter2-fuzz"

func (h *hostile) RoundTrip(req *http.Request) (*http.Response, error) {
	if h.asked++; h.asked > 100 {
		h.t.Fatalf("asked %d times", h.asked)
	}
	who := req.Header.Get("Authorization")
	if req.URL.Scheme != "https" && (!h.any || !Loopback(req.URL.Hostname())) {
		h.t.Errorf("%s is asked over %s", req.URL.Host, req.URL.Scheme)
	}
	if strings.Contains(req.URL.RawQuery, fuzzPassword) || strings.Contains(req.URL.Path, fuzzPassword) {
		h.t.Errorf("the password is in a URL")
	}
	res := &http.Response{StatusCode: h.status, Header: http.Header{"Retry-After": {h.retry}}, Request: req, ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader(h.body)), ContentLength: int64(len(h.body))}
	if h.location != "" {
		res.Header["Location"] = []string{h.location}
	}
	if strings.HasPrefix(req.URL.Path, "/v2/") && who == "" {
		res.StatusCode, res.Header["Www-Authenticate"] = http.StatusUnauthorized, h.headers
	}
	return res, nil
}

// Whatever a registry demands for a login ends in an error with a class or in a session, after few requests. The password is
// neither sent over plain HTTP nor in an error.
func FuzzChallenge(f *testing.F) {
	f.Add(`Bearer realm="https://auth.example/token",service="r.example",scope="repository:a/b:pull"`, "", "", 200, `{"token":"t"}`, "")
	f.Add(`Basic realm="r"`, `Bearer realm="http://169.254.169.254/latest"`, "1", 429, `{"access_token":"t","expires_in":-1}`, "")
	f.Add(`Bearer realm="http://auth.example/",realm=x`, "Negotiate", "-1", 302, `{"errors":[]}`, "http://10.0.0.1/")
	f.Add(`Bearer realm="https://[::1"`, `bearer realm="https://r.example/v2/"`, "99999999999999999999", 401, `{"errors":[{"code":"DENIED"}]}`, "//x")
	f.Add(`Bearer realm=https://auth.example/%zz,service=",`, "\x00=", "x", 500, "[", "https://auth.example/again")
	f.Add(`Digest qop="auth, auth-int", nonce="\"`, "", "", 307, `{"token":1}`, "https://r.example/v2/")
	f.Fuzz(func(t *testing.T, first, second, retry string, status int, body, location string) {
		h := &hostile{t: t, headers: []string{first}, retry: retry, status: 200 + (status%400+400)%400, body: body, location: location}
		if second != "" {
			h.headers = append(h.headers, second)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := ParseRef("https://r.example/a/b:c")
		if err != nil {
			t.Fatal(err)
		}
		for _, auth := range []Auth{{Username: "u", Password: fuzzPassword}, {Identity: fuzzPassword}, {Token: fuzzPassword}, {}} {
			for _, h.any = range []bool{false, true} {
				h.asked = 0
				s := &Session{ref: r, cfg: Config{Stall: time.Second, Backoff: time.Nanosecond, Attempts: 3, AnyScheme: h.any}, base: "https://r.example/v2/a/b/"}
				g := &guard{scheme: "https", any: h.any, next: h}
				rt, err := s.login(ctx, auth, Pull, g)
				if err == nil {
					s.http = &http.Client{Transport: rt, CheckRedirect: g.redirect}
					_, err = s.Head(ctx, "latest")
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
		}
	})
}
