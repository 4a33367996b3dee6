package distribution_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
)

// server is a registry that counts its requests and can be made to misbehave.
type server struct {
	*httptest.Server
	mu       sync.Mutex
	requests []string                                          // "GET /v2/app/manifests/latest"
	mischief func(w http.ResponseWriter, r *http.Request) bool // true: it has responded
}

func newServer(t testing.TB, secure bool) *server {
	t.Helper()
	s := &server{}
	inner := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests = append(s.requests, r.Method+" "+r.URL.Path)
		bad := s.mischief
		s.mu.Unlock()
		if bad == nil || !bad(w, r) {
			inner.ServeHTTP(w, r)
		}
	})
	if secure {
		s.Server = httptest.NewUnstartedServer(h)
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.StartTLS()
	} else {
		s.Server = httptest.NewServer(h)
	}
	t.Cleanup(s.Close)
	return s
}

func (s *server) host() string { return s.Listener.Addr().String() }

// sabotage makes the server misbehave from now on, and clears the recorded requests.
func (s *server) sabotage(f func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mischief, s.requests = f, nil
}

// asked counts requests whose path contains part.
func (s *server) asked(method, part string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.requests {
		if strings.HasPrefix(r, method+" ") && strings.Contains(r, part) {
			n++
		}
	}
	return n
}

// push stores a layout's blobs and manifests in repo, and tags d as v1.
func (s *server) push(t testing.TB, repo string, l *ociimage.Layout, d ociimage.Descriptor) {
	t.Helper()
	l.PushWith(t, s.Client(), s.URL, repo, "v1", d)
	s.sabotage(nil)
}

func (s *server) pushImage(t testing.TB, repo string, img ociimage.Image) {
	t.Helper()
	var l ociimage.Layout
	s.push(t, repo, &l, img.Blobs(&l))
}

func store(t testing.TB, dir string) *local.Store {
	t.Helper()
	s, err := local.New(local.Config{Dir: dir, Arch: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func client(s *local.Store, regs map[string]distribution.RegistryConfig) *distribution.Client {
	return distribution.New(distribution.Config{Registries: regs, Backoff: time.Millisecond, Stall: 10 * time.Second, Keychain: noKeychain{}}, s)
}

type noKeychain struct{}

func (noKeychain) Resolve(authn.Resource) (authn.Authenticator, error) { return authn.Anonymous, nil }

func layer(entries ...ociimage.Entry) ociimage.Layer {
	return ociimage.Layer{Tar: ociimage.Tar(entries...), Compress: "gzip"}
}

func app(body string) ociimage.Image {
	return ociimage.Image{Layers: []ociimage.Layer{layer(ociimage.Dir("bin"), ociimage.File("bin/base", strings.Repeat("base", 1000))), layer(ociimage.File("app", body))}, Cmd: []string{"/app"}}
}

// layersOf returns the layer folders of the store.
func layersOf(t testing.TB, dir string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "layers", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestPullBySeveralKindsOfReference(t *testing.T) {
	srv := newServer(t, false)
	img := app("one")
	var l ociimage.Layout
	d := img.Blobs(&l)
	srv.push(t, "team/app", &l, d)
	dir := t.TempDir()
	s := store(t, dir)
	for _, ref := range []string{srv.host() + "/team/app:v1", srv.host() + "/team/app@" + d.Digest} {
		var last image.Progress
		got, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, func(p image.Progress) { last = p })
		if err != nil {
			t.Fatal(err)
		}
		if got.ID != img.ID() || got.Digest != d.Digest || got.Name != ref || got.Type != vm.ImageOCI || last.Done != last.Total {
			t.Errorf("%+v, progress %+v", got, last)
		}
	}
	if n := len(layersOf(t, dir)); n != 2 {
		t.Errorf("%d layers stored", n)
	}
	// An image named by its digest that is here cannot have changed.
	srv.Close()
	if _, err := client(s, nil).Pull(t.Context(), srv.host()+"/team/app@"+d.Digest, srv.host()+"/team/app@"+d.Digest, nil, false, nil); err != nil {
		t.Error(err)
	}
}

func TestUnchangedTagCostsNoTransfer(t *testing.T) {
	srv, s := newServer(t, false), store(t, t.TempDir())
	srv.pushImage(t, "app", app("one"))
	ref := srv.host() + "/app:v1"
	pull := func(force bool) image.Image {
		t.Helper()
		img, err := client(s, nil).Pull(t.Context(), ref, ref, nil, force, nil)
		if err != nil {
			t.Fatal(err)
		}
		return img.Image
	}
	first := pull(false)
	srv.sabotage(nil)
	if again := pull(false); again.ID != first.ID || srv.asked("GET", "/manifests/") != 0 || srv.asked("GET", "/blobs/") != 0 || srv.asked("HEAD", "/manifests/") != 1 {
		t.Errorf("an unchanged tag: %v", srv.requests)
	}
	srv.pushImage(t, "app", app("two"))
	if moved := pull(false); moved.ID == first.ID || srv.asked("GET", "/blobs/") != 2 { // configuration and the one new layer
		t.Errorf("a moved tag: %v", srv.requests)
	}
	srv.sabotage(nil)
	if pull(true); srv.asked("GET", "/manifests/") == 0 {
		t.Errorf("forced: %v", srv.requests)
	}
}

func TestLayersAreSharedBetweenImages(t *testing.T) {
	srv, dir := newServer(t, false), t.TempDir()
	s := store(t, dir)
	srv.pushImage(t, "one", app("one"))
	srv.pushImage(t, "two", app("two"))
	var wg sync.WaitGroup
	for _, repo := range []string{"one", "two"} {
		wg.Go(func() {
			ref := srv.host() + "/" + repo + ":v1"
			if _, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := layersOf(t, dir); len(got) != 3 {
		t.Errorf("two images with one layer in common have %d layers", len(got))
	}
	base, _ := app("").Layers[0].Blob()
	if n := srv.asked("GET", ociimage.Digest(base)); n != 1 {
		t.Errorf("the common layer was fetched %d times", n)
	}
}

func TestPlatformsOfAnIndex(t *testing.T) {
	srv := newServer(t, false)
	var l ociimage.Layout
	platform := func(d ociimage.Descriptor, os, arch string) ociimage.Descriptor {
		d.Platform = map[string]string{"os": os, "architecture": arch}
		return d
	}
	arm := app("arm")
	arm.Arch = "arm64"
	amd := app("amd")
	a, b := platform(arm.Blobs(&l), "linux", "arm64"), platform(amd.Blobs(&l), "linux", "amd64")
	attestation := app("statement").Blobs(&l)
	attestation.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
	srv.push(t, "flat", &l, l.Index(a, b, attestation))
	inner := l.Index(a, b)
	srv.push(t, "nested", &l, l.Index(inner))
	srv.push(t, "arm", &l, l.Index(a))
	srv.push(t, "plain-arm", &l, arm.Blobs(&l))
	s := store(t, t.TempDir())
	for _, repo := range []string{"flat", "nested"} {
		ref := srv.host() + "/" + repo + ":v1"
		if img, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil || img.ID != amd.ID() {
			t.Errorf("%s: %+v, %v", repo, img, err)
		}
	}
	for _, repo := range []string{"arm", "plain-arm"} {
		ref := srv.host() + "/" + repo + ":v1"
		if _, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "linux/arm64") {
			t.Errorf("%s: %v", repo, err)
		}
	}
}

func TestBadAnswersAreOneClearSentence(t *testing.T) {
	blob, _ := app("one").Layers[1].Blob()
	layerPath := "/v2/app/blobs/" + ociimage.Digest(blob)
	only := func(part string, f func(http.ResponseWriter, *http.Request)) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, part) {
				return false
			}
			f(w, r)
			return true
		}
	}
	status := func(code int) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	wrong := bytes.Clone(blob)
	wrong[len(wrong)-1] ^= 1
	for name, c := range map[string]struct {
		mischief func(http.ResponseWriter, *http.Request) bool
		class    errdefs.Class
		says     string
	}{
		"unknown image":  {only("/manifests/", status(404)), errdefs.NotFound, "has no"},
		"too many":       {only("/manifests/", status(429)), errdefs.Unavailable, "limits"},
		"broken server":  {only("/manifests/", status(500)), errdefs.Unavailable, "500"},
		"layer refused":  {only(layerPath, status(503)), errdefs.Unavailable, "503"},
		"layer missing":  {only(layerPath, status(404)), errdefs.NotFound, "has no"},
		"denied":         {only("/manifests/", status(403)), errdefs.FailedPrecondition, "credentials"},
		"wrong content":  {only(layerPath, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(wrong) }), errdefs.DataLoss, ""},
		"other content":  {only(layerPath, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, len(blob))) }), errdefs.DataLoss, ""},
		"longer content": {only(layerPath, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(append(wrong, wrong...)) }), errdefs.DataLoss, ""},
		"truncated":      {only(layerPath, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(blob[:len(blob)/2]) }), errdefs.DataLoss, "truncated"},
		"schema 1": {only("/manifests/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws")
			_, _ = w.Write([]byte(`{"schemaVersion":1,"name":"app"}`))
		}), errdefs.Unsupported, "schema 1"},
		"rubbish": {only("/manifests/", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }), errdefs.InvalidArgument, "manifest"},
	} {
		t.Run(name, func(t *testing.T) {
			srv, dir := newServer(t, false), t.TempDir()
			srv.pushImage(t, "app", app("one"))
			srv.sabotage(c.mischief)
			ref := srv.host() + "/app:v1"
			_, err := client(store(t, dir), nil).Pull(t.Context(), ref, ref, nil, false, nil)
			if !errdefs.Is(err, c.class) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
			for _, sub := range []string{"tmp", "links", "data", "origins"} {
				if left, _ := filepath.Glob(filepath.Join(dir, sub, "*")); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			}
			srv.sabotage(nil)
			if _, err := client(store(t, dir), nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil {
				t.Errorf("a second attempt: %v", err)
			}
		})
	}
}

// TestBrokenTransfersGoOn cuts every transfer after some bytes, with a server that supports ranges and one that does not.
func TestBrokenTransfersGoOn(t *testing.T) {
	for _, ranges := range []bool{true, false} {
		t.Run(fmt.Sprint("ranges ", ranges), func(t *testing.T) {
			srv := newServer(t, false)
			img := app(string(bytes.Repeat([]byte("0123456789abcdefghij"), 1<<14)))
			img.Layers[1].Compress = ""
			srv.pushImage(t, "app", img)
			blob, _ := img.Layers[1].Blob()
			var mu sync.Mutex
			cuts, resumed := 0, 0
			srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, ociimage.Digest(blob)) {
					return false
				}
				mu.Lock()
				defer mu.Unlock()
				from := 0
				if h := r.Header.Get("Range"); ranges && h != "" {
					if _, err := fmt.Sscanf(h, "bytes=%d-", &from); err != nil {
						t.Errorf("range %q: %v", h, err)
					}
					w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(blob)-1, len(blob)))
					resumed++
				}
				rest := blob[from:]
				w.Header().Set("Content-Length", strconv.Itoa(len(rest)))
				if from > 0 {
					w.WriteHeader(http.StatusPartialContent)
				}
				if cuts++; cuts < 4 {
					_, _ = w.Write(rest[:min(len(rest), 50_000*cuts)])
					panic(http.ErrAbortHandler)
				}
				_, _ = w.Write(rest)
				return true
			})
			ref := srv.host() + "/app:v1"
			if got, err := client(store(t, t.TempDir()), nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil || got.ID != img.ID() {
				t.Errorf("%+v, %v", got, err)
			}
			if cuts != 4 || ranges != (resumed > 0) {
				t.Errorf("%d transfers, %d of them continued", cuts, resumed)
			}
		})
	}
}

func TestBusyServerIsAskedAgain(t *testing.T) {
	srv := newServer(t, false)
	srv.pushImage(t, "app", app("one"))
	var mu sync.Mutex
	times := map[string]int{}
	srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if times[r.URL.Path]++; times[r.URL.Path] > 2 {
			return false
		}
		w.WriteHeader([]int{429, 500, 502, 503}[len(times)%4])
		return true
	})
	ref := srv.host() + "/app:v1"
	if _, err := client(store(t, t.TempDir()), nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil {
		t.Error(err)
	}
}

func TestCredentials(t *testing.T) {
	srv := newServer(t, false)
	srv.pushImage(t, "team/app", app("one"))
	const secret = "correct horse"
	srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, _ := r.BasicAuth(); user == "me" && password == secret {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	config := t.TempDir()
	auth := base64.StdEncoding.EncodeToString([]byte("me:" + secret))
	if err := os.WriteFile(filepath.Join(config, "config.json"), []byte(`{"auths":{"`+srv.host()+`":{"auth":"`+auth+`"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	good := image.RegistryAuth{Registry: srv.host(), Username: "me", Password: secret}
	bad := image.RegistryAuth{Registry: srv.host(), Username: "me", Password: "wrong staple"}
	elsewhere := good
	elsewhere.Registry = "registry.example.com"
	prefix := good
	prefix.Registry = "https://" + srv.host() + "/team"
	otherPrefix := good
	otherPrefix.Registry = srv.host() + "/tea"
	for name, c := range map[string]struct {
		auth   []image.RegistryAuth
		config string
		ok     bool
	}{
		"none":             {nil, "", false},
		"good":             {[]image.RegistryAuth{good}, "", true},
		"bad":              {[]image.RegistryAuth{bad}, "", false},
		"bad, then good":   {[]image.RegistryAuth{bad, good}, "", true},
		"of another":       {[]image.RegistryAuth{elsewhere}, "", false},
		"of the path":      {[]image.RegistryAuth{prefix}, "", true},
		"of another path":  {[]image.RegistryAuth{otherPrefix}, "", false},
		"of the host":      {nil, config, true},
		"bad, then host's": {[]image.RegistryAuth{bad}, config, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DOCKER_CONFIG", t.TempDir())
			if c.config != "" {
				t.Setenv("DOCKER_CONFIG", c.config)
			}
			cl := distribution.New(distribution.Config{Backoff: time.Millisecond}, store(t, t.TempDir()))
			ref := srv.host() + "/team/app:v1"
			_, err := cl.Pull(t.Context(), ref, ref, c.auth, false, nil)
			if c.ok && err != nil || !c.ok && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("got %v (%v)", err, errdefs.ClassOf(err))
			}
			if err != nil && (strings.Contains(err.Error(), "staple") || strings.Contains(err.Error(), secret)) {
				t.Errorf("the error tells the password: %v", err)
			}
		})
	}
}

func TestTrust(t *testing.T) {
	srv := newServer(t, true)
	srv.pushImage(t, "app", app("one"))
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(t.TempDir(), "junk.pem")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	ref := srv.host() + "/app:v1"
	for name, c := range map[string]struct {
		cfg   distribution.RegistryConfig
		class errdefs.Class
		ok    bool
	}{
		"unknown CA":  {distribution.RegistryConfig{}, errdefs.Unavailable, false}, // the error names the certificate
		"known CA":    {distribution.RegistryConfig{CA: ca}, 0, true},
		"insecure":    {distribution.RegistryConfig{Insecure: true}, 0, true},
		"junk CA":     {distribution.RegistryConfig{CA: junk}, errdefs.FailedPrecondition, false},
		"absent CA":   {distribution.RegistryConfig{CA: junk + "x"}, errdefs.FailedPrecondition, false},
		"bad mirror":  {distribution.RegistryConfig{CA: ca, Mirrors: []string{"!!"}}, 0, true},
		"dead mirror": {distribution.RegistryConfig{CA: ca, Mirrors: []string{"127.0.0.1:1"}}, 0, true},
	} {
		_, err := client(store(t, t.TempDir()), map[string]distribution.RegistryConfig{srv.host(): c.cfg}).Pull(t.Context(), ref, ref, nil, false, nil)
		if c.ok && err != nil || !c.ok && !errdefs.Is(err, c.class) || name == "unknown CA" && !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v (%v)", name, err, errdefs.ClassOf(err))
		}
	}
}

func TestMirrors(t *testing.T) {
	origin, mirror := newServer(t, false), newServer(t, false)
	origin.pushImage(t, "app", app("one"))
	regs := map[string]distribution.RegistryConfig{origin.host(): {Mirrors: []string{mirror.host() + "/cache"}}}
	ref := origin.host() + "/app:v1"
	s := store(t, t.TempDir())
	// The mirror does not have it: the registry itself is used.
	if _, err := client(s, regs).Pull(t.Context(), ref, ref, nil, false, nil); err != nil {
		t.Fatal(err)
	}
	if mirror.asked("GET", "/v2/cache/app/manifests/v1") == 0 {
		t.Errorf("the mirror was not asked: %v", mirror.requests)
	}
	// The mirror has it: the registry is not used.
	mirror.pushImage(t, "cache/app", app("one"))
	origin.sabotage(nil)
	if _, err := client(store(t, t.TempDir()), regs).Pull(t.Context(), ref, ref, nil, false, nil); err != nil || len(origin.requests) > 0 {
		t.Errorf("%v, %v", err, origin.requests)
	}
	// The mirror breaks during the transfer: the registry is used instead.
	blob, _ := app("one").Layers[1].Blob()
	mirror.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, ociimage.Digest(blob)) {
			_, _ = w.Write([]byte("something else"))
			return true
		}
		return false
	})
	if _, err := client(store(t, t.TempDir()), regs).Pull(t.Context(), ref, ref, nil, false, nil); err != nil {
		t.Error(err)
	}
}

func TestDiskInAContainerImage(t *testing.T) {
	disk := make([]byte, 1<<20)
	disk[446+4], disk[446+8] = 0x83, 1
	disk[510], disk[511] = 0x55, 0xaa
	srv := newServer(t, false)
	for name, c := range map[string]struct {
		layers []ociimage.Layer
		want   vm.ImageType
	}{
		"a disk":         {[]ociimage.Layer{layer(ociimage.Dir("disk"), ociimage.File("disk/some.img", string(disk)))}, vm.ImageDisk},
		"no folder":      {[]ociimage.Layer{layer(ociimage.File("disk/disk.img", string(disk)))}, vm.ImageDisk},
		"two files":      {[]ociimage.Layer{layer(ociimage.File("disk/a", string(disk)), ociimage.File("disk/b", "x"))}, vm.ImageOCI},
		"something else": {[]ociimage.Layer{layer(ociimage.File("disk/a", string(disk))), layer(ociimage.File("bin/sh", "x"))}, vm.ImageOCI},
	} {
		repo := strings.ReplaceAll(name, " ", "-")
		srv.pushImage(t, repo, ociimage.Image{Layers: c.layers})
		s, ref := store(t, t.TempDir()), srv.host()+"/"+repo+":v1"
		img, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil)
		if err != nil || img.Type != c.want {
			t.Errorf("%s: %+v, %v", name, img, err)
			continue
		}
		root, err := s.Prepare(t.Context(), img.Image, image.Layout{Dir: t.TempDir()})
		if err != nil || c.want == vm.ImageDisk && len(root.Disks) != 1 {
			t.Errorf("%s: %+v, %v", name, root, err)
		}
	}
}

func TestHostileReferences(t *testing.T) {
	s := store(t, t.TempDir())
	for _, ref := range []string{"", "UPPER/x", "a b", "x:y:z", "http://x/y", "x@sha256:1"} {
		if _, err := client(s, nil).Pull(t.Context(), ref, "key", nil, false, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", ref, err)
		}
	}
}

// TestInvalidKey pulls under a key that the store refuses. The refusal comes before the registry is asked.
func TestInvalidKey(t *testing.T) {
	srv := newServer(t, false)
	srv.sabotage(func(_ http.ResponseWriter, r *http.Request) bool {
		t.Errorf("the registry is asked: %s %s", r.Method, r.URL)
		return false
	})
	if _, err := client(store(t, t.TempDir()), nil).Pull(t.Context(), srv.host()+"/app:v1", "", nil, false, nil); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
}

func TestCanceledPull(t *testing.T) {
	cl := client(store(t, t.TempDir()), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := cl.Pull(ctx, "registry.invalid/app:v1", "key", nil, false, nil); !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

const childDir, childRef = "COCOON_TEST_REGISTRY_DIR", "COCOON_TEST_REGISTRY_REF"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		s, err := local.New(local.Config{Dir: dir, Arch: "amd64"})
		if err == nil {
			_, err = client(s, nil).Pull(context.Background(), os.Getenv(childRef), os.Getenv(childRef), nil, false, nil)
		}
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestKilledPullLeavesAllOrNothing kills a process that pulls, after one layer is stored and during another.
func TestKilledPullLeavesAllOrNothing(t *testing.T) {
	srv, dir := newServer(t, false), t.TempDir()
	img := app(strings.Repeat("large", 1<<18))
	img.Layers[1].Compress = ""
	srv.pushImage(t, "app", img)
	blob, _ := img.Layers[1].Blob()
	hold := make(chan struct{})
	srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ociimage.Digest(blob)) {
			return false
		}
		_, _ = w.Write(blob[:len(blob)/2])
		w.(http.Flusher).Flush()
		select {
		case <-hold:
		case <-r.Context().Done():
		}
		return true
	})
	defer close(hold)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ref := srv.host() + "/app:v1"
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childDir+"="+dir, childRef+"="+ref)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(layersOf(t, dir)) == 0 {
		<-tick.C
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	s := store(t, dir)
	if all, err := s.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "tmp", "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	srv.sabotage(nil)
	if got, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil); err != nil || got.ID != img.ID() {
		t.Errorf("%+v, %v", got, err)
	}
	first, _ := img.Layers[0].Blob()
	if srv.asked("GET", ociimage.Digest(first)) != 0 {
		t.Error("a layer that was complete was fetched again")
	}
}

// TestSecondVMCostsNoImageBytes compares the disk usage before and after a second VM of one image.
func TestSecondVMCostsNoImageBytes(t *testing.T) {
	srv, dir := newServer(t, false), t.TempDir()
	srv.pushImage(t, "app", app(strings.Repeat("body", 1<<16)))
	s, ref := store(t, dir), srv.host()+"/app:v1"
	img, err := client(s, nil).Pull(t.Context(), ref, ref, nil, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	content := func() map[string]int64 {
		sizes := map[string]int64{}
		for _, sub := range []string{"data", "layers", "templates"} {
			if err := filepath.Walk(filepath.Join(dir, sub), func(p string, i os.FileInfo, err error) error {
				if err == nil && i.Mode().IsRegular() && i.Name() != "used" {
					sizes[p] = i.Size()
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		return sizes
	}
	prepare := func() []vm.Disk {
		root, err := s.Prepare(t.Context(), img.Image, image.Layout{Dir: t.TempDir(), Storage: 64 << 20})
		if err != nil {
			t.Fatal(err)
		}
		return root.Disks
	}
	one := prepare()
	before := content()
	two := prepare()
	if after := content(); !maps.Equal(before, after) {
		t.Errorf("a second VM changed the store: %v, %v", before, after)
	}
	if !slices.EqualFunc(one[:2], two[:2], func(a, b vm.Disk) bool { return a.Path == b.Path && a.ReadOnly }) {
		t.Errorf("%+v, %+v", one, two)
	}
}
