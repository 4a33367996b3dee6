package tenancy

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// hub is a registry of images. Each owner has repositories that only he may read. Everybody may read the repositories of
// Public.
type hub struct {
	host string
	base v1.Image // of all images
}

func newHub(t *testing.T, base v1.Image) *hub {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		repo, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v2/"), "/")
		read := r.Method == http.MethodGet || r.Method == http.MethodHead
		may := read && (repo == "" && user == "" || repo == Public.prefix())
		for _, o := range Columns {
			may = may || user == o.prefix() && password == o.Secret() && (repo == "" || repo == o.prefix())
		}
		if !may {
			w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return &hub{host: strings.TrimPrefix(srv.URL, "http://"), base: base}
}

// layer is an image layer with a file of that name.
func layer(t *testing.T, file string) v1.Layer {
	t.Helper()
	data := ociimage.Tar(ociimage.File(file, file))
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// name is the name of the image of w.
func (h *hub) name(w Whose) string { return h.host + "/" + w.prefix() + "/app:1" }

// auth returns the credentials of w. Public images are read without credentials.
func (h *hub) auth(w Whose) []image.RegistryAuth {
	if w == Public {
		return nil
	}
	return []image.RegistryAuth{{Registry: h.host, Username: w.prefix(), Password: w.Secret()}}
}

// put pushes an image of w, different from all others, to w's repository.
func (h *hub) put(t *testing.T, w Whose) {
	t.Helper()
	img, err := mutate.AppendLayers(h.base, layer(t, w.prefix()))
	if err != nil {
		t.Fatal(err)
	}
	to, err := name.ParseReference(h.name(w), name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(to, img, remote.WithAuth(&authn.Basic{Username: w.prefix(), Password: w.Secret()})); err != nil {
		t.Fatal(err)
	}
}
