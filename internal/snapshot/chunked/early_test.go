package chunked_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/sparse"
)

// gate is a registry that keeps some blobs back.
type gate struct {
	mu     sync.Mutex
	change sync.Cond
	kept   map[string]bool
	open   bool
	broken bool // it answers 503
	spoilt bool // it answers with other bytes
	asked  []string
}

func (g *gate) wrap(next http.Handler) http.Handler {
	g.change.L = &g.mu
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, digest, blob := strings.Cut(r.URL.Path, "/blobs/")
		g.mu.Lock()
		if blob && r.Method == http.MethodGet && g.kept[digest] {
			g.asked = append(g.asked, digest)
			g.change.Broadcast()
			for !g.open && !g.broken && r.Context().Err() == nil {
				g.change.Wait()
			}
			if g.broken {
				g.mu.Unlock()
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			if g.spoilt {
				g.mu.Unlock()
				_, _ = io.WriteString(w, strings.Repeat("x", 100))
				return
			}
		}
		g.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

func (g *gate) set(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
	g.change.Broadcast()
}

// await waits until so many blobs were asked for.
func (g *gate) await(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.asked) < n {
		g.change.Wait()
	}
}

// early is a registry with a snapshot whose memory is kept back.
func early(t *testing.T) (g *gate, h snapshot.Held, ref string) {
	t.Helper()
	g = &gate{kept: map[string]bool{}}
	here := newStore(t)
	h = here.save(t, guest{name: "s", seed: 1, random: true})
	host := serve(t, g.wrap)
	ref = host + "/vm/web:v1"
	digest, _ := push(t, client(t, here, nil), h, ref)
	resp, err := http.Get("http://" + host + "/v2/vm/web/manifests/" + digest)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var m ociclient.Manifest
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		if l.Annotations[artifact.AnnotationTitle] == snapshot.FileMemory {
			g.kept[l.Digest] = true
		}
	}
	if len(g.kept) < 20 {
		t.Fatalf("%d chunks of memory", len(g.kept))
	}
	t.Cleanup(func() { g.set(func() { g.open = true }) })
	return g, h, ref
}

// listener is a reader of the memory of a snapshot that arrives.
type listener struct {
	net.Conn
	d    filling.Decoder
	here sparse.Pages
}

func listen(t *testing.T, path string, size int64) *listener {
	t.Helper()
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	conn, err := net.Dial("unix", filepath.Join("/proc/self/fd", itoa(int(dir.Fd())), filepath.Base(path)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &listener{Conn: conn, d: filling.Decoder{Size: size}, here: sparse.NewPages(size)}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

// hear listens until page is here, or for ever if it is negative.
func (l *listener) hear(page int64) error {
	for buf := make([]byte, 4096); page < 0 || !l.here.Has(page); {
		n, err := l.Read(buf)
		if err != nil {
			return err
		}
		parts, err := l.d.Decode(buf[:n])
		l.here.Add(parts)
		if err != nil {
			return err
		}
		if page < 0 && l.here.Count() == l.d.Size/sparse.Block {
			return nil
		}
	}
	return nil
}

func pullEarly(t *testing.T, s *store, ref string, change func(*chunked.Config)) (snapshot.Held, func(context.Context)) {
	t.Helper()
	got, arrive, err := client(t, s, change).PullEarly(t.Context(), ref, "x", token, func(snapshot.Progress) {})
	if err != nil {
		t.Fatal(err)
	}
	if !got.Arriving {
		t.Fatal("it does not arrive")
	}
	h, err := s.HoldArriving(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Release)
	return h, arrive
}

func TestPullEarly(t *testing.T) {
	g, from, ref := early(t)
	s := newStore(t)
	h, arrive := pullEarly(t, s, ref, nil)
	arrived := make(chan struct{})
	go func() {
		defer close(arrived)
		arrive(t.Context())
	}()
	for _, f := range files[1:] {
		if x, y := sum(t, filepath.Join(from.Dir(), f)), sum(t, filepath.Join(h.Dir(), f)); x != y {
			t.Errorf("%s is something else", f)
		}
	}
	if err := h.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	size := h.Snapshot().Memory
	l := listen(t, h.Feed(), size)
	last := size/sparse.Block - 2
	g.await(6) // in their turn; one that has not begun would take what is wanted, and nobody else asks
	if _, err := l.Write(filling.Want(last * sparse.Block)); err != nil {
		t.Fatal(err)
	}
	g.await(7)
	g.set(func() { g.open = true })
	if err := l.hear(last); err != nil {
		t.Fatal(err)
	}
	if err := l.hear(-1); err != nil {
		t.Fatal(err)
	}
	select {
	case <-arrived:
		t.Fatal("it has arrived, and somebody holds it")
	default:
	}
	h.Release()
	whole, err := s.Hold(t.Context(), "x")
	if err != nil || whole.Feed() != "" || whole.Snapshot().Arriving {
		t.Fatal(whole, err)
	}
	defer whole.Release()
	same(t, from.Dir(), whole.Dir())
	_ = l.Close()
	<-arrived
	if _, p := pull(t, client(t, s, nil), s, ref, "y"); p.Done == 0 {
		t.Errorf("%+v", p)
	}
}

// TestPullEarlyWhole: a snapshot whose guests need all memory is pulled whole.
func TestPullEarlyWhole(t *testing.T) {
	g, from, ref := early(t)
	g.set(func() { g.open = true })
	s := newStore(t)
	var asked []string
	c := client(t, s, func(c *chunked.Config) {
		c.LoadsLate = func(driver string) bool { asked = append(asked, driver); return false }
	})
	got, arrive, err := c.PullEarly(t.Context(), ref, "x", token, func(snapshot.Progress) {})
	if err != nil || got.Arriving || !slices.Equal(asked, []string{from.Snapshot().Hypervisor}) {
		t.Fatalf("%+v, %v, asked %q", got, err, asked)
	}
	arrive(t.Context())
	h, err := s.Hold(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	same(t, from.Dir(), h.Dir())
}

// TestPullEarlySpoilt: bytes that are not those of the snapshot never come to a guest, which hears why.
func TestPullEarlySpoilt(t *testing.T) {
	g, _, ref := early(t)
	g.set(func() { g.spoilt = true })
	s := newStore(t)
	before := zombies(t)
	h, arrive := pullEarly(t, s, ref, nil)
	l := listen(t, h.Feed(), h.Snapshot().Memory)
	g.set(func() { g.open = true })
	if err := l.hear(-1); !errdefs.Is(err, errdefs.DataLoss) || l.here.Count()*sparse.Block == l.d.Size {
		t.Errorf("the reader hears %v", err)
	}
	_ = l.Close()
	arrive(t.Context())
	if after := zombies(t); !slices.Equal(before, after) {
		t.Errorf("nobody has waited for %q; before for %q", after, before)
	}
	empty(t, s)
	if _, err := s.Hold(t.Context(), "x"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	g.set(func() { g.spoilt = false })
	pull(t, client(t, s, nil), s, ref, "x")
}

// TestPullEarlyAway: while a guest waits, a registry that does not answer is no reason to give up, and otherwise it is.
func TestPullEarlyAway(t *testing.T) {
	g, from, ref := early(t)
	s := newStore(t)
	once := func(c *chunked.Config) { c.HTTP.Attempts = 1 }
	h, arrive := pullEarly(t, s, ref, once)
	l := listen(t, h.Feed(), h.Snapshot().Memory)
	g.set(func() { g.broken = true }) // not before a guest waits
	g.await(7)                        // one session asks six times
	g.set(func() { g.broken, g.open = false, true })
	if err := l.hear(-1); err != nil {
		t.Fatal(err)
	}
	h.Release()
	_ = l.Close()
	arrive(t.Context())
	same(t, from.Dir(), s.hold(t, "x").Dir())

	g.set(func() { g.broken, g.open = true, false })
	s = newStore(t)
	h, arrive = pullEarly(t, s, ref, once)
	h.Release()
	arrive(t.Context())
	empty(t, s)
}

// TestPullEarlyFull: while a guest waits, a full disk is no reason to give up either.
func TestPullEarlyFull(t *testing.T) {
	g, from, ref := early(t)
	s := newStoreAt(t, smallDisk(t, "64m"))
	log, into := io.Pipe()
	c := client(t, s, func(c *chunked.Config) { c.Log = slog.New(slog.NewTextHandler(into, nil)) })
	_, arrive, err := c.PullEarly(t.Context(), ref, "x", token, func(snapshot.Progress) {})
	if err != nil {
		t.Fatal(err)
	}
	h, err := s.HoldArriving(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	other := filepath.Join(s.dir, "other")
	if err := os.WriteFile(other, make([]byte, 64<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	l := listen(t, h.Feed(), h.Snapshot().Memory)
	g.set(func() { g.open = true })
	arrived := make(chan struct{})
	go func() {
		defer close(arrived)
		arrive(t.Context())
	}()
	said, err := bufio.NewReader(log).ReadString('\n')
	if err != nil || !strings.Contains(said, "its guests wait") || !strings.Contains(said, "the disk is full") {
		t.Fatalf("%s, %v", said, err)
	}
	go func() { _, _ = io.Copy(io.Discard, log) }()
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if err := l.hear(-1); err != nil {
		t.Fatal(err)
	}
	h.Release()
	_ = l.Close()
	<-arrived
	same(t, from.Dir(), s.hold(t, "x").Dir())
}

// TestPullEarlyLeft: whoever pulls goes away. A guest that has begun gets its memory; the snapshot is gone.
func TestPullEarlyLeft(t *testing.T) {
	g, _, ref := early(t)
	s := newStore(t)
	h, arrive := pullEarly(t, s, ref, nil)
	l := listen(t, h.Feed(), h.Snapshot().Memory)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	arrive(ctx)
	empty(t, s)
	g.set(func() { g.open = true })
	if err := l.hear(-1); err != nil {
		t.Error(err)
	}
}

// TestPullEarlyKilled: the same after the death of the process that pulls. The process that loads ends when its last reader does.
func TestPullEarlyKilled(t *testing.T) {
	g, from, ref := early(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, waits := range []bool{true, false} {
		g.set(func() { g.open = false })
		dir := t.TempDir()
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env = append(os.Environ(), envDir+"="+dir, envRef+"="+ref, envPhase+"=early")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 4)); err != nil {
			t.Fatalf("it ended before: %v, %v", err, cmd.Wait())
		}
		feeds, err := filepath.Glob(filepath.Join(dir, "store", "*", snapshot.FileFeed))
		if err != nil || len(feeds) != 1 {
			t.Fatal(feeds, err)
		}
		l := listen(t, feeds[0], from.Snapshot().Memory)
		memory, err := os.Open(filepath.Join(filepath.Dir(feeds[0]), snapshot.FileMemory))
		if err != nil {
			t.Fatal(err)
		}
		defer memory.Close()
		if !waits {
			_ = l.Close()
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		s := newStoreAt(t, filepath.Join(dir, "store"))
		empty(t, s)
		if entries, err := filepath.Glob(filepath.Join(dir, "store", "??????????????????????????", "*")); err != nil || len(entries) > 0 {
			t.Errorf("left: %q, %v", entries, err)
		}
		if waits {
			g.set(func() { g.open = true })
			if err := l.hear(-1); err != nil {
				t.Fatal(err)
			}
			whole, err := os.Open(filepath.Join(from.Dir(), snapshot.FileMemory))
			if err != nil {
				t.Fatal(err)
			}
			defer whole.Close()
			a, aerr := io.ReadAll(memory)
			b, berr := io.ReadAll(whole)
			if string(a) != string(b) || aerr != nil || berr != nil {
				t.Errorf("the memory is something else; %v, %v", aerr, berr)
			}
			_ = l.Close()
		}
		loaders(t, false)
	}
}
