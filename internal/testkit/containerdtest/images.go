package containerdtest

import (
	"archive/tar"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// The images that tests of ours need by name.
const (
	BusyBox = "registry.k8s.io/e2e-test-images/busybox:1.29-2" // has a shell and the usual tools
	sandbox = "registry.k8s.io/pause:3.10"                     // of containerd's own sandboxes
)

// Registry is a registry of ours on loopback, in this process, that has the images of Images. It stands in for every registry: only the
// rest of an image's name counts.
type Registry struct {
	URL string // http://127.0.0.1:PORT

	t testing.TB
}

// secret is the token that may push.
const secret = "push"

// Serve starts a registry that ends with the test.
func Serve(t testing.TB) *Registry {
	t.Helper()
	store, err := folder.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	c, err := content.New(t.Context(), store, content.Config{Log: log, UploadTTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	var tokens access.Tokens
	tokens.Add("test", secret)
	server := httptest.NewServer(registry.New(registry.Config{AnonymousPull: true}, c, &tokens, prometheus.NewRegistry(), log))
	t.Cleanup(server.Close)
	r := &Registry{URL: server.URL, t: t}
	images := Images(t)
	for _, name := range slices.Sorted(maps.Keys(images)) {
		r.Push(name, images[name])
	}
	return r
}

// pusher adds the token to each request.
type pusher struct{}

func (pusher) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+secret)
	return http.DefaultTransport.RoundTrip(r)
}

// Push puts an image into the registry: HOST/REPOSITORY:TAG, where the host does not count.
func (r *Registry) Push(name string, image ociimage.Image) {
	r.t.Helper()
	_, name, _ = strings.Cut(name, "/")
	repo, tag, _ := strings.Cut(name, ":")
	var l ociimage.Layout
	d := image.Blobs(&l)
	l.PushWith(r.t, &http.Client{Transport: pusher{}}, r.URL, repo, tag, d)
}

// Images returns stand-ins of the images that critest pulls, and those of this package, by their names. Those that critest tells apart
// differ, also from the sandbox's. One has another digest than critest asks for, which nobody but its maker can change.
func Images(t testing.TB) map[string]ociimage.Image {
	t.Helper()
	standin := read(t, need.Built(t, "bin/containerd/standin", "make containerd"))
	small := ociimage.Of(userland(t, standin)...)
	with := func(entries ...ociimage.Entry) []ociimage.Layer {
		return []ociimage.Layer{small, ociimage.Of(entries...)}
	}
	own := func(name string, mode int64) ociimage.Entry {
		return ociimage.Entry{Name: "usr/bin/" + name, Body: standin, Mode: mode}
	}
	shell := []string{"sh"}

	const e2e, staging = "registry.k8s.io/e2e-test-images/", "gcr.io/k8s-staging-cri-tools/"
	all := map[string]ociimage.Image{
		BusyBox:                     {Layers: []ociimage.Layer{small}, Cmd: shell},
		e2e + "nginx:1.14-2":        {Layers: with(own("nginx", 0o755)), Cmd: []string{"nginx"}},
		e2e + "httpd:2.4.39-4":      {Layers: with(own("httpd", 0o755)), Cmd: []string{"httpd"}},
		e2e + "nonewprivs:1.3":      {Layers: with(own("nnp", 0o6755)), Cmd: []string{"nnp"}},
		sandbox:                     {Layers: []ociimage.Layer{pause(standin, "3.10")}, Entrypoint: []string{"/pause"}, User: "65535:65535"},
		"registry.k8s.io/pause:3.9": {Layers: []ociimage.Layer{pause(standin, "3.9")}, Entrypoint: []string{"/pause"}, User: "65535:65535"},

		staging + "hostnet-nginx-amd64:latest":         {Layers: with(own("nginx", 0o755)), Cmd: []string{"nginx", "12003"}},
		staging + "test-image-predefined-group:latest": {Layers: []ociimage.Layer{small}, Cmd: shell, User: "1000"},
	}
	for name, user := range map[string]string{"uid": "1002", "username": "www-data", "uid-group": "1003:1004", "username-group": "www-data:1004"} {
		all[staging+"test-image-user-"+name+":latest"] = ociimage.Image{Layers: []ociimage.Layer{small}, Cmd: shell, User: user}
	}
	for _, name := range []string{"1:latest", "2:latest", "3:latest", "latest:latest", "digest:latest", "tag:test", "tag:all", "tags:1", "tags:2", "tags:3"} {
		content := name
		if strings.HasPrefix(name, "tags:") {
			content = "tags" // three names of one image
		}
		all[staging+"test-image-"+name] = ociimage.Image{Layers: with(ociimage.File("test-image", content+"\n")), Cmd: shell}
	}
	for name, image := range all {
		image.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
		all[name] = image
	}
	return all
}

// pause is the one layer of a sandbox's image.
func pause(standin, version string) ociimage.Layer {
	return ociimage.Of(ociimage.Entry{Name: "pause", Body: standin, Mode: 0o755}, ociimage.File("version", version+"\n"))
}

// userland is a small system: this machine's busybox with its libraries, as a static one of Debian's has a shell that runs applets even
// where there is no file of their name. The applets are hard links, as in the image that it stands for: critest hides one of them.
func userland(t testing.TB, standin string) []ociimage.Entry {
	t.Helper()
	busybox := need.Tool(t, "busybox")
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatal("ask busybox for its applets:", err)
	}
	entries := []ociimage.Entry{
		{Name: "tmp/", Type: tar.TypeDir, Mode: 0o1777},
		{Name: "root/", Type: tar.TypeDir, Mode: 0o700},
		ociimage.File("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\ndefault-user:x:1000:1000::/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"),
		ociimage.File("etc/group", "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\nnogroup:x:65534:\n"),
		{Name: "bin/busybox", Body: read(t, busybox), Mode: 0o755},
		{Name: "bin/pgrep", Body: standin, Mode: 0o755},
		program("bin/ipcs", "bin/pgrep"),
	}
	for _, library := range libraries(t, busybox) {
		entries = append(entries, ociimage.Entry{Name: strings.TrimPrefix(library, "/"), Body: read(t, library), Mode: 0o755})
	}
	for _, dir := range []string{"dev", "home", "proc", "run", "sys", "usr", "usr/bin", "var", "var/run"} {
		entries = append(entries, ociimage.Dir(dir))
	}
	for _, name := range strings.Fields(string(list)) {
		if !slices.Contains([]string{"busybox", "linuxrc", "httpd", "pgrep", "ipcs"}, name) {
			entries = append(entries, program("bin/"+name, "bin/busybox"))
		}
	}
	return entries
}

// libraries returns the paths of the loader and the libraries of a program; none if it is static.
func libraries(t testing.TB, program string) []string {
	t.Helper()
	out, err := exec.Command(need.Tool(t, "ldd"), program).CombinedOutput()
	if err != nil {
		return nil // it is static
	}
	var all []string
	for line := range strings.Lines(string(out)) {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "/") {
				all = append(all, word)
			}
		}
	}
	return all
}

// program is another name of a program. A reader of layers sets the mode of each name.
func program(name, target string) ociimage.Entry {
	e := ociimage.HardLink(name, target)
	e.Mode = 0o755
	return e
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
