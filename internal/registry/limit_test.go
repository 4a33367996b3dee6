package registry_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
)

// A token that begins uploads and never finishes them cannot fill the disk with files or block others.
func TestManyUploadsOfOneToken(t *testing.T) {
	const perToken = 100
	r := newRig(t, registry.Config{}, content.Config{Uploads: content.UploadLimits{PerOwner: perToken, Total: 1000}})
	greedy := "Authorization: Bearer " + pushToken
	refused := 0
	for range 2000 {
		switch got := r.do("POST", "/v2/team/x/blobs/uploads/", nil, greedy); got.StatusCode {
		case http.StatusAccepted:
		case http.StatusTooManyRequests:
			refused++
			r.want(got, http.StatusTooManyRequests, content.TooManyRequests)
			if got.Header.Get("Retry-After") == "" {
				t.Fatal("no Retry-After")
			}
		default:
			t.Fatalf("%s: %s", got.Status, got.body)
		}
	}
	left, err := os.ReadDir(filepath.Join(r.dir, "uploads"))
	if err != nil {
		t.Fatal(err)
	}
	if n := r.content.Usage().Uploads; n != perToken || refused != 2000-perToken || len(left) != 2*perToken {
		t.Errorf("%d uploads and %d files are left, %d were refused", n, len(left), refused)
	}
	r.want(r.do("POST", "/v2/team/x/blobs/uploads/", nil), http.StatusAccepted) // another token
	blob := []byte("in one request")
	r.want(r.do("POST", "/v2/team/x/blobs/uploads/?digest="+digest.FromBytes(blob).String(), blob, greedy), http.StatusCreated)
	want := fmt.Sprintf("epoch_uploads_refused_total{limit=\"token\"} %d", refused)
	if metrics := r.do("GET", "/metrics", nil); !strings.Contains(string(metrics.body), want) {
		t.Errorf("metrics lack %s", want)
	}
}

// The received bytes of unfinished uploads count against the quota, which all clients share.
func TestUnfinishedUploadsCountAgainstTheQuota(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{Quota: 3 << 20})
	part := bytes.Repeat([]byte("x"), 1<<20)
	for range 3 {
		at := r.want(r.do("POST", "/v2/team/x/blobs/uploads/", nil), http.StatusAccepted).Header.Get("Location")
		r.want(r.do("PATCH", at, part), http.StatusAccepted)
	}
	at := r.want(r.do("POST", "/v2/team/x/blobs/uploads/", nil), http.StatusAccepted).Header.Get("Location")
	r.want(r.do("PATCH", at, part), http.StatusForbidden, content.Denied)
	r.want(r.do("PUT", "/v2/team/x/blobs/"+digest.FromBytes(part).String(), part), http.StatusForbidden, content.Denied)
	if got := r.content.Usage(); got.Staged != 3<<20 {
		t.Errorf("%d bytes are counted", got.Staged)
	}
}
