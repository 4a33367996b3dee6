package pull

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// diskOf returns a disk with a boot sector; equal seeds give equal disks.
func diskOf(seed byte, size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
	clear(b[:510])
	b[510], b[511] = 0x55, 0xaa
	return b
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(h[:])
}

func zip(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// web is a server of files. A file's ETag is the hash of its content.
type web struct {
	*httptest.Server

	mu    sync.Mutex
	files map[string][]byte
	asked []string      // "GET /path", with " (304)" where that was the answer
	hold  chan struct{} // content stops half-way until it is closed; nil: it does not stop
	gone  chan struct{} // gets a value for each client that disconnected during the stop
	most  int           // maximum stopped at one time
	held  int
}

func serve(t *testing.T) *web {
	w := &web{files: map[string][]byte{}, gone: make(chan struct{}, 100)}
	w.Server = httptest.NewServer(w)
	t.Cleanup(w.Close)
	return w
}

func (w *web) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	data, ok := w.files[r.URL.Path]
	hold := w.hold
	tag := `"` + sum(data) + `"`
	same := ok && r.Header.Get("If-None-Match") == tag
	note := r.Method + " " + r.URL.Path
	if same {
		note += " (304)"
	}
	w.asked = append(w.asked, note)
	w.mu.Unlock()
	switch {
	case !ok:
		http.NotFound(out, r)
		return
	case same:
		out.WriteHeader(http.StatusNotModified)
		return
	}
	out.Header().Set("ETag", tag)
	out.Header().Set("Content-Length", fmt.Sprint(len(data)))
	half := len(data) / 2
	_, _ = out.Write(data[:half])
	if hold != nil {
		w.mu.Lock()
		w.held++
		w.most = max(w.most, w.held)
		w.mu.Unlock()
		out.(http.Flusher).Flush()
		select {
		case <-hold:
		case <-r.Context().Done():
			w.gone <- struct{}{}
		}
		w.mu.Lock()
		w.held--
		w.mu.Unlock()
	}
	_, _ = out.Write(data[half:])
}

func (w *web) put(path string, data []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.files[path] = data
}

// requests returns the requests since the last call.
func (w *web) requests() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.asked
	w.asked = nil
	return out
}

// rig is a puller with an empty store and a mapping file.
type rig struct {
	t     *testing.T
	dir   string
	store *local.Store
	*Puller
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir()}
	cfg.Mappings, cfg.Protocol = filepath.Join(r.dir, "images.d"), "http"
	if err := os.Mkdir(cfg.Mappings, 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.store, err = local.New(local.Config{Dir: filepath.Join(r.dir, "store")}); err != nil {
		t.Fatal(err)
	}
	if r.Puller, err = New(cfg, r.store); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) mapping(yaml string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, "images.d", "m.yaml"), []byte(yaml), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) pull(name string, policy image.PullPolicy) (image.Image, error) {
	return r.Pull(r.t.Context(), image.PullRequest{Name: name, Policy: policy}, nil)
}

func (r *rig) must(name string, policy image.PullPolicy) image.Image {
	r.t.Helper()
	img, err := r.pull(name, policy)
	if err != nil {
		r.t.Fatalf("pull %s, %s: %v", name, policy, err)
	}
	return img
}

// leftovers are files of the store that are neither images nor their names.
func (r *rig) leftovers() (out []string) {
	r.t.Helper()
	err := filepath.WalkDir(filepath.Join(r.dir, "store"), func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(filepath.Join(r.dir, "store"), path)
		if err == nil && strings.Count(rel, "/") > 0 {
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func wantClass(t *testing.T, what string, err error, class errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, class) {
		t.Errorf("%s: %v (%s), want %s", what, err, errdefs.ClassOf(err), class)
	}
}

func TestPoliciesOfAnImageOfTheWeb(t *testing.T) {
	w, one, two := serve(t), diskOf(1, 1<<20), diskOf(2, 1<<20)
	w.put("/d.img", one)
	r := newRig(t, Config{})
	r.mapping("translations:\n- {name: my/image, url: '" + w.URL + "/d.img'}\n")

	_, err := r.pull("my/image", image.PullNever)
	wantClass(t, "never, not here", err, errdefs.NotFound)
	if got := w.requests(); got != nil {
		t.Errorf("the policy Never asked %v", got)
	}

	img := r.must("virtlet.cloud/my/image:latest", image.PullIfNotPresent)
	if img.ID != sum(one) || img.Name != "my/image" || img.Type != vm.ImageDisk || img.Source != w.URL+"/d.img" || img.Digest != "" {
		t.Errorf("pulled %+v", img)
	}
	w.requests()
	w.put("/d.img", two)
	for _, p := range []image.PullPolicy{image.PullIfNotPresent, image.PullNever} {
		if got := r.must("my/image:v2", p); got.ID != img.ID {
			t.Errorf("%s: %+v", p, got)
		}
	}
	if got := w.requests(); got != nil {
		t.Errorf("an image that is here was asked for: %v", got)
	}

	w.put("/d.img", one)
	r.must("my/image", image.PullAlways)
	if got := w.requests(); !slices.Equal(got, []string{"GET /d.img (304)"}) {
		t.Errorf("nothing new: %v", got)
	}
	w.put("/d.img", two)
	if img = r.must("my/image", ""); img.ID != sum(two) { // "" means Always
		t.Errorf("something new: %+v", img)
	}
	w.requests()
	forced, err := r.Pull(t.Context(), image.PullRequest{Name: "my/image", Policy: image.PullIfNotPresent, Force: true}, nil)
	if got := w.requests(); err != nil || forced.ID != img.ID || !slices.Equal(got, []string{"GET /d.img"}) {
		t.Errorf("forced: %v, %v", got, err)
	}

	w.Close()
	_, err = r.pull("my/image", image.PullAlways)
	wantClass(t, "the origin is away", err, errdefs.Unavailable)
	r.must("my/image", image.PullIfNotPresent)
}

// If the target of an alias changes, the ETag of the old target does not count.
func TestAnAliasThatMoves(t *testing.T) {
	w, one, two := serve(t), diskOf(1, 1<<16), diskOf(2, 1<<16)
	w.put("/one.img", one)
	w.put("/two.img", two)
	r := newRig(t, Config{})
	for _, tc := range []struct {
		file string
		want []byte
	}{{"one", one}, {"two", two}, {"one", one}} {
		r.mapping("translations:\n- {name: alias, url: '" + w.URL + "/" + tc.file + ".img'}\n")
		if img := r.must("alias", image.PullAlways); img.ID != sum(tc.want) {
			t.Errorf("%s: %+v", tc.file, img)
		}
	}
	for _, a := range w.requests() {
		if strings.Contains(a, "304") {
			t.Errorf("asked %s", a)
		}
	}
}

func TestAnImportedImageHasNoOrigin(t *testing.T) {
	w := serve(t)
	r := newRig(t, Config{})
	mine, err := r.store.Import(t.Context(), "alias:latest", bytes.NewReader(diskOf(3, 1<<16)), nil)
	if err != nil {
		t.Fatal(err)
	}
	w.put("/d.img", diskOf(4, 1<<16))
	r.mapping("translations:\n- {name: alias, url: '" + w.URL + "/d.img'}\n")
	for _, p := range []image.PullPolicy{image.PullIfNotPresent, image.PullNever} {
		if img := r.must("alias", p); img.ID != mine.ID {
			t.Errorf("%s: %+v", p, img)
		}
	}
	_, err = r.pull("alias", image.PullAlways)
	wantClass(t, "always", err, errdefs.AlreadyExists)
	if got := w.requests(); got != nil {
		t.Errorf("asked %v", got)
	}
	if img, err := r.Get(t.Context(), "alias"); err != nil || img.ID != mine.ID {
		t.Errorf("a VM would boot from %+v, %v", img, err)
	}
	forced, err := r.Pull(t.Context(), image.PullRequest{Name: "alias", Force: true}, nil)
	if err != nil || forced.ID == mine.ID {
		t.Errorf("forced: %+v, %v", forced, err)
	}
	// From now on both exist, and the name means the pulled one.
	for _, ref := range []string{"alias", "virtlet.cloud/alias:latest"} {
		if img, err := r.Get(t.Context(), ref); err != nil || img.ID != forced.ID {
			t.Errorf("%s would boot from %+v, %v", ref, img, err)
		}
	}
	for _, ref := range []string{mine.ID, mine.ID[7:], mine.ID[:19], mine.ID[7:19]} {
		if img, err := r.Get(t.Context(), ref); err != nil || img.ID != mine.ID {
			t.Errorf("%s: %+v, %v", ref, img, err)
		}
		if img, err := r.pull(ref, image.PullIfNotPresent); err != nil || img.ID != mine.ID {
			t.Errorf("pull %s: %+v, %v", ref, img, err)
		}
	}
	_, err = r.pull("sha256:0123456789", image.PullAlways)
	wantClass(t, "an id that is not here", err, errdefs.NotFound)
}

// Statement 40: a name with a digest gives exactly that content or an error, and nothing is stored.
func TestStatement40_DigestsOfNames(t *testing.T) {
	plain := diskOf(5, 1<<18)
	packed := zip(t, plain)
	for name, tc := range map[string]struct {
		served []byte
		rule   string // in addition to name and url
		digest string // of the name
		ok     bool
	}{
		"content":                  {served: plain, digest: sum(plain), ok: true},
		"content that was packed":  {served: packed, digest: sum(plain), ok: true},
		"file that was packed":     {served: packed, digest: sum(packed), ok: true},
		"another":                  {served: plain, digest: sum([]byte("x"))},
		"another, packed":          {served: packed, digest: sum([]byte("x"))},
		"mapping: file":            {served: packed, rule: ", sha256: '" + sum(packed)[7:] + "'", ok: true},
		"mapping: content":         {served: packed, rule: ", sha256: '" + sum(plain)[7:] + "'"},
		"mapping: checksums":       {served: plain, rule: ", checksums: SHA256SUMS", ok: true},
		"mapping: other checksums": {served: packed, rule: ", checksums: SHA256SUMS"},
	} {
		t.Run(name, func(t *testing.T) {
			w := serve(t)
			w.put("/x/d.img", tc.served)
			w.put("/x/SHA256SUMS", []byte(sum(plain)[7:]+"  d.img\n"))
			r := newRig(t, Config{})
			r.mapping("translations:\n- {name: alias, url: '" + w.URL + "/x/d.img'" + tc.rule + "}\n")
			ref := "alias"
			if tc.digest != "" {
				ref += "@" + tc.digest
			}
			img, err := r.pull(ref, image.PullIfNotPresent)
			if !tc.ok {
				wantClass(t, "pull", err, errdefs.DataLoss)
				if left := r.leftovers(); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
				return
			}
			if err != nil || img.ID != sum(plain) {
				t.Fatalf("%+v, %v", img, err)
			}
			w.requests()
			if again := r.must(ref, image.PullIfNotPresent); again.ID != img.ID || w.requests() != nil {
				t.Errorf("it is not found again: %+v", again)
			}
			r.must(ref, image.PullAlways)
			if got := w.requests(); !strings.HasSuffix(got[len(got)-1], "(304)") {
				t.Errorf("always asked %v", got)
			}
			if got, err := r.Get(t.Context(), ref); err != nil || got.ID != img.ID {
				t.Errorf("a VM would boot from %+v, %v", got, err)
			}
		})
	}
}

func TestStatement37_PullReturnsTheID(t *testing.T) {
	w, r := serve(t), newRig(t, Config{})
	data := diskOf(37, 8192)
	w.put("/disk.img", data)
	img := r.must(w.URL+"/disk.img", image.PullAlways)
	listed, err := r.store.List(t.Context())
	if err != nil || len(listed) != 1 || img.ID != sum(data) || listed[0].ID != img.ID {
		t.Errorf("pulled %s, listed %+v, %v; want %s", img.ID, listed, err, sum(data))
	}
}

func TestStatement49_CompressedChecksummedShared(t *testing.T) {
	w, r := serve(t), newRig(t, Config{})
	data := diskOf(49, 64<<10)
	packed := zip(t, data)
	w.put("/disk.img.gz", packed)
	w.put("/SHA256SUMS", []byte(strings.TrimPrefix(sum(packed), "sha256:")+"  disk.img.gz\n"))
	r.mapping("translations:\n- {name: good, url: " + w.URL + "/disk.img.gz, checksums: SHA256SUMS}\n" +
		"- {name: bad, url: " + w.URL + "/disk.img.gz, sha256: \"" + strings.Repeat("0", 64) + "\"}\n")
	if img := r.must("good", image.PullAlways); img.ID != sum(data) {
		t.Errorf("unpacked to %s, want %s", img.ID, sum(data))
	}
	_, err := r.pull("bad", image.PullAlways)
	wantClass(t, "another checksum", err, errdefs.DataLoss)
	if _, err := r.store.Get(t.Context(), "bad"); !errdefs.IsNotFound(err) {
		t.Errorf("content of another checksum was kept: %v", err)
	}
}

func TestParallelPullsAreOneTransfer(t *testing.T) {
	w := serve(t)
	w.put("/d.img", diskOf(6, 1<<20))
	w.hold = make(chan struct{})
	r := newRig(t, Config{})
	url := w.URL + "/d.img"
	const callers = 8
	var began, ended sync.WaitGroup
	began.Add(callers)
	for i := range callers {
		ended.Go(func() {
			var once sync.Once
			var total int64
			img, err := r.Pull(t.Context(), image.PullRequest{Name: url}, func(p image.Progress) {
				if p.Phase == image.PhaseDownload && p.Done > 0 {
					total = p.Total
					once.Do(began.Done)
				}
			})
			if err != nil || img.Size == 0 {
				t.Errorf("caller %d: %+v, %v", i, img, err)
			}
			if total != 1<<20 {
				t.Errorf("caller %d heard of %d bytes", i, total)
			}
		})
	}
	began.Wait() // everybody sees progress
	close(w.hold)
	ended.Wait()
	if got := w.requests(); len(got) != 1 {
		t.Errorf("asked %v", got)
	}
	if len(r.jobs) != 0 {
		t.Errorf("%d jobs are left", len(r.jobs))
	}
}

func TestTheLastCallerToGoEndsTheTransfer(t *testing.T) {
	w := serve(t)
	w.put("/d.img", diskOf(7, 1<<20))
	w.hold = make(chan struct{})
	defer close(w.hold)
	r := newRig(t, Config{})
	pull := func() (context.CancelFunc, chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		moved, done := make(chan struct{}), make(chan error, 1)
		go func() {
			var once sync.Once
			_, err := r.Pull(ctx, image.PullRequest{Name: w.URL + "/d.img"}, func(p image.Progress) {
				if p.Done > 0 {
					once.Do(func() { close(moved) })
				}
			})
			done <- err
		}()
		<-moved
		return cancel, done
	}
	leaveA, a := pull()
	leaveB, b := pull()
	leaveA()
	wantClass(t, "the first to go", <-a, errdefs.Canceled)
	select {
	case <-w.gone:
		t.Error("the transfer ended although somebody waits for it")
	default:
	}
	leaveB()
	wantClass(t, "the last to go", <-b, errdefs.Canceled)
	<-w.gone
	if left := r.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if got := w.requests(); len(got) != 1 {
		t.Errorf("asked %v", got)
	}
}

// counts is an Observer.
type counts struct {
	mu           sync.Mutex
	began, ended int
	bytes        int64
	kinds        []string
	failed       int
}

func (c *counts) Began() { c.mu.Lock(); c.began++; c.mu.Unlock() }

func (c *counts) Received(n int64) { c.mu.Lock(); c.bytes += n; c.mu.Unlock() }

func (c *counts) Ended(kind string, _ time.Duration, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended++
	c.kinds = append(c.kinds, kind)
	if err != nil {
		c.failed++
	}
}

func TestNotMoreTransfersThanAllowed(t *testing.T) {
	w, seen := serve(t), &counts{}
	w.hold = make(chan struct{})
	r := newRig(t, Config{Parallel: 2, Observer: seen})
	var all sync.WaitGroup
	for i := range 5 {
		path := fmt.Sprintf("/%d.img", i)
		w.put(path, diskOf(byte(i), 1<<16))
		all.Go(func() {
			if _, err := r.pull(w.URL+path, image.PullAlways); err != nil {
				t.Error(err)
			}
		})
	}
	close(w.hold)
	all.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.most > 2 || len(w.asked) != 5 {
		t.Errorf("%d transfers at a time, %v", w.most, w.asked)
	}
	if seen.began != 5 || seen.ended != 5 || seen.failed != 0 || seen.bytes != 5<<16 || seen.kinds[0] != "url" {
		t.Errorf("observed %+v", seen)
	}
}

func TestBadAnswers(t *testing.T) {
	w, seen := serve(t), &counts{}
	w.put("/page.img", []byte("<!DOCTYPE html><title>not a disk</title>"))
	w.put("/cut.img.gz", zip(t, diskOf(8, 1<<18))[:1<<17])
	w.put("/empty.img", nil)
	r := newRig(t, Config{Observer: seen})
	for name, class := range map[string]errdefs.Class{
		w.URL + "/missing.img": errdefs.NotFound,
		w.URL + "/page.img":    errdefs.InvalidArgument,
		w.URL + "/cut.img.gz":  errdefs.DataLoss,
		w.URL + "/empty.img":   errdefs.InvalidArgument,
		"bad name":             errdefs.InvalidArgument,
		"":                     errdefs.InvalidArgument,
	} {
		_, err := r.pull(name, image.PullAlways)
		wantClass(t, name, err, class)
	}
	if left := r.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if seen.began != 4 || seen.failed != 4 {
		t.Errorf("observed %+v", seen)
	}
	_, err := r.pull("debian", "Sometimes")
	wantClass(t, "policy", err, errdefs.InvalidArgument)
	_, err = r.Pull(t.Context(), image.PullRequest{Name: "debian", Policy: image.PullNever, Force: true}, nil)
	wantClass(t, "never by force", err, errdefs.InvalidArgument)
}

func TestExplain(t *testing.T) {
	w := serve(t)
	w.put("/d.img", diskOf(9, 1<<16))
	r := newRig(t, Config{})
	r.mapping("transports:\n  slow: {timeout: 60000}\ntranslations:\n- {name: alias, transport: slow, url: '" + strings.Replace(w.URL, "://", "://me:hunter2@", 1) + "/d.img'}\n")
	e, err := r.Explain(t.Context(), "virtlet.cloud/alias:latest")
	if err != nil {
		t.Fatal(err)
	}
	if e.Kind != "mapped" || e.Key != "alias" || e.URL != w.URL+"/d.img" || e.Source != "files/m.yaml" || e.Rule == "" || e.Present || len(e.Steps) < 4 {
		t.Errorf("%+v", e)
	}
	if !strings.Contains(e.Transport, "slow") || !strings.Contains(e.Transport, "1m0s") {
		t.Errorf("transport %q", e.Transport)
	}
	r.must("alias", image.PullAlways)
	w.requests()
	if e, err = r.Explain(t.Context(), "alias"); err != nil || !e.Present || !strings.Contains(strings.Join(e.Steps, "\n"), "IfNotPresent and Never use it") {
		t.Errorf("%+v, %v", e, err)
	}
	if strings.Contains(fmt.Sprint(e), "hunter2") {
		t.Errorf("the password is told: %+v", e)
	}
	if e, err = r.Explain(t.Context(), "debian:12"); err != nil || e.Kind != "registry" || e.Key != "debian:12" || !strings.Contains(e.Transport, "registry") {
		t.Errorf("%+v, %v", e, err)
	}
	if got := w.requests(); got != nil {
		t.Errorf("asked %v", got)
	}
	_, err = r.Explain(t.Context(), "a b")
	wantClass(t, "a bad name", err, errdefs.InvalidArgument)
}

func TestMappingsThatArePushed(t *testing.T) {
	r := newRig(t, Config{})
	problems, err := r.SyncMappings(t.Context(), "kubernetes", []image.Mapping{
		{Name: "good", YAML: []byte("translations:\n- {name: a, url: http://x.example/a.img}\n")},
		{Name: "bad", YAML: []byte("translations:\n- {name: b, url: http://x.example/b.img, colour: green}\n")},
	})
	if err != nil || len(problems) != 1 || problems[0].Mapping != "bad" {
		t.Errorf("%+v, %v", problems, err)
	}
	if all, err := r.Problems(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	if e, err := r.Explain(t.Context(), "a"); err != nil || e.URL != "http://x.example/a.img" || e.Source != "kubernetes/good" {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := r.SyncMappings(t.Context(), "kubernetes", nil); err != nil {
		t.Error(err)
	}
	if e, err := r.Explain(t.Context(), "a"); err != nil || e.Kind != "registry" {
		t.Errorf("%+v, %v", e, err)
	}
	_, err = r.SyncMappings(t.Context(), "files", nil)
	wantClass(t, "files", err, errdefs.InvalidArgument)
}
