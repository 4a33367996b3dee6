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

// hostile is a registry, with everything that it redirects to, that answers as a fuzzer says.
type hostile struct {
	t                      *testing.T
	challenge, retry, body string
	status                 int
	asked                  int
}

const fuzzPassword = "hunter2-fuzz"

func (h *hostile) RoundTrip(req *http.Request) (*http.Response, error) {
	if h.asked++; h.asked > 100 {
		h.t.Fatalf("asked %d times", h.asked)
	}
	if req.URL.Scheme != "https" {
		h.t.Errorf("a registry of https is asked over %s", req.URL.Scheme)
	}
	res := &http.Response{StatusCode: h.status, Header: http.Header{"Retry-After": {h.retry}}, Request: req, ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader(h.body)), ContentLength: int64(len(h.body))}
	if strings.HasPrefix(req.URL.Path, "/v2/") && req.Header.Get("Authorization") == "" {
		res.StatusCode, res.Header["Www-Authenticate"] = http.StatusUnauthorized, []string{h.challenge}
	}
	return res, nil
}

// Whatever a registry demands for a login ends in an error of this package or in a session, after few requests.
func FuzzChallenge(f *testing.F) {
	f.Add(`Bearer realm="https://auth.example/token",service="r.example",scope="repository:a/b:pull"`, "", 200, `{"token":"t"}`)
	f.Add(`Basic realm="r"`, "1", 429, "")
	f.Add(`Bearer realm="http://auth.example/"`, "-1", 503, `{"errors":[]}`)
	f.Add(`Bearer realm="https://[::1"`, "99999999999999999999", 401, `{"access_token":"t"}`)
	f.Add("Negotiate\x00", "x", 403, "{")
	f.Fuzz(func(t *testing.T, challenge, retry string, status int, body string) {
		h := &hostile{t: t, challenge: challenge, retry: retry, status: 200 + (status%400+400)%400, body: body}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := ParseRef("https://r.example/a/b:c")
		if err != nil {
			t.Fatal(err)
		}
		for _, auth := range []Auth{{Username: "u", Password: fuzzPassword}, {Identity: fuzzPassword}, {}} {
			h.asked = 0
			s := &Session{ref: r, cfg: Config{Stall: time.Second, Backoff: time.Nanosecond, Attempts: 3}, base: "https://r.example/v2/a/b/"}
			_, err := s.login(ctx, auth, Pull, &guard{scheme: "https", next: h})
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
