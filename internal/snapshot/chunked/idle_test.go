package chunked_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// idle is a nearly idle VM that is saved again and again: between two saves, a few scattered pages of its memory change.
type idle struct {
	id     vm.ID
	owner  vm.Owner
	random *rand.Rand
	memory string // path of its memory
	size   int64
	saves  int
}

const idlePages = 100 // that change between two saves

// newIdle returns a VM with size bytes of memory, of which about 47 % are data.
func newIdle(t testing.TB, size int64) *idle {
	t.Helper()
	v := &idle{id: vm.NewID(), random: rand.New(rand.NewChaCha8([32]byte{3})), size: size, memory: filepath.Join(t.TempDir(), "memory")}
	f := create(t, v.memory, size)
	words := []byte("the quick brown fox jumps over the lazy dog ")
	for at := int64(0); at < size; at += 64 << 10 {
		block := make([]byte, 64<<10)
		switch kind := v.random.Uint64() % 16; {
		case kind < 7: // a hole
			continue
		case kind < 9: // cannot be compressed
			fill(v.random, block)
		case kind < 14:
			for i := range block {
				block[i] = words[(i*7+int(v.random.Uint64()%3))%len(words)]
			}
		default: // scattered, with zero pages between
			for p := 0; p < len(block); p += 8192 {
				fill(v.random, block[p:p+4096])
			}
		}
		write(t, f, block, at)
	}
	closeFile(t, f)
	return v
}

// run changes pages: most had data, some were zero, and some become zero.
func (v *idle) run(t testing.TB, pages int) {
	t.Helper()
	f, err := os.OpenFile(v.memory, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFile(t, f)
	old, b := make([]byte, sparse.Block), make([]byte, sparse.Block)
	for n := 0; n < pages; {
		at := int64(v.random.Uint64()%uint64(v.size/sparse.Block)) * sparse.Block
		if _, err := f.ReadAt(old, at); err != nil {
			t.Fatal(err)
		}
		if sparse.IsZero(old) && v.random.Uint64()%8 != 0 {
			continue
		}
		if clear(b); v.random.Uint64()%16 != 0 {
			fill(v.random, b)
		}
		write(t, f, b, at)
		n++
	}
}

// save saves the VM in s.
func (v *idle) save(t testing.TB, s *store) snapshot.Held {
	t.Helper()
	ctx := vm.OnBehalf(t.Context(), v.owner)
	v.saves++
	d, err := s.Create(ctx, fmt.Sprintf("save-%d", v.saves))
	if err != nil {
		t.Fatal(err)
	}
	if err := sparse.CopyFile(ctx, filepath.Join(d.Dir(), snapshot.FileMemory), v.memory); err != nil {
		t.Fatal(err)
	}
	state := create(t, filepath.Join(d.Dir(), snapshot.FileState), 0)
	b := make([]byte, 100<<10)
	fill(v.random, b[:10<<10])
	write(t, state, b, 0)
	closeFile(t, state)
	x, err := d.Commit(ctx, snapshot.Snapshot{
		Image: "web:1", ImageDigest: "sha256:" + strings.Repeat("ab", 32), ImageType: vm.ImageOCI, Hypervisor: "qemu", CPU: 1, Memory: v.size, Live: true,
		Source: snapshot.Source{VMID: v.id, VMName: "web"}, CreatedAt: time.Unix(1_700_000_000, 0).UTC(),
	})
	if err != nil {
		t.Fatal(err)
	}
	h, err := s.Hold(ctx, x.ID)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// arrives fails unless a pull of ref has the memory of h.
func arrives(t testing.TB, h snapshot.Held, ref string) {
	t.Helper()
	there := newStore(t)
	got, err := client(t, there, nil).Pull(t.Context(), ref, "x", token, nil)
	if err != nil {
		t.Fatal(err)
	}
	sameMemory(t, h, there.hold(t, got.ID))
}

func sameMemory(t testing.TB, a, b snapshot.Held) {
	t.Helper()
	for _, name := range []string{snapshot.FileMemory, snapshot.FileState} {
		if sum(t, filepath.Join(a.Dir(), name)) != sum(t, filepath.Join(b.Dir(), name)) {
			t.Errorf("%s of %s came back as something else", name, a.Snapshot().Name)
		}
	}
}

// downloads fails unless the tar stream of epoch has the memory of h.
func downloads(t testing.TB, h snapshot.Held, host, repo, tag string) {
	t.Helper()
	there := newStore(t)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/dl/"+repo+"?tag="+tag, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := there.Import(t.Context(), "dl", "", resp.Body, nil)
	if err != nil {
		t.Fatalf("%s: %v", resp.Status, err)
	}
	sameMemory(t, h, there.hold(t, got.ID))
}

// config returns the configuration of a pushed snapshot, and its manifest.
func config(t testing.TB, ref string) (artifact.Config, ociclient.Manifest) {
	t.Helper()
	r, err := ociclient.ParseRef(ref)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ociclient.Open(t.Context(), r, ociclient.Auth{Token: token.Token}, ociclient.Pull, ociclient.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, m, err := s.Image(t.Context(), r.Identifier(), "amd64")
	if err != nil {
		t.Fatal(err)
	}
	b := s.Blob(t.Context(), m.Config.Digest, m.Config.Size)
	defer b.Close()
	raw, err := io.ReadAll(b)
	if err != nil {
		t.Fatal(err)
	}
	c, err := artifact.ParseConfig(raw)
	if err != nil {
		t.Fatal(err)
	}
	return c, m
}

// TestIdleVM checks the promise of at most 10 %: for a second push, a third, and a tenth. Each earlier snapshot is removed
// before the next one is pushed, as when a VM hibernates, wakes, and hibernates again.
func TestIdleVM(t *testing.T) {
	host, s := epoch(t, t.TempDir()), newStore(t)
	c := client(t, s, nil)
	v := newIdle(t, 64<<20)
	ref := host + "/vm/web:latest"
	h := v.save(t, s)
	_, first := push(t, c, h, ref)
	for n := 2; n <= 10; n++ {
		h.Release()
		if err := s.Remove(t.Context(), h.Snapshot().ID); err != nil {
			t.Fatal(err)
		}
		v.run(t, idlePages)
		h = v.save(t, s)
		digest, p := push(t, c, h, ref)
		t.Logf("push %d moved %.2f MiB, %.2f %% of %.1f MiB", n, float64(p.Moved)/(1<<20), 100*float64(p.Moved)/float64(first.Moved), float64(first.Moved)/(1<<20))
		if p.Moved*10 > first.Moved {
			t.Errorf("push %d moved %d bytes, the first %d", n, p.Moved, first.Moved)
		}
		if p.Done != p.Total {
			t.Errorf("the last progress of push %d is %+v", n, p)
		}
		if n == 2 || n == 3 || n == 10 {
			arrives(t, h, ref)
			downloads(t, h, host, "vm/web", "latest")
			if again, p := push(t, c, h, ref); again != digest || p.Moved*10 > first.Moved {
				t.Errorf("pushed again, it is another: %s, %s; %d bytes moved", digest, again, p.Moved)
			}
		}
	}
	h.Release()
}
