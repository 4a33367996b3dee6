package pull

import (
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// newOffice is a hub where everybody may read public/, and a second user may read everything.
func newOffice(t *testing.T) (h *hub, down *atomic.Bool) {
	h, down = &hub{}, &atomic.Bool{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if down.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		user, password, _ := r.BasicAuth()
		known := password == hubPassword && (user == hubUser || user == "second")
		read := (r.Method == http.MethodGet || r.Method == http.MethodHead) && (r.URL.Path == "/v2/" || strings.HasPrefix(r.URL.Path, "/v2/public/"))
		if !known && (!read || user != "") {
			w.Header().Set("WWW-Authenticate", `Basic realm="office"`)
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
	return h, down
}

// wish is the request of a pod of a namespace.
type wish struct {
	namespace string
	user      string // "": no credentials
	name      string
	policy    image.PullPolicy
}

func (r *rig) wish(h *hub, w wish) (image.Image, error) {
	req := image.PullRequest{Name: w.name, Policy: w.policy}
	if w.user != "" {
		req.Auth = []image.RegistryAuth{{Registry: h.host, Username: w.user, Password: hubPassword}}
	}
	return r.Pull(r.behalf(w.namespace), req, nil)
}

// loopback allows the addresses of the test servers.
func loopback(t *testing.T) Reach {
	p, err := (reach.Policy{}).Open([]string{"127.0.0.0/8", "::1"})
	if err != nil {
		t.Fatal(err)
	}
	return Reach{URLs: p, Registries: p}
}

func (r *rig) behalf(namespace string) context.Context {
	return vm.OnBehalf(r.t.Context(), vm.Owner{Namespace: namespace})
}

func TestCachedImagesAreOfWhoMayPullThem(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	h, down := newOffice(t)
	digest := h.push(t, "team/app:1", "secret")
	h.push(t, "public/app:1", "public")
	ref, open := h.host+"/team/app:1", h.host+"/public/app:1"
	r := newRig(t, Config{Reach: loopback(t)})
	img, err := r.wish(h, wish{"alice", hubUser, ref, image.PullIfNotPresent})
	if err != nil {
		t.Fatal(err)
	}
	free, err := r.wish(h, wish{"alice", "", open, image.PullIfNotPresent})
	if err != nil {
		t.Fatal(err)
	}
	hand, err := r.store.Import(t.Context(), "hand", strings.NewReader(string(diskOf(7, 1<<20))), nil)
	if err != nil {
		t.Fatal(err)
	}
	const always, present, never = image.PullAlways, image.PullIfNotPresent, image.PullNever
	pinned := h.host + "/team/app@" + digest
	hex := strings.TrimPrefix(img.ID, "sha256:")
	for _, c := range []struct {
		what string
		wish
		id    string // "": refused
		class errdefs.Class
		asked bool
	}{
		{"who pulled it", wish{"alice", hubUser, ref, present}, img.ID, 0, false},
		{"who pulled it, by digest", wish{"alice", hubUser, pinned, present}, img.ID, 0, false},
		{"who pulled it, never", wish{"alice", hubUser, ref, never}, img.ID, 0, false},
		{"who pulled it, by id", wish{"alice", hubUser, img.ID, present}, img.ID, 0, false},
		{"the same credentials elsewhere", wish{"carol", hubUser, ref, never}, img.ID, 0, false},
		{"the same namespace without credentials", wish{"alice", "", ref, present}, "", errdefs.FailedPrecondition, false},
		{"no credentials", wish{"bob", "", ref, present}, "", errdefs.FailedPrecondition, false},
		{"no credentials, never", wish{"bob", "", ref, never}, "", errdefs.NotFound, false},
		{"no credentials, always", wish{"bob", "", ref, always}, "", errdefs.FailedPrecondition, false},
		{"no credentials, by digest", wish{"bob", "", pinned, present}, "", errdefs.FailedPrecondition, false},
		{"no credentials, by digest, always", wish{"bob", "", pinned, always}, "", errdefs.FailedPrecondition, false},
		{"no credentials, by id", wish{"bob", "", img.ID, present}, "", errdefs.NotFound, false},
		{"no credentials, by id, never", wish{"bob", "", img.ID, never}, "", errdefs.NotFound, false},
		{"no credentials, by a part of the id", wish{"bob", "", "sha256:" + hex[:12], never}, "", errdefs.NotFound, false},
		{"no credentials, by bare digits", wish{"bob", "", hex[:12], never}, "", errdefs.NotFound, false},
		{"an id that has to be asked for", wish{"bob", "", img.ID, always}, "", errdefs.InvalidArgument, false},
		{"an id that has to be asked for, of one's own", wish{"alice", hubUser, img.ID, always}, "", errdefs.InvalidArgument, false},
		{"wrong credentials", wish{"bob", "nobody", ref, present}, "", errdefs.FailedPrecondition, false},
		{"other credentials, never", wish{"bob", "second", ref, never}, "", errdefs.NotFound, false},
		{"other credentials", wish{"bob", "second", ref, present}, img.ID, 0, true},
		{"other credentials again", wish{"bob", "second", ref, never}, img.ID, 0, false},
		{"a public image", wish{"bob", "", open, never}, free.ID, 0, false},
		{"a public image by its id", wish{"bob", "", free.ID, present}, free.ID, 0, false},
		{"an imported image", wish{"bob", "", "hand", present}, hand.ID, 0, false},
		{"an imported image by its id", wish{"bob", "", hand.ID, present}, hand.ID, 0, false},
		{"the operator", wish{"", "", ref, present}, img.ID, 0, false},
		{"the operator by id", wish{"", "", img.ID, always}, img.ID, 0, false},
	} {
		h.requests()
		got, err := r.wish(h, c.wish)
		all, blobs := h.requests()
		switch {
		case c.id != "" && (err != nil || got.ID != c.id):
			t.Errorf("%s: %s, %v", c.what, got.ID, err)
		case c.id == "":
			wantClass(t, c.what, err, c.class)
		}
		if blobs > 0 || c.asked != (all > 0) && c.class != errdefs.FailedPrecondition {
			t.Errorf("%s: %d requests, %d for content", c.what, all, blobs)
		}
	}

	// VMs are made without credentials, from images for which the namespace has shown credentials before.
	for _, c := range []struct {
		namespace, ref string
		ok             bool
	}{
		{"alice", ref, true},
		{"alice", img.ID, true},
		{"bob", ref, true},
		{"dave", ref, false},
		{"dave", img.ID, false},
		{"dave", pinned, false},
		{"dave", hex, false},
		{"dave", open, true},
		{"dave", "hand", true},
		{"", img.ID, true},
	} {
		got, err := r.Get(r.behalf(c.namespace), c.ref)
		if c.ok && err != nil || !c.ok && !errdefs.IsNotFound(err) {
			t.Errorf("a VM of %s in %q: %s, %v", c.ref, c.namespace, got.ID, err)
		}
	}

	// Grants survive the process, and end with the image.
	down.Store(true)
	if r.store, err = local.New(local.Config{Dir: filepath.Join(r.dir, "store")}); err != nil {
		t.Fatal(err)
	}
	if r.Puller, err = New(Config{Mappings: filepath.Join(r.dir, "images.d"), Reach: loopback(t)}, r.store); err != nil {
		t.Fatal(err)
	}
	if got, err := r.wish(h, wish{"alice", hubUser, ref, present}); err != nil || got.ID != img.ID {
		t.Errorf("after a restart: %s, %v", got.ID, err)
	}
	_, err = r.wish(h, wish{"dave", "", ref, never})
	wantClass(t, "after a restart, without credentials", err, errdefs.NotFound)
	_, err = r.wish(h, wish{"dave", "third", ref, present})
	wantClass(t, "the registry is down", err, errdefs.Unavailable)
	down.Store(false)
	if err := r.store.Remove(t.Context(), ref, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.pullAs(h, "second", ref); err != nil {
		t.Fatal(err)
	}
	_, err = r.wish(h, wish{"alice", hubUser, ref, never})
	wantClass(t, "credentials of the image that was removed", err, errdefs.NotFound)
}

// pullAs pulls on behalf of alice with the credentials of user.
func (r *rig) pullAs(h *hub, user, ref string) (image.Image, error) {
	return r.wish(h, wish{"alice", user, ref, image.PullIfNotPresent})
}

// Nothing of a credential can be read or tested on another host.
func TestGrantsHoldNoSecrets(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	h, _ := newOffice(t)
	h.push(t, "team/app:1", "secret")
	r := newRig(t, Config{Reach: loopback(t)})
	img, err := r.pullAs(h, hubUser, h.host+"/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.dir, "store", "data", strings.TrimPrefix(img.ID, "sha256:"), "grants.json")
	text, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(text), hubPassword) || strings.Contains(string(text), hubUser) {
		t.Errorf("%s, %v", text, err)
	}
	for _, p := range []string{path, filepath.Join(r.dir, "store", "grants.key")} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", p, info, err)
		}
	}
	if err := os.Remove(filepath.Join(r.dir, "store", "grants.key")); err != nil {
		t.Fatal(err)
	}
	_, err = r.wish(h, wish{"alice", hubUser, h.host + "/team/app:1", image.PullNever})
	wantClass(t, "the key is gone", err, errdefs.NotFound)
	if _, err := r.pullAs(h, hubUser, h.host+"/team/app:1"); err != nil {
		t.Errorf("asked anew: %v", err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.pullAs(h, hubUser, h.host+"/team/app:1"); err != nil {
		t.Errorf("grants that are damaged: %v", err)
	}
}

// Content fetched with a password in the URL is not available to a request without the password.
func TestURLsWithSecrets(t *testing.T) {
	w := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if _, password, _ := r.BasicAuth(); password != hubPassword && r.URL.Path != "/open.img" {
			out.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = out.Write(diskOf(3, 1<<20))
	}))
	t.Cleanup(w.Close)
	host := strings.TrimPrefix(w.URL, "http://")
	r := newRig(t, Config{Reach: loopback(t)})
	pull := func(namespace, name string, policy image.PullPolicy) error {
		_, err := r.Pull(r.behalf(namespace), image.PullRequest{Name: name, Policy: policy}, nil)
		return err
	}
	secret := "http://u:" + hubPassword + "@" + host + "/d.img"
	if err := pull("alice", secret, image.PullIfNotPresent); err != nil {
		t.Fatal(err)
	}
	if err := pull("bob", secret, image.PullNever); err != nil {
		t.Errorf("with the password: %v", err)
	}
	wantClass(t, "without it", pull("bob", "http://"+host+"/d.img", image.PullIfNotPresent), errdefs.FailedPrecondition)
	wantClass(t, "without it, never", pull("bob", "http://"+host+"/d.img", image.PullNever), errdefs.NotFound)
	if err := pull("alice", "http://"+host+"/open.img", image.PullIfNotPresent); err != nil {
		t.Fatal(err)
	}
	if err := pull("bob", "http://"+host+"/open.img", image.PullNever); err != nil {
		t.Errorf("a public file: %v", err)
	}

	// Everybody who may use the name may use what a mapping points to.
	r.mapping("translations:\n- {name: alias, url: 'http://u:" + hubPassword + "@" + host + "/m.img'}\n")
	if err := pull("alice", "virtlet.cloud/alias", image.PullIfNotPresent); err != nil {
		t.Fatal(err)
	}
	if err := pull("bob", "virtlet.cloud/alias", image.PullNever); err != nil {
		t.Errorf("by the mapping: %v", err)
	}
	wantClass(t, "past the mapping", pull("bob", "http://"+host+"/m.img", image.PullNever), errdefs.NotFound)
}

func TestVerification(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	h, _ := newOffice(t)
	h.push(t, "team/app:1", "secret")
	ref := h.host + "/team/app:1"
	for v, want := range map[Verification][2]bool{"": {false, true}, VerifyPulled: {false, true}, VerifyAll: {false, false}, VerifyNone: {true, true}} {
		r := newRig(t, Config{Verify: v, Reach: loopback(t)})
		if _, err := r.pullAs(h, hubUser, ref); err != nil {
			t.Fatal(err)
		}
		if _, err := r.store.Import(t.Context(), "hand", strings.NewReader(string(diskOf(7, 1<<20))), nil); err != nil {
			t.Fatal(err)
		}
		for i, name := range []string{ref, "hand"} {
			if _, err := r.wish(h, wish{"bob", "", name, image.PullNever}); (err == nil) != want[i] {
				t.Errorf("%q, %s: %v", v, name, err)
			}
		}
	}
	if _, err := New(Config{Verify: "Sometimes"}, nil); !errdefs.IsInvalid(err) {
		t.Errorf("an unknown one: %v", err)
	}
}
