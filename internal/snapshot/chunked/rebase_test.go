package chunked_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	smallIdle  = 16 << 20 // bytes of memory
	smallPages = 25       // that change between two saves
)

// ranged reports whether the memory of a pushed snapshot has ranges of blobs.
func ranged(t testing.TB, ref string) bool {
	t.Helper()
	c, _ := config(t, ref)
	return slices.ContainsFunc(c.Files[snapshot.FileMemory].Chunks, func(c artifact.Chunk) bool { return c.Ranges != nil })
}

// little fails unless a push of the VM's memory moved at most 10 %.
func little(t testing.TB, what string, now, first snapshot.Progress) {
	t.Helper()
	if now.Moved*10 > first.Moved {
		t.Errorf("%s moved %d bytes, the first push %d", what, now.Moved, first.Moved)
	}
}

// TestBlobsThatTheRegistryLost: a push sends the pages of a blob that the registry has no longer, and all of them if it has
// none.
func TestBlobsThatTheRegistryLost(t *testing.T) {
	for name, lost := range map[string]func(n int64) bool{
		"every sixth": func(n int64) bool { return n%6 == 0 },
		"all":         func(int64) bool { return true },
	} {
		t.Run(name, func(t *testing.T) {
			fault := &switchable{}
			host, s := serve(t, fault.wrap), newStore(t)
			c, v, ref := client(t, s, nil), newIdle(t, smallIdle), host+"/vm/web:1"
			_, first := push(t, c, v.save(t, s), ref)
			v.run(t, smallPages)
			h := v.save(t, s)
			var mu sync.Mutex
			gone, n := map[string]bool{}, int64(0)
			fault.set(func(w http.ResponseWriter, r *http.Request) bool {
				mu.Lock()
				defer mu.Unlock()
				digest := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
				if isUpload(r) {
					delete(gone, r.URL.Query().Get("digest"))
				}
				if r.Method != http.MethodHead || !isBlob(r) {
					return false
				}
				if _, asked := gone[digest]; !asked {
					n++
					gone[digest] = lost(n)
				}
				if gone[digest] {
					w.WriteHeader(http.StatusNotFound)
				}
				return gone[digest]
			})
			_, p := push(t, c, h, ref)
			fault.f.Store(nil)
			if name == "all" && p.Moved*2 < first.Moved || name != "all" && p.Moved*2 > first.Moved {
				t.Errorf("the first push moved %d bytes, this one %d", first.Moved, p.Moved)
			}
			arrives(t, h, ref)
		})
	}
}

// TestPushToAnotherRegistry: the blobs of one registry are not those of another, also if the index knows the snapshot by its
// ranges.
func TestPushToAnotherRegistry(t *testing.T) {
	s := newStore(t)
	c, v := client(t, s, nil), newIdle(t, smallIdle)
	one, two := serve(t, nil)+"/vm/web:1", serve(t, nil)+"/vm/web:1"
	push(t, c, v.save(t, s), one)
	v.run(t, smallPages)
	h := v.save(t, s)
	push(t, c, h, one)
	if !ranged(t, one) {
		t.Fatal("the second push has no ranges")
	}
	_, first := push(t, c, h, two)
	arrives(t, h, two)
	v.run(t, smallPages)
	h = v.save(t, s)
	_, p := push(t, c, h, two)
	little(t, "the second push to it", p, first)
	arrives(t, h, two)
}

// TestVMThatMoves: a node that pulled a VM sends little when it pushes it again.
func TestVMThatMoves(t *testing.T) {
	here, there, host := newStore(t), newStore(t), epoch(t, t.TempDir())
	v, ref := newIdle(t, smallIdle), host+"/vm/web:1"
	_, first := push(t, client(t, here, nil), v.save(t, here), ref)
	c := client(t, there, nil)
	pull(t, c, there, ref, "x")
	for range 3 {
		v.id = vm.NewID() // on another node it is another VM
		v.run(t, smallPages)
		h := v.save(t, there)
		_, p := push(t, c, h, ref)
		little(t, "the push from another node", p, first)
		arrives(t, h, ref)
	}
	// The first node pulls what is made of ranges, and has most of it.
	back, p := pull(t, client(t, here, nil), here, ref, "back")
	sameMemory(t, there.hold(t, "save-4"), back)
	if p.Moved > first.Moved*3/2 {
		t.Errorf("%d bytes moved", p.Moved)
	}
	// A pull where all of it is local moves almost nothing.
	_, p = pull(t, c, there, ref, "again")
	if p.Moved > first.Moved {
		t.Errorf("%d bytes moved, the first push moved %d", p.Moved, first.Moved)
	}
}

// TestPushAfterAFailure: a push that failed at its end is the base of the next one as soon as it succeeds.
func TestPushAfterAFailure(t *testing.T) {
	fault := &switchable{}
	host, s := serve(t, fault.wrap), newStore(t)
	c, v, ref := client(t, s, nil), newIdle(t, smallIdle), host+"/vm/web:1"
	h := v.save(t, s)
	fault.set(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") {
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		return false
	})
	var l last
	if _, err := c.Push(t.Context(), h, ref, token, l.tell); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("%v", err)
	}
	fault.f.Store(nil)
	push(t, c, h, ref)
	v.run(t, smallPages)
	h = v.save(t, s)
	_, p := push(t, c, h, ref)
	little(t, "the second push", p, l.p)
	arrives(t, h, ref)
}

// TestOwnersShareNoBase: a push refers only to what its own owner has pushed.
func TestOwnersShareNoBase(t *testing.T) {
	s, host := newStore(t), serve(t, nil)
	c, v, ref := client(t, s, nil), newIdle(t, smallIdle), host+"/vm/web:1"
	for n, owner := range []string{"prod", "dev", "", "prod"} {
		v.owner = vm.Owner{Namespace: owner}
		v.run(t, smallPages)
		push(t, c, v.save(t, s), ref)
		if got := ranged(t, ref); got != (n == 3) {
			t.Errorf("push %d, of %q, has ranges: %v", n, owner, got)
		}
	}
}

// TestOtherMemory: a VM whose memory is all new is pushed in chunks as for the first time.
func TestOtherMemory(t *testing.T) {
	s, host := newStore(t), serve(t, nil)
	c, v := client(t, s, nil), newIdle(t, smallIdle)
	push(t, c, v.save(t, s), host+"/vm/web:1")
	v.run(t, 5000)
	h := v.save(t, s)
	push(t, c, h, host+"/vm/web:2")
	if ranged(t, host+"/vm/web:2") {
		t.Error("it has ranges")
	}
	arrives(t, h, host+"/vm/web:2")
}

// TestDamagedBase: a damaged base is not used.
func TestDamagedBase(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"empty":            func([]byte) []byte { return nil },
		"truncated":        func(b []byte) []byte { return b[:len(b)/2] },
		"longer":           func(b []byte) []byte { return append(b, 0) },
		"flipped hash":     func(b []byte) []byte { b[len(b)-1000] ^= 1; return b },
		"flipped digest":   func(b []byte) []byte { return bytes.Replace(b, []byte(`"d":"sha256:`), []byte(`"d":"sha256;`), 1) },
		"flipped checksum": func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
		"a length of 2^63": func(b []byte) []byte { b[15] |= 0x80; return b },
	} {
		t.Run(name, func(t *testing.T) {
			s, host, dir := newStore(t), serve(t, nil), t.TempDir()
			c, v := client(t, s, func(c *chunked.Config) { c.Index = dir }), newIdle(t, smallIdle)
			_, first := push(t, c, v.save(t, s), host+"/vm/web:1")
			bases, err := filepath.Glob(filepath.Join(dir, "*.base"))
			if err != nil || len(bases) != 1 {
				t.Fatalf("%v, %v", bases, err)
			}
			b, err := os.ReadFile(bases[0])
			if err == nil {
				err = os.WriteFile(bases[0], change(b), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			v.run(t, smallPages)
			h := v.save(t, s)
			push(t, c, h, host+"/vm/web:2")
			if ranged(t, host+"/vm/web:2") {
				t.Error("it was used")
			}
			arrives(t, h, host+"/vm/web:2")
			v.run(t, smallPages)
			_, p := push(t, c, v.save(t, s), host+"/vm/web:3")
			little(t, "the push after it", p, first)
		})
	}
}

// TestWrongRanges: blobs are as their digests say, but their ranges are not those of the memory. The pull finds it.
func TestWrongRanges(t *testing.T) {
	s, host := newStore(t), serve(t, nil)
	c, v, ref := client(t, s, nil), newIdle(t, smallIdle), host+"/vm/web:1"
	push(t, c, v.save(t, s), ref)
	v.run(t, smallPages)
	push(t, c, v.save(t, s), ref)
	cfg, m := config(t, ref)
	chunks := cfg.Files[snapshot.FileMemory].Chunks
	at := slices.IndexFunc(chunks, func(c artifact.Chunk) bool {
		return len(c.Ranges) > 1 && c.Ranges[0].Length == c.Ranges[1].Length
	})
	if at < 0 {
		t.Fatal("no two ranges of one length")
	}
	r := chunks[at].Ranges
	r[0].From, r[1].From = r[1].From, r[0].From
	raw, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.Config.Digest, m.Config.Size = ociclient.Digest(raw), int64(len(raw))
	replace(t, ref, raw, m)
	there := newStore(t)
	if _, err := client(t, there, nil).Pull(t.Context(), ref, "x", token, nil); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("%v", err)
	}
	empty(t, there)
}

// replace pushes another manifest, and its configuration.
func replace(t testing.TB, ref string, config []byte, m ociclient.Manifest) {
	t.Helper()
	s, r := pushing(t, ref)
	raw, err := json.Marshal(m)
	if err == nil {
		err = s.PutBlob(t.Context(), m.Config.Digest, m.Config.Size, func() io.Reader { return bytes.NewReader(config) })
	}
	if err == nil {
		_, err = s.PutManifest(t.Context(), r.Tag, m.MediaType, raw)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestManyPushes: bytes that no file needs any more are at most a quarter of those that it needs, and no push makes up for
// it at once.
func TestManyPushes(t *testing.T) {
	s, host := newStore(t), serve(t, nil)
	c, v, ref := client(t, s, nil), newIdle(t, smallIdle), host+"/vm/web:1"
	h := v.save(t, s)
	_, first := push(t, c, h, ref)
	most := int64(0)
	for range 50 {
		h.Release()
		if err := s.Remove(t.Context(), h.Snapshot().ID); err != nil {
			t.Fatal(err)
		}
		v.run(t, smallPages)
		h = v.save(t, s)
		_, p := push(t, c, h, ref)
		most = max(most, p.Moved)
		cfg, m := config(t, ref)
		f := cfg.Files[snapshot.FileMemory]
		pieces, err := artifact.Pieces(f.Chunks, f.Size)
		if err != nil {
			t.Fatal(err)
		}
		var used, all int64
		for _, p := range pieces {
			used += p.Length
		}
		for _, c := range f.Chunks {
			all += c.Length
		}
		if all*100 > used*126 || len(pieces) > 4096 || len(m.Layers) > 200 {
			t.Errorf("%d bytes of blobs for %d bytes of memory in %d pieces of %d layers", all, used, len(pieces), len(m.Layers))
		}
	}
	arrives(t, h, ref)
	h.Release()
	if most*5 > first.Moved {
		t.Errorf("the first push moved %d bytes, one of the others %d", first.Moved, most)
	}
}

// TestBasesAreBounded removes the oldest bases, and what a crash left.
func TestBasesAreBounded(t *testing.T) {
	s, host, dir := newStore(t), serve(t, nil), t.TempDir()
	c, v := client(t, s, func(c *chunked.Config) { c.Index = dir }), newIdle(t, smallIdle)
	h := v.save(t, s)
	for _, repository := range []string{"a", "b", "c", "d"} {
		push(t, c, h, host+"/vm/"+repository+":1")
	}
	if err := os.WriteFile(filepath.Join(dir, ".base-123"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	names := func() (out []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), "base") {
				out = append(out, e.Name())
			}
		}
		return out
	}
	if got := names(); len(got) != 5 {
		t.Fatalf("%v", got)
	}
	chunked.PruneBases(c, 3, 1<<30)
	if got := names(); len(got) != 3 {
		t.Errorf("%v", got)
	}
	chunked.PruneBases(c, 3, 1000)
	if got := names(); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

// TestUnusableIndex: without hashes of its pages, a snapshot is pushed as without an index.
func TestUnusableIndex(t *testing.T) {
	s, host := newStore(t), serve(t, nil)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c, v := client(t, s, func(c *chunked.Config) { c.Index = path }), newIdle(t, smallIdle)
	h := v.save(t, s)
	push(t, c, h, host+"/vm/web:1")
	arrives(t, h, host+"/vm/web:1")
}

// TestManyPushesAtOnce pushes two snapshots of a VM at the same time.
func TestManyPushesAtOnce(t *testing.T) {
	s, host := newStore(t), epoch(t, t.TempDir())
	c, v := client(t, s, nil), newIdle(t, smallIdle)
	push(t, c, v.save(t, s), host+"/vm/web:0")
	var all []snapshot.Held
	for range 4 {
		v.run(t, smallPages)
		all = append(all, v.save(t, s))
	}
	var wg sync.WaitGroup
	var failed atomic.Int64
	for n, h := range all {
		wg.Go(func() {
			if _, err := c.Push(t.Context(), h, host+"/vm/web:"+string(rune('1'+n)), token, nil); err != nil {
				t.Error(err)
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	for n, h := range all {
		if failed.Load() == 0 {
			arrives(t, h, host+"/vm/web:"+string(rune('1'+n)))
		}
	}
}

// pushing returns a session that pushes to the repository of ref.
func pushing(t testing.TB, ref string) (*ociclient.Session, ociclient.Ref) {
	t.Helper()
	r, err := ociclient.ParseRef(ref)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ociclient.Open(t.Context(), r, ociclient.Auth{}, ociclient.Push, ociclient.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, r
}
