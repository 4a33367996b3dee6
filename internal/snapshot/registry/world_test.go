package registry_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/registry"
	"cocoonstack.io/cocoon/internal/vm"
)

// store is as much of a snapshot store as a registry client uses.
type store struct {
	snapshot.Store

	dir string
	mu  sync.Mutex
	all map[string]snapshot.Snapshot
	n   int
}

func newStore(t testing.TB) *store {
	return &store{dir: t.TempDir(), all: map[string]snapshot.Snapshot{}}
}

type draft struct {
	s        *store
	id, name string
	done     bool
}

func (s *store) Create(_ context.Context, name string) (snapshot.Draft, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.all[name]; ok {
		return nil, errdefs.Existsf("a snapshot %s is there already", name)
	}
	s.n++
	d := &draft{s: s, id: "id" + strconv.Itoa(s.n), name: name}
	return d, os.MkdirAll(d.Dir(), 0o700)
}

func (d *draft) ID() string  { return d.id }
func (d *draft) Dir() string { return filepath.Join(d.s.dir, d.id) }

func (d *draft) Link(context.Context, vm.Disk, func(string) bool) (snapshot.Disk, error) {
	panic("not used")
}

func (d *draft) Commit(_ context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	d.done = true
	s.ID, s.Name = d.id, d.name
	data, err := json.Marshal(s)
	if err != nil {
		return s, err
	}
	d.s.all[d.name] = s
	return s, os.WriteFile(filepath.Join(d.Dir(), snapshot.FileMeta), data, 0o600)
}

func (d *draft) Discard() error {
	if d.done {
		return nil
	}
	return os.RemoveAll(d.Dir())
}

func (s *store) Get(_ context.Context, ref string) (snapshot.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.all {
		if x.ID == ref || x.Name == ref {
			return x, nil
		}
	}
	return snapshot.Snapshot{}, errdefs.NotFoundf("there is no snapshot %s", ref)
}

func (s *store) List(context.Context) ([]snapshot.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []snapshot.Snapshot
	for _, x := range s.all {
		out = append(out, x)
	}
	return out, nil
}

type holding struct {
	s   snapshot.Snapshot
	dir string
}

func (h holding) Snapshot() snapshot.Snapshot { return h.s }
func (h holding) Dir() string                 { return h.dir }
func (h holding) Release()                    {}

func (s *store) Hold(ctx context.Context, ref string) (snapshot.Held, error) {
	x, err := s.Get(ctx, ref)
	return holding{x, filepath.Join(s.dir, x.ID)}, err
}

// guest fills the files of a snapshot: seed decides the content of its memory.
type guest struct {
	name   string
	seed   uint64
	memory int64
	dirty  int // pages of memory that differ from those of the seed
}

// save makes a snapshot in s as a driver would leave one: sparse memory, devices, a disk of two layers.
func (s *store) save(t testing.TB, g guest) snapshot.Held {
	t.Helper()
	d, err := s.Create(t.Context(), g.name)
	if err != nil {
		t.Fatal(err)
	}
	if g.memory == 0 {
		g.memory = 32 << 20
	}
	random := rand.New(rand.NewChaCha8([32]byte{byte(g.seed), byte(g.seed >> 8)}))
	memory := create(t, filepath.Join(d.Dir(), snapshot.FileMemory), g.memory)
	words := []byte("the quick brown fox jumps over the lazy dog ")
	for at := int64(0); at < g.memory; at += 64 << 10 {
		block := make([]byte, 64<<10)
		switch random.Uint64() % 4 {
		case 0: // a hole
			continue
		case 1: // cannot be compressed
			fill(random, block)
		case 2:
			for i := range block {
				block[i] = words[(i*7+int(random.Uint64()%3))%len(words)]
			}
		case 3: // scattered: pages of zero between
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
	fill(rand.New(rand.NewChaCha8([32]byte{7})), b) // the same of all guests
	write(t, base, b, 1<<20)
	closeFile(t, base)
	top := create(t, filepath.Join(d.Dir(), "disk-0.1.qcow2"), 0)
	b = make([]byte, 5<<20)
	fill(random, b[:1<<20])
	write(t, top, b, 0)
	closeFile(t, top)
	closeFile(t, create(t, filepath.Join(d.Dir(), "disk-1.0.raw"), 8<<20))
	_, err = d.Commit(t.Context(), snapshot.Snapshot{
		Image: "web:1", ImageDigest: "sha256:" + strings.Repeat("ab", 32), ImageType: vm.ImageOCI, ImageBlobIDs: []string{"x"},
		Hypervisor: "qemu", CPU: 1, Memory: g.memory, Storage: 16 << 20, NICs: 1, Live: true,
		Disks: []snapshot.Disk{
			{Serial: "cocoon-cow", Size: 16 << 20, Layers: []snapshot.Layer{{File: "disk-0.0.raw", Format: vm.DiskRaw}, {File: "disk-0.1.qcow2", Format: vm.DiskQCOW2}}},
			{Serial: "data", Size: 8 << 20, Layers: []snapshot.Layer{{File: "disk-1.0.raw", Format: vm.DiskRaw}}},
		},
		CreatedAt: time.Unix(1_700_000_000, 0).UTC(),
	})
	if err != nil {
		t.Fatal(err)
	}
	h, err := s.Hold(t.Context(), g.name)
	if err != nil {
		t.Fatal(err)
	}
	return h
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

// same fails unless both snapshots have the same files, and the second takes no more room than a little over the first.
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
		if !slices.Contains(append(files, snapshot.FileMeta), e.Name()) {
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

// serve runs a registry of another implementation; wrap may put something in front of it. It returns HOST:PORT.
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

func client(t testing.TB, s snapshot.Store, change func(*registry.Config)) *registry.Client {
	cfg := registry.Config{Index: filepath.Join(t.TempDir(), "index"), Hypervisor: "qemu", HTTP: ociclient.Config{Backoff: time.Millisecond}}
	if change != nil {
		change(&cfg)
	}
	return registry.New(cfg, s)
}

// last keeps the last progress.
type last struct{ p snapshot.Progress }

func (l *last) tell(p snapshot.Progress) { l.p = p }

func push(t testing.TB, c *registry.Client, h snapshot.Held, ref string) (string, snapshot.Progress) {
	t.Helper()
	var l last
	digest, err := c.Push(t.Context(), h, ref, snapshot.Auth{}, l.tell)
	if err != nil {
		t.Fatal(err)
	}
	return digest, l.p
}

func pull(t testing.TB, c *registry.Client, s *store, ref, name string) (snapshot.Held, snapshot.Progress) {
	t.Helper()
	var l last
	got, err := c.Pull(t.Context(), ref, name, snapshot.Auth{}, l.tell)
	if err != nil {
		t.Fatal(err)
	}
	h, err := s.Hold(t.Context(), got.ID)
	if err != nil {
		t.Fatal(err)
	}
	return h, l.p
}
