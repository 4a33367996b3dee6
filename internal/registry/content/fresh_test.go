package content

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/reference"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func (w *world) file(key string) string { return filepath.Join(w.dir, filepath.FromSlash(key)) }

func (w *world) isFile(key string) bool {
	_, err := os.Stat(w.file(key))
	return err == nil
}

func TestBlobsAreFreshUntilAManifestNamesThem(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{})
	named, other := w.blob("a", "named"), w.blob("a", strings.Repeat("other", 10_000))
	if !w.isFile(freshKey(named.Digest)) || w.isFile(blobKey(named.Digest)) {
		t.Error("it is not fresh")
	}
	w.put("a", "v1", "", named)
	if w.isFile(freshKey(named.Digest)) || !w.isFile(blobKey(named.Digest)) || !w.isFile(freshKey(other.Digest)) {
		t.Error("a manifest settles what it names, and nothing else")
	}
	before := w.Usage()
	w.blob("a", "named") // a blob that is pushed again exists twice
	if d := diff.Of(before, w.Usage()); d != "" {
		t.Errorf("usage %s", d)
	}
	w = open(t, dir, Config{}) // killed
	if d := diff.Of(before, w.Usage()); d != "" {
		t.Errorf("usage %s", d)
	}
	if !w.has("a", named.Digest) || !w.has("a", other.Digest) {
		t.Error("lost with the process")
	}
	w.put("a", "v2", "", named, other)
	if !w.isFile(blobKey(other.Digest)) || w.isFile(freshKey(named.Digest)) || w.Usage() != before {
		t.Errorf("not settled, or counted twice: %s", diff.Of(before, w.Usage()))
	}
}

// A power cut may leave a file with its size but without its bytes, or a shorter file.
func TestPowerCutDamagesOnlyWhatNoManifestNames(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{})
	kept := w.blob("a", "kept")
	w.put("a", "v1", "", kept)
	before := w.Usage()
	zeroed, short, good, twice := w.blob("a", "zeroed"), w.blob("a", "short"), w.blob("a", "good"), w.blob("a", "kept")
	for d, text := range map[digest.Digest]string{zeroed.Digest: "\x00\x00\x00\x00\x00\x00", short.Digest: "", twice.Digest: "????"} {
		if err := os.WriteFile(w.file(freshKey(d)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w = open(t, dir, Config{})
	for _, d := range []v1.Descriptor{zeroed, short} {
		if _, err := w.Blob(t.Context(), "a", d.Digest); !errdefs.IsNotFound(err) || CodeOf(err) != BlobUnknown {
			t.Errorf("%s: %v", d.Digest, err)
		}
		_, _, err := w.PutManifest(t.Context(), "a", reference.Reference{Tag: "bad"}, v1.MediaTypeImageManifest, manifest("", kept, d))
		if CodeOf(err) != ManifestBlobUnknown {
			t.Errorf("%v", err)
		}
	}
	f, _, err := w.OpenBlob(t.Context(), "a", twice.Digest)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if !w.isFile(blobKey(twice.Digest)) || w.isFile(freshKey(twice.Digest)) {
		t.Error("the good one is gone, or the damaged one is not")
	}
	if now := w.Usage(); now.Bytes != before.Bytes+good.Size || now.Blobs != before.Blobs+1 {
		t.Errorf("usage %+v after %+v", now, before)
	}
	w.put("a", "v2", "", w.blob("a", "zeroed"), w.blob("a", "short"), good, kept)
	if s, err := w.Scrub(t.Context()); err != nil || s.Damaged != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestFreshBlobsAreCollected(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{})
	before := w.Usage()
	d := w.blob("a", "orphan")
	w = open(t, dir, Config{})
	if done, err := w.Collect(t.Context(), true); err != nil || done.Blobs != 1 || done.Bytes != d.Size || w.Usage() != before || w.isFile(freshKey(d.Digest)) {
		t.Errorf("%+v, %v, usage %s", done, err, diff.Of(before, w.Usage()))
	}
}

func TestSmallBlobsThatAreNotWhatWasAnnounced(t *testing.T) {
	w := open(t, t.TempDir(), Config{Quota: 10})
	d := digest.FromString("12345678")
	for _, c := range []struct {
		body   string
		length int64
		code   Code
	}{{"1234567", 8, SizeInvalid}, {"123456789", 8, SizeInvalid}, {"1234567x", 8, DigestInvalid}, {"", 8, SizeInvalid}} {
		if err := w.PutBlob(t.Context(), "a", d, strings.NewReader(c.body), c.length); CodeOf(err) != c.code {
			t.Errorf("%q: %v", c.body, err)
		}
	}
	w.blob("a", "12345678")
	if err := w.PutBlob(t.Context(), "a", digest.FromString("more"), strings.NewReader("more"), 4); CodeOf(err) != Denied {
		t.Errorf("beyond the quota: %v", err)
	}
	if left, err := os.ReadDir(w.store.Staging()); err != nil || len(left) != 0 || w.Usage().Staged != 0 {
		t.Errorf("left: %v, %v, %+v", left, err, w.Usage())
	}
}
