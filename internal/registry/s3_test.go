package registry_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/s3"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// The same registry with its data in a bucket: push, pull, ranges, downloads, collection, scrub, and a restart.
func TestOnS3(t *testing.T) {
	backend := s3mem.New()
	if err := backend.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	service := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(service.Close)
	on := func() *rig {
		store, err := s3.New(t.Context(), s3.Config{
			Endpoint: strings.TrimPrefix(service.URL, "http://"), Insecure: true, Region: "us-east-1", Bucket: "bucket", Prefix: "epoch/",
			Access: "a", Secret: "s", Staging: t.TempDir(),
		})
		if err != nil {
			t.Fatal(err)
		}
		return rigOn(t, store, registry.Config{VerifyReads: true}, content.Config{})
	}
	r := on()
	img, err := random.Image(200<<10, 3)
	if err != nil {
		t.Fatal(err)
	}
	opts := []remote.Option{remote.WithAuth(authn.FromConfig(authn.AuthConfig{RegistryToken: allToken})), remote.WithContext(t.Context())}
	ref := parseRef(t, strings.TrimPrefix(r.url, "http://")+"/team/app:v1")
	if err := remote.Write(ref, img, opts...); err != nil {
		t.Fatal(err)
	}
	disk := r.pushDisk("disk", "latest")
	r.pushBlob("team/app", []byte("orphan"))

	usage := r.content.Usage()
	r = on() // the pushed data is in the bucket
	if d := diff.Of(usage, r.content.Usage()); d != "" {
		t.Errorf("usage %s", d)
	}
	ref = parseRef(t, strings.TrimPrefix(r.url, "http://")+"/team/app:v1")
	got, err := remote.Image(ref, opts...)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(got); err != nil {
		t.Error(err)
	}
	if got := r.want(r.do("GET", "/dl/disk", nil), 200); string(got.body) != string(disk) {
		t.Error("another disk came")
	}
	part := r.want(r.do("GET", "/dl/disk", nil, "Range: bytes=700000-700099"), 206)
	if string(part.body) != string(disk[700000:700100]) {
		t.Error("another part came")
	}
	done, err := r.content.Collect(t.Context(), true)
	if err != nil || done.Blobs != 1 || done.Bytes != int64(len("orphan")) {
		t.Errorf("%+v, %v", done, err)
	}
	if s, err := r.content.Scrub(t.Context()); err != nil || s.Damaged != 0 || s.Objects == 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if err := remote.Delete(ref, opts...); err != nil {
		t.Error(err)
	}
}
