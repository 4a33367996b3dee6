package fetch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/translate"
)

// quick makes clients retry without a wait.
var quick = Options{Backoff: time.Nanosecond, MaxWait: time.Nanosecond, Attempts: 4}

func client(t testing.TB, o Options) *Client {
	c := New(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// get fetches a whole file.
func get(t testing.TB, c *Client, r Request) ([]byte, *Body, error) {
	t.Helper()
	b, err := c.Get(t.Context(), r)
	if err != nil {
		return nil, nil, err
	}
	t.Cleanup(func() { _ = b.Close() })
	got, err := io.ReadAll(b)
	return got, b, err
}

// content is n bytes that look random and are the same every time.
func content(n int) []byte {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(p)
	return p
}

func digestOf(p []byte) string {
	sum := sha256.Sum256(p)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// origin serves one file as real servers do, and records the requests.
type origin struct {
	data     []byte
	etag     string
	modified time.Time

	mu       sync.Mutex
	requests []*http.Request
}

func (o *origin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.seen(r)
	if o.etag != "" {
		w.Header().Set("ETag", o.etag)
	}
	http.ServeContent(w, r, "", o.modified, bytes.NewReader(o.data))
}

func (o *origin) seen(r *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requests = append(o.requests, r)
}

func (o *origin) asked() []*http.Request {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]*http.Request(nil), o.requests...)
}

// serve runs h until the test ends.
func serve(t testing.TB, h http.HandlerFunc) string {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestWholeFile(t *testing.T) {
	for _, n := range []int{0, 1, hashBlock - 1, hashBlock, hashBlock + 1, hashBlock*(hashBlocks+3) + 17} {
		o := &origin{data: content(n), etag: `"one"`, modified: time.Unix(1700000000, 0)}
		url := serve(t, o.ServeHTTP)
		got, b, err := get(t, client(t, quick), Request{URL: url + "/a.img", Digest: digestOf(o.data)})
		if err != nil || !bytes.Equal(got, o.data) {
			t.Fatalf("%d bytes: got %d, %v", n, len(got), err)
		}
		if b.Sum() != digestOf(o.data) || b.Size() != int64(n) || b.ETag() != `"one"` || b.LastModified() != "Tue, 14 Nov 2023 22:13:20 GMT" || b.NotModified() {
			t.Errorf("%d bytes: %s, size %d, etag %s, modified %s", n, b.Sum(), b.Size(), b.ETag(), b.LastModified())
		}
		if h := o.asked()[0].Header; h.Get("User-Agent") != "cocoon" || h.Get("Accept-Encoding") != "identity" {
			t.Errorf("asked with %v", h)
		}
	}
}

func TestUnknownLength(t *testing.T) {
	data := content(200 << 10)
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		for p := data; len(p) > 0; p = p[1<<10:] {
			_, _ = w.Write(p[:1<<10])
			_ = http.NewResponseController(w).Flush()
		}
	})
	got, b, err := get(t, client(t, quick), Request{URL: url})
	if err != nil || !bytes.Equal(got, data) || b.Size() != -1 || b.Sum() != digestOf(data) {
		t.Errorf("%d bytes, size %d, %v", len(got), b.Size(), err)
	}
}

func TestConditionalFetch(t *testing.T) {
	o := &origin{data: content(100), etag: `"v1"`, modified: time.Unix(1700000000, 0)}
	c, url := client(t, quick), serve(t, o.ServeHTTP)
	for name, r := range map[string]Request{
		"by ETag": {URL: url, ETag: `"v1"`},
		"by date": {URL: url, LastModified: o.modified.UTC().Format(http.TimeFormat)},
	} {
		b, err := c.Get(t.Context(), r)
		if err != nil || !b.NotModified() || b.ETag() != `"v1"` {
			t.Fatalf("%s: %v", name, err)
		}
		if n, err := b.Read(make([]byte, 1)); n != 0 || !errdefs.IsFailedPrecondition(err) || b.Sum() != "" {
			t.Errorf("%s: what was not modified can be read: %d, %v", name, n, err)
		}
		if err := errors.Join(b.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	}
	if got, b, err := get(t, c, Request{URL: url, ETag: `"v0"`}); err != nil || b.NotModified() || len(got) != 100 {
		t.Errorf("a new version was not fetched: %v", err)
	}
}

func TestBadRequestsAreRefusedBeforeAnythingIsAsked(t *testing.T) {
	minus := -1
	for name, r := range map[string]Request{
		"empty":             {},
		"no scheme":         {URL: "example.com/a"},
		"other scheme":      {URL: "ftp://user:hush@example.com/a"},
		"file":              {URL: "file:///etc/hush"},
		"no host":           {URL: "http:///hush"},
		"only a port":       {URL: "http://:80/hush"},
		"opaque":            {URL: "http:hush"},
		"control character": {URL: "http://user:hush@example.com/\x00"},
		"bad escape":        {URL: "http://user:hush@example.com/%zz"},
		"other algorithm":   {URL: "http://127.0.0.1:1", Digest: "sha512:" + strings.Repeat("0", 128)},
		"short digest":      {URL: "http://127.0.0.1:1", Digest: "sha256:00"},
		"bare digest":       {URL: "http://127.0.0.1:1", Digest: strings.Repeat("0", 64)},
		"checksums":         {URL: "http://127.0.0.1:1", Checksums: "gopher://hush"},
		"redirects":         {URL: "http://127.0.0.1:1", Profile: &translate.Profile{MaxRedirects: &minus}},
		"proxy scheme":      {URL: "http://127.0.0.1:1", Profile: &translate.Profile{Proxy: "ftp://u:hush@h"}},
		"proxy":             {URL: "http://127.0.0.1:1", Profile: &translate.Profile{Proxy: "http://u:hush@%zz"}},
	} {
		_, err := client(t, quick).Get(t.Context(), r)
		if !errdefs.IsInvalid(err) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStatement30_AnyFinalStatusButOKIsAnError(t *testing.T) {
	for _, tc := range []struct {
		status int
		class  errdefs.Class
		asked  int
	}{
		{204, errdefs.FailedPrecondition, 1},
		{206, errdefs.FailedPrecondition, 1},
		{300, errdefs.FailedPrecondition, 1},
		{304, errdefs.FailedPrecondition, 1}, // the request did not ask whether it changed
		{400, errdefs.FailedPrecondition, 1},
		{401, errdefs.FailedPrecondition, 1},
		{403, errdefs.FailedPrecondition, 1},
		{404, errdefs.NotFound, 1},
		{410, errdefs.NotFound, 1},
		{416, errdefs.FailedPrecondition, 1},
		{429, errdefs.Unavailable, 4},
		{500, errdefs.Unavailable, 4},
		{501, errdefs.FailedPrecondition, 1},
		{502, errdefs.Unavailable, 4},
		{503, errdefs.Unavailable, 4},
		{504, errdefs.Unavailable, 4},
	} {
		o := &origin{}
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			o.seen(r)
			w.WriteHeader(tc.status)
		})
		_, err := client(t, quick).Get(t.Context(), Request{URL: url + "/a?token=hush"})
		if !errdefs.Is(err, tc.class) || !strings.Contains(err.Error(), strconv.Itoa(tc.status)) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%d: %v (%v)", tc.status, err, errdefs.ClassOf(err))
		}
		if n := len(o.asked()); n != tc.asked {
			t.Errorf("%d: asked %d times, want %d", tc.status, n, tc.asked)
		}
	}
}

func TestATroubledServerIsAskedAgain(t *testing.T) {
	o := &origin{data: content(10)}
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if len(o.asked()) < 3 {
			o.seen(r)
			w.Header().Set("Retry-After", "3600") // no more than MaxWait
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		o.ServeHTTP(w, r)
	})
	if got, _, err := get(t, client(t, quick), Request{URL: url}); err != nil || len(got) != 10 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		cancel()
	})
	if _, err := client(t, Options{Backoff: time.Hour, MaxWait: time.Hour}).Get(ctx, Request{URL: url}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestNoServer(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	srv.Close()
	_, err := client(t, quick).Get(t.Context(), Request{URL: "http://u:hush@" + srv.Listener.Addr().String()})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "tried 4 times") || strings.Contains(err.Error(), "hush") {
		t.Error(err)
	}
}

func TestCredentialsStayWithTheirOrigin(t *testing.T) {
	elsewhere := &origin{data: content(10)}
	other := serve(t, elsewhere.ServeHTTP)
	here := &origin{data: content(10)}
	var back string
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/here":
			here.seen(r)
			http.Redirect(w, r, "/final", http.StatusFound)
		case "/absolute":
			here.seen(r)
			http.Redirect(w, r, back+"/final", http.StatusFound)
		case "/away":
			http.Redirect(w, r, other+"/x", http.StatusTemporaryRedirect)
		default:
			here.ServeHTTP(w, r)
		}
	})
	back = url
	with := strings.Replace(url, "http://", "http://user:hush%40@", 1)
	c := client(t, quick)
	for _, path := range []string{"/final", "/here", "/absolute", "/away"} {
		if _, _, err := get(t, c, Request{URL: with + path}); err != nil {
			t.Fatal(err)
		}
	}
	if len(here.asked()) != 5 || len(elsewhere.asked()) != 1 {
		t.Fatalf("asked %d times here, %d elsewhere", len(here.asked()), len(elsewhere.asked()))
	}
	for _, r := range here.asked() {
		if user, pw, ok := r.BasicAuth(); !ok || user != "user" || pw != "hush@" {
			t.Errorf("%s was asked for without its credentials", r.URL)
		}
	}
	if h := elsewhere.asked()[0].Header; h.Get("Authorization") != "" || h.Get("Referer") != "" {
		t.Errorf("another host was told %v", h)
	}
}

func TestNothingSecretIsLoggedOrInErrors(t *testing.T) {
	var log bytes.Buffer
	o := quick
	o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
	_, err := client(t, o).Get(t.Context(), Request{
		URL: strings.Replace(url, "http://", "http://user:hush@", 1) + "/a.img?sig=hush#hush",
	})
	if !errdefs.IsUnavailable(err) || !strings.Contains(log.String(), "/a.img?...") {
		t.Errorf("%v\n%s", err, log.String())
	}
	if all := err.Error() + log.String(); strings.Contains(all, "hush") {
		t.Error(all)
	}
}

func TestStatement40_ADigestThatDoesNotMatchIsDataLoss(t *testing.T) {
	for _, n := range []int{0, 100, 3 << 20} {
		o := &origin{data: content(n)}
		want := digestOf([]byte("something else"))
		got, b, err := get(t, client(t, quick), Request{URL: serve(t, o.ServeHTTP), Digest: want})
		if !errdefs.Is(err, errdefs.DataLoss) || len(got) != n || b.Sum() != "" {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		for _, part := range []string{"digest mismatch", want, digestOf(o.data)} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v does not say %q", err, part)
			}
		}
		if _, again := b.Read(make([]byte, 1)); !errors.Is(again, err) {
			t.Errorf("afterwards: %v", again)
		}
	}
}

func TestDrain(t *testing.T) {
	o := &origin{data: content(3 << 20)}
	url := serve(t, o.ServeHTTP)
	for digest, class := range map[string]errdefs.Class{digestOf(o.data): -1, digestOf(nil): errdefs.DataLoss} {
		b, err := client(t, quick).Get(t.Context(), Request{URL: url, Digest: digest})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		if _, err := io.CopyN(io.Discard, b, 10); err != nil {
			t.Fatal(err)
		}
		if err := b.Drain(); class < 0 && err != nil || class >= 0 && !errdefs.Is(err, class) {
			t.Error(err)
		}
	}
}

func TestChecksumFile(t *testing.T) {
	o := &origin{data: content(1000)}
	good, bad := digestOf(o.data)[7:], digestOf(nil)[7:]
	sums := ""
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if user, _, _ := r.BasicAuth(); user != "u" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/SHA256SUMS") {
			fmt.Fprint(w, sums)
			return
		}
		o.ServeHTTP(w, r)
	})
	url = strings.Replace(url, "http://", "http://u:p@", 1)
	beside := strings.Replace(url, "u:p@", "", 1) + "/d/SHA256SUMS" // same origin: the same credentials apply
	for _, tc := range []struct {
		name, sums, demanded string
		class                errdefs.Class
		words                string
	}{
		{"listed", bad + "  other.img\n" + good + "  a.img\n", "", -1, ""},
		{"listed and demanded", good + " *a.img\n", "sha256:" + good, -1, ""},
		{"wrong", bad + "  a.img\n", "", errdefs.DataLoss, "digest mismatch"},
		{"demanded otherwise", good + "  a.img\n", "sha256:" + bad, errdefs.DataLoss, "digest mismatch"},
		{"not listed", good + "  b.img\n", "", errdefs.FailedPrecondition, `does not list "a.img"`},
		{"listed twice", good + "  a.img\n" + bad + "  x/a.img\n", "", errdefs.FailedPrecondition, "twice"},
		{"huge", strings.Repeat("#", maxSums+1), "", errdefs.FailedPrecondition, "larger than"},
	} {
		sums = tc.sums
		got, _, err := get(t, client(t, quick), Request{URL: url + "/d/a.img?x=y", Checksums: beside, Digest: tc.demanded})
		switch {
		case tc.class < 0 && (err != nil || !bytes.Equal(got, o.data)):
			t.Errorf("%s: %v", tc.name, err)
		case tc.class >= 0 && (!errdefs.Is(err, tc.class) || !strings.Contains(err.Error(), tc.words)):
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	_, _, err := get(t, client(t, quick), Request{URL: url + "/d/a.img", Checksums: strings.TrimSuffix(url, "/") + "x.invalid/SHA256SUMS"})
	if err == nil {
		t.Error("fetched without its checksums")
	}
}

func TestStatement36_AnEndedFetchHoldsNoConnection(t *testing.T) {
	gone := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000000")
		_, _ = w.Write(content(1000))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	})
	ctx, cancel := context.WithCancel(t.Context())
	b, err := client(t, quick).Get(ctx, Request{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: %v", err)
	}
	<-gone // the server saw the client leave before Close
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}
