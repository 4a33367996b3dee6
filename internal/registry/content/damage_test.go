package content

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

// reader reads a blob and verifies its digest, as downloads do.
func (w *world) reader(repo string, d digest.Digest) io.ReadCloser {
	w.t.Helper()
	f, info, err := w.OpenBlob(w.t.Context(), repo, d)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.Verifying(w.t.Context(), f, d, info)
}

func (w *world) flip(key string) {
	w.t.Helper()
	path := filepath.Join(w.dir, key)
	data, err := os.ReadFile(path)
	if err != nil {
		w.t.Fatal(err)
	}
	data[0] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// Many clients read a damaged blob at once: it is counted once, and a concurrent push stays.
func TestDamageIsCountedOnce(t *testing.T) {
	w := open(t, t.TempDir(), Config{})
	layer := w.blob("a", "precious")
	w.put("a", "v1", "", layer)
	before := w.Usage()
	w.flip(blobKey(layer.Digest))
	readers := []io.ReadCloser{w.reader("a", layer.Digest), w.reader("a", layer.Digest), w.reader("a", layer.Digest)}
	for n, r := range readers {
		if n == 2 {
			w.blob("a", "precious")
		}
		if _, err := io.ReadAll(r); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("reader %d: %v", n, err)
		}
		r.Close()
	}
	if !w.has("a", layer.Digest) {
		t.Error("the blob that was pushed again is gone")
	}
	if u := w.Usage(); u.Corrupt != 1 || u.Bytes != before.Bytes || u.Blobs != before.Blobs {
		t.Errorf("%+v, before the damage %+v", u, before)
	}
}

// While a tag refers to a damaged manifest, nobody knows what the manifest named. This also holds in later collections.
func TestBlobsOfADamagedManifestStay(t *testing.T) {
	w := open(t, t.TempDir(), Config{})
	layer := w.blob("a", "precious")
	w.flip(manifestKey("a", w.put("a", "v1", "", layer)))
	for range 3 {
		w.pass(time.Hour)
		w.collect()
	}
	if !w.has("a", layer.Digest) {
		t.Error("the blobs of a damaged manifest were collected")
	}
	if err := w.RemoveManifest(t.Context(), "a", reference.Reference{Tag: "v1"}); err != nil {
		t.Fatal(err)
	}
	w.pass(time.Hour)
	if w.collect(); w.has("a", layer.Digest) {
		t.Error("without the tag they stay")
	}
}

// The next process removes what a killed process was writing; it does not touch other files.
func TestLeftoversOfAKilledProcess(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{})
	d := w.put("a/b", "v1", "")
	left := []string{
		filepath.Join(dir, repoKey("a/b"), "_tags", ".v1.tmp-123"),
		filepath.Join(dir, filepath.Dir(manifestKey("a/b", d)), "."+d.Encoded()+".tmp-9"),
	}
	others := []string{filepath.Join(dir, ".v1.tmp-1"), filepath.Join(dir, repoKey("a/b"), ".keep")}
	for _, path := range append(left, others...) {
		if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w = open(t, dir, Config{})
	for _, path := range left {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	for _, path := range others {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if _, _, _, err := w.Manifest(t.Context(), "a/b", reference.Reference{Tag: "v1"}); err != nil {
		t.Error(err)
	}
}
