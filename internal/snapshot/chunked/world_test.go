package chunked_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/qcow2"
	epochserver "cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// store is a snapshot store and its folder.
type store struct {
	*local.Store

	dir string
}

func newStore(t testing.TB) *store { return newStoreAt(t, t.TempDir()) }

func newStoreAt(t testing.TB, dir string) *store {
	t.Helper()
	s, err := local.New(local.Config{Dir: dir})
	if err == nil {
		err = s.Open(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &store{s, dir}
}

// hold holds a snapshot until the test ends.
func (s *store) hold(t testing.TB, ref string) snapshot.Held {
	t.Helper()
	h, err := s.Hold(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Release)
	return h
}

// empty fails unless the store is empty, without partial snapshots.
func empty(t testing.TB, s *store) {
	t.Helper()
	all, err := s.List(context.WithoutCancel(t.Context()))
	if err != nil || len(all) > 0 {
		t.Errorf("there are %d snapshots, %v", len(all), err)
	}
	if left, err := os.ReadDir(filepath.Join(s.dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// guest describes the files of a snapshot: seed determines the content of its memory.
type guest struct {
	name   string
	seed   uint64
	memory int64
	dirty  int  // pages of memory that differ from those of the seed
	random bool // no page of memory is zero or can be compressed
}

// save saves a snapshot in s as a driver would: sparse memory, devices, a disk of two layers.
func (s *store) save(t testing.TB, g guest) snapshot.Held {
	t.Helper()
	d, err := s.Create(t.Context(), g.name)
	if err != nil {
		t.Fatal(err)
	}
	if g.memory == 0 {
		g.memory = 20 << 20
	}
	random := rand.New(rand.NewChaCha8([32]byte{byte(g.seed), byte(g.seed >> 8)}))
	memory := create(t, filepath.Join(d.Dir(), snapshot.FileMemory), g.memory)
	words := []byte("the quick brown fox jumps over the lazy dog ")
	for at := int64(0); at < g.memory; at += 64 << 10 {
		block := make([]byte, 64<<10)
		kind := random.Uint64() % 4
		if g.random {
			kind = 1
		}
		switch kind {
		case 0: // a hole
			continue
		case 1: // cannot be compressed
			fill(random, block)
		case 2:
			for i := range block {
				block[i] = words[(i*7+int(random.Uint64()%3))%len(words)]
			}
		case 3: // scattered, with zero pages between
			for p := 0; p < len(block); p += 8192 {
				fill(random, block[p:p+4096])
			}
		}
		write(t, memory, block, at)
	}
	other := rand.New(rand.NewChaCha8([32]byte{99, byte(g.dirty)}))
	for range g.dirty {
		b := make([]byte, 4096)
		fill(other, b)
		write(t, memory, b, int64(other.Uint64()%uint64(g.memory/4096))*4096)
	}
	closeFile(t, memory)
	state := create(t, filepath.Join(d.Dir(), snapshot.FileState), 0)
	b := make([]byte, 300<<10)
	fill(random, b[:100<<10])
	write(t, state, b, 0)
	closeFile(t, state)
	base := create(t, filepath.Join(d.Dir(), "disk-0.0.raw"), 16<<20)
	b = make([]byte, 6<<20)
	fill(rand.New(rand.NewChaCha8([32]byte{7})), b) // the same for all guests
	write(t, base, b, 1<<20)
	closeFile(t, base)
	overlay := filepath.Join(d.Dir(), "disk-0.1.qcow2")
	if err := (qcow2.Overlay{VirtualSize: 16 << 20, Backing: "/nowhere", BackingFormat: vm.DiskRaw}).Create(overlay); err != nil {
		t.Fatal(err)
	}
	top, err := os.OpenFile(overlay, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b = make([]byte, 5<<20)
	fill(random, b[:1<<20])
	write(t, top, b, 1<<20)
	closeFile(t, top)
	closeFile(t, create(t, filepath.Join(d.Dir(), "disk-1.0.raw"), 8<<20))
	_, err = d.Commit(t.Context(), snapshot.Snapshot{
		Image: "web:1", ImageDigest: "sha256:" + strings.Repeat("ab", 32), ImageType: vm.ImageOCI, ImageBlobIDs: []string{"x"},
		Hypervisor: "qemu", CPU: 1, Memory: g.memory, Storage: 16 << 20, NICs: 1, Live: true,
		Disks: []snapshot.Disk{
			{Serial: "cocoon-cow", Role: vm.RoleCOW, Size: 16 << 20, Layers: []snapshot.Layer{{File: "disk-0.0.raw", Format: vm.DiskRaw}, {File: "disk-0.1.qcow2", Format: vm.DiskQCOW2}}},
			{Serial: "data", Role: vm.RoleData, Size: 8 << 20, Layers: []snapshot.Layer{{File: "disk-1.0.raw", Format: vm.DiskRaw}}},
		},
		CreatedAt: time.Unix(1_700_000_000, 0).UTC(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.hold(t, g.name)
}

func fill(r *rand.Rand, b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		v := r.Uint64()
		for k := range 8 {
			b[i+k] = byte(v >> (8 * k))
		}
	}
}

func create(t testing.TB, path string, size int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func write(t testing.TB, f *os.File, b []byte, at int64) {
	t.Helper()
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

func closeFile(t testing.TB, f *os.File) {
	t.Helper()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

var files = []string{snapshot.FileMemory, snapshot.FileState, "disk-0.0.raw", "disk-0.1.qcow2", "disk-1.0.raw"}

// same fails unless both snapshots have the same files, and the second occupies at most a little more disk space than
// the first.
func same(t testing.TB, a, b string) {
	t.Helper()
	for _, name := range files {
		x, y := sum(t, filepath.Join(a, name)), sum(t, filepath.Join(b, name))
		if x != y {
			t.Errorf("%s came back as something else", name)
		}
	}
	entries, err := os.ReadDir(b)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(append(files, snapshot.FileMeta), strings.TrimSuffix(e.Name(), sparse.SumSuffix)) {
			t.Errorf("there is a file %s", e.Name())
		}
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has the mode %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

func sum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// serve runs a registry of another implementation; wrap may add a handler in front of it. It returns HOST:PORT.
func serve(t testing.TB, wrap func(http.Handler) http.Handler) string {
	t.Helper()
	h := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// epoch runs our own registry, with a token with all rights. It returns HOST:PORT; dir is its folder.
func epoch(t testing.TB, dir string) string {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	objects, err := folder.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	store, err := content.New(t.Context(), objects, content.Config{Log: log, UploadTTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte("sesame\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := access.Open(path, "", log)
	if err != nil {
		t.Fatal(err)
	}
	h := epochserver.New(epochserver.Config{}, store, tokens, prometheus.NewRegistry(), log)
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

var token = snapshot.Auth{Token: "sesame"}

func client(t testing.TB, s snapshot.Store, change func(*chunked.Config)) *chunked.Client {
	cfg := chunked.Config{Index: filepath.Join(t.TempDir(), "index"), Hypervisors: []string{"fake", "qemu"}, HTTP: ociclient.Config{Backoff: time.Millisecond}}
	if change != nil {
		change(&cfg)
	}
	return chunked.New(cfg, s)
}

// last keeps the last progress.
type last struct{ p snapshot.Progress }

func (l *last) tell(p snapshot.Progress) { l.p = p }

func push(t testing.TB, c *chunked.Client, h snapshot.Held, ref string) (string, snapshot.Progress) {
	t.Helper()
	var l last
	digest, err := c.Push(t.Context(), h, ref, token, l.tell)
	if err != nil {
		t.Fatal(err)
	}
	return digest, l.p
}

func pull(t testing.TB, c *chunked.Client, s *store, ref, name string) (snapshot.Held, snapshot.Progress) {
	t.Helper()
	var l last
	got, err := c.Pull(t.Context(), ref, name, token, l.tell)
	if err != nil {
		t.Fatal(err)
	}
	return s.hold(t, got.ID), l.p
}

// check is Check with a clock of its own, which stands still while it waits for the registry: it has little patience. It must not try twice, because the clock stands while a
// connection is open.
func check(t *testing.T, c *chunked.Client, ref string, auth snapshot.Auth) (err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { err = c.Check(t.Context(), ref, auth) })
	return err
}

// smallDisk returns the folder of a file system of that size.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	need.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}
