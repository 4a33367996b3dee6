package registry_test

import (
	"bufio"
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
)

// oneToken accepts every token, with all rights.
type oneToken struct{}

func (oneToken) Check(secret string, _ time.Time) (access.Identity, error) {
	return access.Identity{Name: "fuzz", Scopes: []access.Scope{{Action: access.Delete}}}, nil
}

// Whatever the request, the registry answers with success or a client error: it does not panic or fail, and writes only
// in its folder.
func FuzzHandler(f *testing.F) {
	blob := []byte(`{"schemaVersion":2}`)
	d := digest.FromBytes(blob).String()
	for _, seed := range []struct{ head, body string }{
		{"GET /v2/ HTTP/1.1\nHost: r\n", ""},
		{"POST /v2/a/blobs/uploads/?digest=" + d + " HTTP/1.1\nHost: r\n", string(blob)},
		{"POST /v2/a/blobs/uploads/?mount=" + d + "&from=b HTTP/1.1\nHost: r\n", ""},
		{"PATCH /v2/a/blobs/uploads/UPLOAD HTTP/1.1\nHost: r\nContent-Range: 0-18\n", string(blob)},
		{"PUT /v2/a/blobs/uploads/UPLOAD?digest=" + d + " HTTP/1.1\nHost: r\n", string(blob)},
		{"DELETE /v2/a/blobs/uploads/../../../x HTTP/1.1\nHost: r\n", ""},
		{"PUT /v2/a/manifests/t HTTP/1.1\nHost: r\nContent-Type: application/vnd.oci.image.manifest.v1+json\n", `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"x/y","digest":"` + d + `","size":19},"layers":[]}`},
		{"PUT /v2/a/manifests/i HTTP/1.1\nHost: r\nContent-Type: application/vnd.oci.image.index.v1+json\n", `{"schemaVersion":2,"manifests":[],"subject":{"digest":"` + d + `"}}`},
		{"GET /v2/a/manifests/t HTTP/1.1\nHost: r\nRange: bytes=1-,2-\n", ""},
		{"GET /v2/a/blobs/" + d + " HTTP/1.1\nHost: r\nRange: bytes=-5\nIf-Range: x\n", ""},
		{"GET /v2/a/tags/list?n=-1&last=%00 HTTP/1.1\nHost: r\n", ""},
		{"GET /v2/_catalog?n=99999999999999999999 HTTP/1.1\nHost: r\n", ""},
		{"GET /v2/a/referrers/" + d + "?artifactType=x HTTP/1.1\nHost: r\n", ""},
		{"GET /dl/a?tag=t HTTP/1.1\nHost: r\nTE: trailers\nRange: bytes=0-1\n", ""},
		{"GET /v2/%2e%2e/%2e%2e/manifests/x HTTP/1.1\nHost: r\n", ""},
		{"POST /v2/token HTTP/1.1\nHost: r\nContent-Type: application/x-www-form-urlencoded\n", "password=%zz"},
		{"POST /api/gc HTTP/1.1\nHost: r\n", ""},
		{"BREW /metrics HTTP/1.1\nHost: r\n", ""},
	} {
		f.Add(seed.head, []byte(seed.body))
	}
	base := f.TempDir()
	dir := filepath.Join(base, "data")
	log := slog.New(slog.DiscardHandler)
	var c *content.Content
	var handler http.Handler
	fresh := func(t testing.TB) { // accumulated data would slow everything down
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		store, err := folder.New(dir)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = content.New(t.Context(), store, content.Config{Log: log, UploadTTL: time.Hour, Quota: 64 << 20}); err != nil {
			t.Fatal(err)
		}
		handler = registry.New(registry.Config{}, c, oneToken{}, prometheus.NewRegistry(), log)
	}
	n := 0
	f.Fuzz(func(t *testing.T, head string, body []byte) {
		if n++; n%500 == 1 {
			fresh(t)
		}
		u, err := c.Begin("a", "fuzz")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = u.Cancel() }() // no effect if it is finished
		head = strings.ReplaceAll(strings.ReplaceAll(head, "UPLOAD", u.ID), "\n", "\r\n") + "\r\n"
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(head)))
		if err != nil {
			return // the HTTP server refuses it
		}
		req.Header.Set("Authorization", "Bearer x")
		req.Body, req.ContentLength = http.NoBody, 0
		if len(body) > 0 {
			req.Body, req.ContentLength = readCloser{bytes.NewReader(body)}, int64(len(body))
		}
		rec := httptest.NewRecorder()
		func() {
			defer func() {
				if p := recover(); p != nil && p != http.ErrAbortHandler { //nolint:errorlint // panics hold what was thrown
					panic(p)
				}
			}()
			handler.ServeHTTP(rec, req.WithContext(t.Context()))
		}()
		switch code := rec.Code; {
		case code < 500, code == http.StatusInsufficientStorage, code == http.StatusServiceUnavailable:
		default:
			t.Errorf("%s %s: %d %s", req.Method, req.URL, code, rec.Body)
		}
		all, err := os.ReadDir(base)
		if err != nil || len(all) != 1 {
			t.Fatalf("%v beside the folder, %v", all, err)
		}
		checkFolder(t, dir)
	})
}

type readCloser struct{ *bytes.Reader }

func (readCloser) Close() error { return nil }

// checkFolder looks for files that no registry makes.
func checkFolder(t *testing.T, dir string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		switch e.Name() {
		case "blobs", "fresh", "repositories", "uploads", "quarantine", "lock", "tmp":
		default:
			t.Errorf("%s is in the folder", e.Name())
		}
	}
}
