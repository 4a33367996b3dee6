package ociclient_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// TestAnswerBeforeTheBody: a registry that answers while a blob is sent to it gets the whole blob with a new token, and once PutBlob has returned nobody reads its bytes any more.
func TestAnswerBeforeTheBody(t *testing.T) {
	answer := http.StatusUnauthorized // to the next upload
	var got []byte
	var srv *httptest.Server
	srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/token":
			_, _ = io.WriteString(w, `{"token":"t"}`)
		case r.URL.Path == "/v2/" || r.Method == http.MethodPost && answer == http.StatusUnauthorized && r.ContentLength > 100:
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="test"`, srv.URL))
			fallthrough
		case r.Method == http.MethodPost && answer != http.StatusCreated && r.ContentLength > 100:
			code := http.StatusUnauthorized
			if r.Method == http.MethodPost {
				code, answer = answer, http.StatusCreated
			}
			if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
				t.Error(err)
			}
			w.WriteHeader(code)
			w.(http.Flusher).Flush()
			_, _ = io.Copy(io.Discard, r.Body) // until the client hangs up
		case r.Method == http.MethodPost:
			got, _ = io.ReadAll(r.Body)
			w.WriteHeader(http.StatusCreated)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(srv.Close)
	ref, err := ociclient.ParseRef(srv.URL + "/x")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ociclient.Open(t.Context(), ref, ociclient.Auth{Username: "u", Password: "p"}, ociclient.Push, ociclient.Config{Attempts: 1, Backoff: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	put := func(blob []byte) error {
		return s.PutBlob(t.Context(), ociclient.Digest(blob), int64(len(blob)), func() io.Reader { return bytes.NewReader(blob) })
	}
	if err := put([]byte("x")); err != nil { // from now on blobs are sent at once
		t.Fatal(err)
	}
	blob := bytes.Repeat([]byte("0123456789abcdef"), 2<<20) // more than a connection holds
	if err := put(blob); err != nil || !bytes.Equal(got, blob) {
		t.Errorf("the registry has got %d of %d bytes, or others: %v", len(got), len(blob), err)
	}
	clear(blob)
	answer = http.StatusInsufficientStorage
	if err := put(blob); !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), "no room") {
		t.Errorf("a registry that is full: %v", err)
	}
	clear(blob)
}
