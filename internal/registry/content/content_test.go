package content

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/registry/reference"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

type world struct {
	*Content
	t     *testing.T
	dir   string
	store objects.Store

	mu  sync.Mutex
	now time.Time
}

func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *world) pass(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now = w.now.Add(d)
}

func open(t *testing.T, dir string, cfg Config) *world {
	t.Helper()
	store, err := folder.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, store: store, now: time.Now()}
	cfg.Log = slog.New(slog.DiscardHandler)
	cfg.Now = w.clock
	if cfg.UploadTTL == 0 {
		cfg.UploadTTL = time.Hour
	}
	if w.Content, err = New(t.Context(), store, cfg); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) blob(repo, text string) v1.Descriptor {
	w.t.Helper()
	d := digest.FromString(text)
	if err := w.PutBlob(w.t.Context(), repo, d, strings.NewReader(text), int64(len(text))); err != nil {
		w.t.Fatal(err)
	}
	return v1.Descriptor{MediaType: "x/y", Digest: d, Size: int64(len(text))}
}

func manifest(kind string, config v1.Descriptor, layers ...v1.Descriptor) []byte {
	m := v1.Manifest{MediaType: v1.MediaTypeImageManifest, ArtifactType: kind, Config: config, Layers: append([]v1.Descriptor{}, layers...)}
	m.SchemaVersion = 2
	data, _ := json.Marshal(m) // of strings and numbers
	return data
}

func (w *world) put(repo, tag, kind string, layers ...v1.Descriptor) digest.Digest {
	w.t.Helper()
	d, _, err := w.PutManifest(w.t.Context(), repo, reference.Reference{Tag: tag}, v1.MediaTypeImageManifest, manifest(kind, w.blob(repo, "{}"), layers...))
	if err != nil {
		w.t.Fatal(err)
	}
	return d
}

func (w *world) has(repo string, d digest.Digest) bool {
	w.t.Helper()
	_, err := w.store.Stat(w.t.Context(), linkKey(repo, d))
	_, err2 := w.statBlob(w.t.Context(), d)
	return err == nil && err2 == nil
}

func (w *world) collect() Collected {
	w.t.Helper()
	done, err := w.Collect(w.t.Context(), false)
	if err != nil {
		w.t.Fatal(err)
	}
	return done
}

func TestCollectRemovesOnlyWhatNobodyNamesOrUses(t *testing.T) {
	w := open(t, t.TempDir(), Config{Grace: time.Hour})
	named, orphan, asked := w.blob("a", "named"), w.blob("a", "orphan"), w.blob("a", "asked for")
	shared := w.blob("a", "shared")
	if err := w.Mount(t.Context(), "a", "b", shared.Digest); err != nil {
		t.Fatal(err)
	}
	w.put("a", "v1", "", named)
	w.put("b", "v1", "", shared)
	if d := diff.Of(Collected{}, w.collect()); d != "" {
		t.Errorf("just pushed: %s", d)
	}
	w.pass(2 * time.Hour)
	if _, err := w.Blob(t.Context(), "a", asked.Digest); err != nil {
		t.Fatal(err)
	}
	before := w.Usage()
	done := w.collect()
	if done.Blobs != 1 || done.Links != 2 || done.Bytes != orphan.Size {
		t.Errorf("%+v", done)
	}
	if now := w.Usage(); now.Blobs != before.Blobs-1 || now.Bytes != before.Bytes-orphan.Size {
		t.Errorf("usage %+v after %+v", now, before)
	}
	for _, c := range []struct {
		repo string
		desc v1.Descriptor
		has  bool
	}{{"a", named, true}, {"a", orphan, false}, {"a", asked, true}, {"a", shared, false}, {"b", shared, true}} {
		if w.has(c.repo, c.desc.Digest) != c.has {
			t.Errorf("%s in %s: %v", c.desc.Digest, c.repo, !c.has)
		}
	}
	w.pass(2 * time.Hour)
	if err := w.RemoveManifest(t.Context(), "a", reference.Reference{Digest: digest.FromBytes(manifest("", w.blob("a", "{}"), named))}); err != nil {
		t.Fatal(err)
	}
	w.pass(2 * time.Hour)
	if w.collect(); w.has("a", named.Digest) || w.has("a", asked.Digest) {
		t.Error("a deleted manifest's blobs stay")
	}
}

func TestAfterARestartTheFirstGraceCollectsNothing(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{Grace: time.Hour})
	orphan := w.blob("a", "orphan")
	w = open(t, dir, Config{Grace: time.Hour})
	w.mu.Lock()
	w.now = w.now.Add(2 * time.Hour)
	w.mu.Unlock()
	w.started = w.clock()
	if w.collect(); !w.has("a", orphan.Digest) {
		t.Error("collected although nobody knows who asked for it")
	}
	if done, err := w.Collect(t.Context(), true); err != nil || done.Blobs != 1 {
		t.Errorf("offline: %+v, %v", done, err)
	}
}

func TestUntaggedSnapshotsAreCollectedAndImagesAreNot(t *testing.T) {
	w := open(t, t.TempDir(), Config{Untagged: 24 * time.Hour})
	old := w.put("vm", "hibernate", artifact.TypeSnapshotChunks, w.blob("vm", "monday"))
	image := w.put("vm", "latest", "", w.blob("vm", "image"))
	now := w.put("vm", "hibernate", artifact.TypeSnapshotChunks, w.blob("vm", "tuesday"))
	w.put("vm", "latest", "", w.blob("vm", "image 2"))
	if done := w.collect(); done.Manifests != 0 {
		t.Errorf("too early: %+v", done)
	}
	w.pass(25 * time.Hour)
	if done := w.collect(); done.Manifests != 1 || done.Blobs != 1 {
		t.Errorf("%+v", done)
	}
	for d, want := range map[digest.Digest]bool{old: false, image: true, now: true} {
		if _, _, _, err := w.Manifest(t.Context(), "vm", reference.Reference{Digest: d}); (err == nil) != want {
			t.Errorf("%s: %v", d, err)
		}
	}
}

// Pushes and collections without a grace period: whatever a push was promised, its manifest is complete once it exists.
func TestPushesBesideCollections(t *testing.T) {
	store, err := folder.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(t.Context(), store, Config{UploadTTL: time.Hour, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var collecting, pushing sync.WaitGroup
	collecting.Go(func() {
		for ctx.Err() == nil {
			if _, err := c.Collect(ctx, false); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	const pushers, rounds = 4, 40
	for p := range pushers {
		pushing.Go(func() {
			for i := range rounds {
				repo := fmt.Sprintf("r%d", i%3)
				if err := pushOnce(t.Context(), c, repo, fmt.Sprintf("t%d", p), fmt.Sprintf("layer %d", i%5)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	pushing.Wait()
	stop()
	collecting.Wait()
	whole(t, c)
}

// pushOnce is a client that gets MANIFEST_BLOB_UNKNOWN if it is too slow without a grace period, and then pushes again.
func pushOnce(ctx context.Context, c *Content, repo, tag, layer string) error {
	for {
		var descs []v1.Descriptor
		for _, text := range []string{"{}", layer} {
			d := digest.FromString(text)
			if _, err := c.Blob(ctx, repo, d); errdefs.IsNotFound(err) {
				if err := c.PutBlob(ctx, repo, d, strings.NewReader(text), int64(len(text))); err != nil {
					return err
				}
			} else if err != nil {
				return err
			}
			descs = append(descs, v1.Descriptor{MediaType: "x/y", Digest: d, Size: int64(len(text))})
		}
		_, _, err := c.PutManifest(ctx, repo, reference.Reference{Tag: tag}, "", manifest("", descs[0], descs[1]))
		if CodeOf(err) != ManifestBlobUnknown {
			return err
		}
	}
}

// whole checks that every manifest has its blobs, with the right bytes.
func whole(t *testing.T, c *Content) {
	t.Helper()
	repos, err := c.Repositories(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, repo := range repos {
		err := c.eachManifest(t.Context(), repo, func(d digest.Digest, _ objects.Info) error {
			_, _, doc, err := c.Manifest(t.Context(), repo, reference.Reference{Digest: d})
			if err != nil {
				return err
			}
			for _, b := range doc.blobs() {
				f, info, err := c.OpenBlob(t.Context(), repo, b.Digest)
				if err != nil {
					t.Errorf("%s of %s: %v", b.Digest, d, err)
					continue
				}
				_, err = io.Copy(io.Discard, c.Verifying(t.Context(), f, b.Digest, info))
				f.Close()
				if err != nil {
					t.Error(err)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var n, bytes int64
	if err := c.eachBlob(t.Context(), func(_ digest.Digest, info objects.Info) error {
		n++
		bytes += info.Size
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if u := c.Usage(); u.Blobs != n || u.Bytes != bytes || u.Staged != 0 || u.Uploads != 0 {
		t.Errorf("usage says %+v; there are %d blobs of %d bytes", u, n, bytes)
	}
}

func TestQuota(t *testing.T) {
	w := open(t, t.TempDir(), Config{Quota: 100})
	w.blob("a", strings.Repeat("x", 60))
	text := strings.Repeat("y", 50)
	err := w.PutBlob(t.Context(), "a", digest.FromString(text), strings.NewReader(text), 50)
	if !errdefs.Is(err, errdefs.ResourceExhausted) || CodeOf(err) != Denied {
		t.Errorf("%v", err)
	}
	u, err := w.Begin("a", "ci")
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Append(t.Context(), strings.NewReader(text[:40]), -1, -1); err != nil {
		t.Fatal(err)
	}
	if err := u.Append(t.Context(), strings.NewReader("z"), -1, -1); CodeOf(err) != Denied {
		t.Errorf("uploads do not count: %v", err)
	}
	if err := u.Cancel(); err != nil {
		t.Fatal(err)
	}
	w.blob("a", strings.Repeat("z", 40))
	if u := w.Usage(); u.Bytes != 100 || u.Staged != 0 {
		t.Errorf("%+v", u)
	}
}

// broken returns some bytes and then fails.
type broken struct{ io.Reader }

var errBroken = errors.New("connection lost")

func (b broken) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = errBroken
	}
	return n, err
}

func TestUploadsGoOnAfterBreaksAndRestarts(t *testing.T) {
	dir := t.TempDir()
	w := open(t, dir, Config{})
	data := bytes.Repeat([]byte("0123456789"), 100_000)
	d := digest.FromBytes(data)
	u, err := w.Begin("a/b", "ci")
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Append(t.Context(), broken{bytes.NewReader(data[:333_333])}, 0, int64(len(data))); !errors.Is(err, errBroken) || u.Size() != 333_333 {
		t.Fatalf("%d bytes, %v", u.Size(), err)
	}
	if err := u.Append(t.Context(), bytes.NewReader(data), 0, -1); !errors.Is(err, ErrRange) {
		t.Errorf("from the beginning again: %v", err)
	}
	lost, err := w.begin("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := lost.Append(t.Context(), strings.NewReader("cannot be resumed"), 0, -1); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dead", "dead2.repo"} {
		if err := os.WriteFile(filepath.Join(dir, "uploads", name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	w = open(t, dir, Config{})
	if usage := w.Usage(); usage.Uploads != 1 || usage.Staged != 333_333 {
		t.Errorf("after a restart: %+v", usage)
	}
	if _, err := w.Upload("a", u.ID); CodeOf(err) != BlobUploadUnknown {
		t.Errorf("an upload of another repository: %v", err)
	}
	u, err = w.Upload("a/b", u.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Append(t.Context(), bytes.NewReader(data[333_333:]), 333_333, int64(len(data)-333_333)); err != nil {
		t.Fatal(err)
	}
	if err := u.Finish(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if !w.has("a/b", d) {
		t.Error("no blob")
	}
	left, err := os.ReadDir(filepath.Join(dir, "uploads"))
	if err != nil || len(left) != 0 {
		t.Errorf("left in uploads: %v, %v", left, err)
	}
	u, err = w.Begin("a", "ci")
	if err != nil {
		t.Fatal(err)
	}
	w.pass(2 * time.Hour)
	if n := w.SweepUploads(); n != 1 {
		t.Errorf("%d swept", n)
	}
	if err := u.Append(t.Context(), strings.NewReader("x"), -1, -1); CodeOf(err) != BlobUploadUnknown {
		t.Errorf("a swept upload: %v", err)
	}
}

func TestOneWriterAtATime(t *testing.T) {
	w := open(t, t.TempDir(), Config{})
	u, err := w.Begin("a", "ci")
	if err != nil {
		t.Fatal(err)
	}
	r, feed := io.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := u.Append(t.Context(), r, 0, -1); err != nil {
			t.Error(err)
		}
	})
	if _, err := feed.Write([]byte("slow")); err != nil {
		t.Fatal(err)
	}
	if err := u.Append(t.Context(), strings.NewReader("x"), -1, -1); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a second writer: %v", err)
	}
	if err := u.Cancel(); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("cancelled under a writer: %v", err)
	}
	feed.Close()
	wg.Wait()
	if u.Size() != 4 {
		t.Errorf("%d bytes", u.Size())
	}
}

func TestScrubQuarantinesDamageAndAPushMendsIt(t *testing.T) {
	w := open(t, t.TempDir(), Config{})
	layer := w.blob("a", "precious")
	d := w.put("a", "v1", "", layer)
	if done, err := w.Scrub(t.Context()); err != nil || done.Damaged != 0 || done.Objects != 3 {
		t.Fatalf("%+v, %v", done, err)
	}
	w.flip(blobKey(layer.Digest))
	w.flip(manifestKey("a", d))
	done, err := w.Scrub(t.Context())
	if err != nil || done.Damaged != 2 {
		t.Fatalf("%+v, %v", done, err)
	}
	if _, err := w.Blob(t.Context(), "a", layer.Digest); CodeOf(err) != BlobUnknown {
		t.Errorf("a damaged blob is served: %v", err)
	}
	if _, _, _, err := w.Manifest(t.Context(), "a", reference.Reference{Tag: "v1"}); CodeOf(err) != ManifestUnknown {
		t.Errorf("a damaged manifest is served: %v", err)
	}
	if _, err := w.store.Stat(t.Context(), "quarantine/"+blobKey(layer.Digest)); err != nil {
		t.Errorf("not in quarantine: %v", err)
	}
	w.put("a", "v1", "", w.blob("a", "precious"))
	if done, err := w.Scrub(t.Context()); err != nil || done.Damaged != 0 || done.Objects != 3 || w.Usage().Corrupt != 2 {
		t.Errorf("mended: %+v, %v", done, err)
	}
	whole(t, w.Content)
}
