package pull

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
)

// hub is a registry on loopback that requires a password.
type hub struct {
	host string

	mu    sync.Mutex
	blobs int // requests for blobs
	all   int
}

const hubUser, hubPassword = "puller", "hunter2"

func newHub(t *testing.T) *hub {
	h := &hub{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != hubUser || password != hubPassword {
			w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		h.mu.Lock()
		h.all++
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			h.blobs++
		}
		h.mu.Unlock()
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	h.host = strings.TrimPrefix(srv.URL, "http://")
	return h
}

// requests returns the number of requests since the last call, and how many of them were for content.
func (h *hub) requests() (all, blobs int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all, blobs = h.all, h.blobs
	h.all, h.blobs = 0, 0
	return all, blobs
}

// push stores an image of one file in the registry and returns its manifest's digest.
func (h *hub) push(t *testing.T, ref, content string) string {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	data := ociimage.Tar(ociimage.Dir("bin"), ociimage.File("bin/app", content))
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	must(err)
	img, err := mutate.AppendLayers(empty.Image, layer)
	must(err)
	config, err := img.ConfigFile()
	must(err)
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config = "linux", "amd64", v1.Config{Entrypoint: []string{"/bin/app"}}
	img, err = mutate.ConfigFile(img, config)
	must(err)
	dst, err := name.ParseReference(h.host+"/"+ref, name.Insecure)
	must(err)
	must(remote.Write(dst, img, remote.WithAuth(&authn.Basic{Username: hubUser, Password: hubPassword})))
	digest, err := img.Digest()
	must(err)
	return digest.String()
}

func TestPoliciesOfAnImageOfARegistry(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	h := newHub(t)
	manifest := h.push(t, "team/app:1", "one")
	r := newRig(t, Config{})
	auth := []image.RegistryAuth{{Registry: h.host, Username: hubUser, Password: hubPassword}}
	pull := func(name string, policy image.PullPolicy) (image.Image, error) {
		return r.Pull(t.Context(), image.PullRequest{Name: name, Policy: policy, Auth: auth}, nil)
	}
	ref := h.host + "/team/app:1"

	_, err := r.pull(ref, image.PullIfNotPresent)
	wantClass(t, "without credentials", err, errdefs.FailedPrecondition)
	h.requests()
	img, err := pull(ref, image.PullIfNotPresent)
	if err != nil || img.Digest != manifest || img.Name != ref || img.Type != vm.ImageOCI || img.Config.Entrypoint[0] != "/bin/app" {
		t.Fatalf("%+v, %v", img, err)
	}
	h.requests()
	for _, name := range []string{ref, h.host + "/team/app@" + manifest, "docker://" + ref} {
		if got, err := pull(name, image.PullIfNotPresent); err != nil || got.ID != img.ID {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if got, err := r.Get(t.Context(), name); err != nil || got.ID != img.ID {
			t.Errorf("a VM of %s would boot from %+v, %v", name, got, err)
		}
	}
	if all, _ := h.requests(); all != 0 {
		t.Errorf("an image that is here was asked for %d times", all)
	}
	if got, err := pull(ref, image.PullAlways); err != nil || got.ID != img.ID {
		t.Errorf("always: %+v, %v", got, err)
	}
	if all, blobs := h.requests(); all == 0 || blobs != 0 {
		t.Errorf("nothing new: %d requests, %d for content", all, blobs)
	}

	h.push(t, "team/app:1", "two")
	h.requests()
	if got, err := pull(ref, image.PullAlways); err != nil || got.ID == img.ID {
		t.Errorf("something new: %+v, %v", got, err)
	}

	// An alias may point to a registry; a digest in the name is that of the manifest.
	r.mapping("translations:\n- {name: alias, url: 'oci://" + ref + "'}\n")
	if got, err := pull("virtlet.cloud/alias", image.PullAlways); err != nil || got.Name != "alias" || got.ID == img.ID {
		t.Errorf("alias: %+v, %v", got, err)
	}
	if got, err := pull("alias@"+manifest, image.PullAlways); err != nil || got.ID != img.ID || got.Digest != manifest {
		t.Errorf("alias with a digest: %+v, %v", got, err)
	}
	_, err = pull(h.host+"/team/none:1", image.PullAlways)
	wantClass(t, "no such image", err, errdefs.NotFound)
}
