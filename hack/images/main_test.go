package main

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// An archive that is read back has one program, run by an unprivileged user. The same bytes produce the same image.
func TestPack(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "built")
	if err := os.WriteFile(binary, []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	var digests []string
	for _, out := range []string{"a.tar", "b.tar"} {
		path := filepath.Join(dir, "images", out)
		if err := pack("cocoon-manager", binary, "registry.example/x/cocoon-manager:v1", path); err != nil {
			t.Fatal(err)
		}
		img, err := tarball.ImageFromPath(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		c, err := img.ConfigFile()
		if err != nil || c.Config.User != "65532:65532" || len(c.Config.Entrypoint) != 1 || c.Config.Entrypoint[0] != "/cocoon-manager" {
			t.Errorf("configuration %+v, %v", c, err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
		r := tar.NewReader(mutate.Extract(img))
		h, err := r.Next()
		if err != nil || h.Name != "cocoon-manager" || h.Mode != 0o755 {
			t.Fatalf("first file %+v, %v", h, err)
		}
		if text, err := io.ReadAll(r); string(text) != "program" || err != nil {
			t.Errorf("the program is %q, %v", text, err)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("digests %v of the same binary", digests)
	}
	if err := pack("x", binary, "not a name", filepath.Join(dir, "x.tar")); err == nil {
		t.Error("a name that is none is taken")
	}
}
