package cli_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestImageGC(t *testing.T) {
	n := &node{}
	cocoon := serve(t, n)
	code, out, errOut := cocoon("", "image", "gc", "--max-age", "720h", "--max-size", "20G", "--min-age", "2m", "--high", "85", "--low", "70", "--dry-run")
	want := image.GCLimits{MaxAge: 720 * time.Hour, MaxSize: 20 << 30, MinAge: 2 * time.Minute, High: 85, Low: 70, DryRun: true}
	if code != 0 || !strings.Contains(out, "old:1") || !strings.HasSuffix(out, "would free 1M\n") || n.store.limits != want {
		t.Errorf("%d %q %q, limits %s", code, out, errOut, diff.Of(want, n.store.limits))
	}
	code, out, errOut = cocoon("", "image", "gc", "-o", "json")
	var got image.Collected
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || got.Freed != 1<<20 || len(got.Images) != 1 || n.store.limits != (image.GCLimits{}) {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}

func TestImageExport(t *testing.T) {
	cocoon := serve(t, &node{})
	if code, out, errOut := cocoon("", "image", "export", "web"); code != 0 || out != "the disk" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	if code, out, errOut := cocoon("", "image", "export", "web", path); code != 0 || out != "" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "the disk" {
		t.Errorf("%q %v", data, err)
	}
	if code, _, errOut := cocoon("", "image", "export", "nobody", path); code == 0 || strings.Count(errOut, "\n") != 1 {
		t.Errorf("unknown: %d %q", code, errOut)
	}
	if code, _, _ := cocoon("", "image", "export", "web", dir); code != 2 {
		t.Errorf("into a folder: %d", code)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	if data, _ := os.ReadFile(path); string(data) != "the disk" {
		t.Error("a failed export replaced the file")
	}
}

// tree creates a root file system with difficult cases.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(dir, "bin", strings.Repeat("long", 40)), 0o755))
	must(os.WriteFile(filepath.Join(dir, "bin", "app"), []byte("program"), 0o600))
	must(os.Chmod(filepath.Join(dir, "bin", "app"), 0o755|fs.ModeSetuid))
	must(os.Link(filepath.Join(dir, "bin", "app"), filepath.Join(dir, "bin", "same")))
	must(os.Symlink("../bin/app", filepath.Join(dir, "bin", "link")))
	must(os.WriteFile(filepath.Join(dir, "odd"), bytes.Repeat([]byte("x"), 1000), 0o644))
	return dir
}

func TestImageBuild(t *testing.T) {
	n := &node{}
	cocoon := serve(t, n)
	dir := tree(t)
	var plain bytes.Buffer
	tw := tar.NewWriter(&plain)
	if err := tw.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	_, _ = gz.Write(plain.Bytes())
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rootfs.tar.gz")
	if err := os.WriteFile(file, packed.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ source, stdin string }{
		"folder": {source: dir}, "file": {source: file}, "stdin": {source: "-", stdin: plain.String()},
	} {
		args := []string{"image", "build", "-o", "json", "app", c.source, "--entrypoint", `["/bin/app", "-v"]`, "--cmd", "serve", "--env", "A=b=c", "--workdir", "/srv", "--user", "1000", "--arch", "amd64"}
		code, _, errOut := cocoon(c.stdin, args...)
		if code != 0 {
			t.Fatalf("%s: %d %s", name, code, errOut)
		}
		first := n.store.imported
		if code, _, _ := cocoon(c.stdin, args...); code != 0 || !bytes.Equal(first, n.store.imported) {
			t.Errorf("%s: building twice gave two images", name)
		}
		s, err := local.New(local.Config{Dir: t.TempDir(), Arch: "amd64"})
		if err != nil {
			t.Fatal(err)
		}
		img, err := s.Import(t.Context(), "app", bytes.NewReader(first), nil)
		if err != nil {
			t.Fatalf("%s: the store does not take it: %v", name, err)
		}
		want := vm.Process{Entrypoint: []string{"/bin/app", "-v"}, Args: []string{"serve"}, Env: []vm.EnvVar{{Name: "A", Value: "b=c"}}, WorkDir: "/srv", User: "1000"}
		if d := diff.Of(want, img.Config); img.Type != vm.ImageOCI || d != "" {
			t.Errorf("%s: type %s, configuration %s", name, img.Type, d)
		}
		if name == "folder" {
			sameTree(t, first)
		}
	}
}

// sameTree checks the layer made from tree: the last entry of the layout.
func sameTree(t *testing.T, layout []byte) {
	t.Helper()
	var layer []byte
	for r := tar.NewReader(bytes.NewReader(layout)); ; {
		if _, err := r.Next(); err != nil {
			break
		}
		layer, _ = io.ReadAll(r)
	}
	got := map[string]*tar.Header{}
	var order []string
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		got[h.Name], order = h, append(order, h.Name)
	}
	if !slices.IsSorted(order) || len(order) != 6 {
		t.Errorf("entries are %q", order)
	}
	app, same, link := got["bin/app"], got["bin/same"], got["bin/link"]
	if app == nil || app.Uid != 0 || app.Gid != 0 || app.Uname != "" || app.Mode != 0o4755 || app.Size != 7 {
		t.Errorf("app is %+v", app)
	}
	if same == nil || same.Typeflag != tar.TypeLink || same.Linkname != "bin/app" || link == nil || link.Linkname != "../bin/app" {
		t.Errorf("links are %+v, %+v", same, link)
	}
}

func TestImageBuildRefuses(t *testing.T) {
	n := &node{}
	cocoon := serve(t, n)
	dir := tree(t)
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no tar"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := filepath.Join(t.TempDir(), "gz")
	if err := os.WriteFile(broken, []byte("\x1f\x8b no gzip"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{dir, "--env", "A"},
		{dir, "--env", "=x"},
		{dir, "--workdir", "srv"},
		{dir, "--arch", "vax"},
		{dir, "--entrypoint", "[1]"},
		{dir, "--cmd", "["},
		{text},
		{broken},
		{filepath.Join(dir, "nothing")},
		{},
	} {
		code, out, errOut := cocoon("", append([]string{"image", "build", "app"}, args...)...)
		if code == 0 || out != "" || strings.Count(errOut, "\n") != 1 || n.store.imported != nil {
			t.Errorf("%v: %d %q %q", args, code, out, errOut)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "cocoon-build-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
