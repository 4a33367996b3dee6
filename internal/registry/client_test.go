package registry_test

import (
	"bytes"
	"crypto/rand"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
)

// This is the library that clients use: push, pull, list, copy, delete, with each way to pass a token.
func TestGoContainerRegistry(t *testing.T) {
	for _, c := range []struct {
		how  string
		auth authn.AuthConfig
	}{
		{"bearer", authn.AuthConfig{RegistryToken: allToken}},
		{"password", authn.AuthConfig{Username: "anybody", Password: allToken}},
		{"identity token", authn.AuthConfig{IdentityToken: allToken}},
	} {
		t.Run(c.how, func(t *testing.T) {
			r := newRig(t, registry.Config{}, content.Config{})
			opts := []remote.Option{remote.WithAuth(authn.FromConfig(c.auth)), remote.WithContext(t.Context())}
			host := strings.TrimPrefix(r.url, "http://")
			ref := parseRef(t, host+"/team/app:one")
			index, err := random.Index(100<<10, 3, 2)
			if err != nil {
				t.Fatal(err)
			}
			if err := remote.WriteIndex(ref, index, opts...); err != nil {
				t.Fatal(err)
			}
			got, err := remote.Index(ref, opts...)
			if err != nil {
				t.Fatal(err)
			}
			if err := validate.Index(got); err != nil {
				t.Fatal(err)
			}
			// A copy mounts the blobs.
			before := r.content.Usage().Blobs
			if err := remote.WriteIndex(parseRef(t, host+"/team/copy:two"), got, opts...); err != nil {
				t.Fatal(err)
			}
			if now := r.content.Usage().Blobs; now != before {
				t.Errorf("%d blobs became %d by a copy", before, now)
			}
			repos, err := remote.Catalog(t.Context(), ref.Context().Registry, opts...)
			if err != nil || strings.Join(repos, " ") != "team/app team/copy" {
				t.Fatalf("catalog %v, %v", repos, err)
			}
			tags, err := remote.List(ref.Context(), opts...)
			if err != nil || strings.Join(tags, " ") != "one" {
				t.Fatalf("tags %v, %v", tags, err)
			}
			desc, err := remote.Head(ref, opts...)
			if err != nil {
				t.Fatal(err)
			}
			if err := remote.Delete(ref.Context().Digest(desc.Digest.String()), opts...); err != nil {
				t.Fatal(err)
			}
			if _, err := remote.Head(ref, opts...); err == nil {
				t.Error("a deleted manifest is still tagged")
			}
		})
	}
}

func TestAnonymousClients(t *testing.T) {
	for _, open := range []bool{false, true} {
		r := newRig(t, registry.Config{AnonymousPull: open}, content.Config{})
		r.pushImage("team/app", "latest", "layer")
		ref := parseRef(t, strings.TrimPrefix(r.url, "http://")+"/team/app:latest")
		img, err := remote.Image(ref, remote.WithContext(t.Context()))
		if (err == nil) != open {
			t.Fatalf("anonymous pull %v: %v", open, err)
		}
		other, randErr := random.Image(1<<10, 1)
		if randErr != nil {
			t.Fatal(randErr)
		}
		if err := remote.Write(ref, other, remote.WithContext(t.Context())); err == nil {
			t.Error("nobody may push")
		}
		for _, token := range []string{"wrong", oldToken} {
			r.want(r.do("GET", "/v2/team/app/manifests/latest", nil, "Authorization: Bearer "+token), http.StatusUnauthorized, content.Unauthorized)
		}
		if open {
			if _, err := img.RawConfigFile(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLargeBlobThroughTheClient(t *testing.T) {
	r := newRig(t, registry.Config{VerifyReads: true}, content.Config{})
	data := make([]byte, 20<<20)
	_, _ = rand.Read(data)
	d := r.pushBlob("big", data)
	got := r.want(r.do("GET", "/v2/big/blobs/"+d.Digest.String(), nil), http.StatusOK)
	if string(got.body) != string(data) {
		t.Error("other bytes came back")
	}
}

func parseRef(t *testing.T, s string) name.Reference {
	t.Helper()
	ref, err := name.ParseReference(s)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// A client whose bytes end too early leaves nothing, and one that streams learns the digest at the end.
func TestStreamedBlob(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	ref, err := ociclient.ParseRef(r.url + "/uploads/team/disk")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ociclient.Open(t.Context(), ref, ociclient.Auth{Token: allToken}, ociclient.Push, ociclient.Config{Attempts: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	digest, size, err := s.StreamBlob(t.Context(), iotest.HalfReader(bytes.NewReader(data)))
	if err != nil || size != int64(len(data)) || digest != ociclient.Digest(data) {
		t.Fatalf("%s with %d bytes, %v", digest, size, err)
	}
	if got := r.want(r.do("GET", "/v2/uploads/team/disk/blobs/"+digest, nil), http.StatusOK); !bytes.Equal(got.body, data) {
		t.Error("other bytes came back")
	}
	gone := errdefs.Invalidf("the sender is gone")
	if _, _, err := s.StreamBlob(t.Context(), io.MultiReader(bytes.NewReader(data), iotest.ErrReader(gone))); err != gone { //nolint:errorlint // it is unchanged
		t.Errorf("the error became %v", err)
	}
	if n := r.content.Usage().Uploads; n != 0 {
		t.Errorf("%d uploads are left", n)
	}
}
