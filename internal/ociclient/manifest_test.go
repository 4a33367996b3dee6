package ociclient_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	godigest "github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// Content that is named by a digest has that digest, whatever the algorithm.
func TestManifestIsThatOfItsDigest(t *testing.T) {
	const wanted, served = `{"schemaVersion":2}`, `{"schemaVersion":2,"evil":true}`
	body := wanted
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", ociclient.MediaManifest)
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(srv.Close)
	ref, err := ociclient.ParseRef(strings.TrimPrefix(srv.URL, "http://") + "/x")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ociclient.Open(t.Context(), ref, ociclient.Auth{Token: "t"}, ociclient.Pull, ociclient.Config{Attempts: 1, Backoff: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	for _, algorithm := range []godigest.Algorithm{godigest.SHA256, godigest.SHA512} {
		id := algorithm.FromString(wanted).String()
		body = wanted
		if raw, _, err := s.Manifest(t.Context(), id); err != nil || string(raw) != wanted {
			t.Errorf("%s: %s, %v", algorithm, raw, err)
		}
		body = served
		if _, _, err := s.Manifest(t.Context(), id); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: other bytes are taken: %v", algorithm, err)
		}
	}
}
