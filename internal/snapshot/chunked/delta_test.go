package chunked_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestDelta pushes memory that is stored as a delta to another snapshot. It arrives whole, and data that the registry
// has from the other snapshot is not sent again.
func TestDelta(t *testing.T) {
	here, there := newStore(t), newStore(t)
	first := here.save(t, guest{name: "first", seed: 1})
	host := epoch(t, t.TempDir())
	_, all := push(t, client(t, here, nil), first, host+"/vm/web:v1")

	size := first.Snapshot().Memory
	d, err := here.Create(t.Context(), "second")
	if err != nil {
		t.Fatal(err)
	}
	base, err := d.Base(t.Context(), first.Snapshot().ID)
	if err != nil || base == "" {
		t.Fatalf("Base = %q, %v", base, err)
	}
	memory, own := create(t, filepath.Join(d.Dir(), snapshot.FileMemory), size), sparse.NewPages(size)
	page := make([]byte, sparse.Block)
	fill(rand.New(rand.NewPCG(1, 2)), page)
	write(t, memory, page, 100*sparse.Block)
	own.Set(100)
	own.Set(200) // zero now
	if err := sparse.EndDelta(memory, size, own); err != nil {
		t.Fatal(err)
	}
	closeFile(t, memory)
	closeFile(t, create(t, filepath.Join(d.Dir(), snapshot.FileState), 4096))
	_, err = d.Commit(t.Context(), snapshot.Snapshot{
		Image: "web:1", ImageDigest: "sha256:" + strings.Repeat("ab", 32), ImageType: vm.ImageOCI, Hypervisor: "qemu", CPU: 1, Memory: size, Live: true, MemoryBase: base,
	})
	if err != nil {
		t.Fatal(err)
	}
	second := here.hold(t, "second")

	want, err := os.ReadFile(filepath.Join(first.Dir(), snapshot.FileMemory))
	if err != nil {
		t.Fatal(err)
	}
	copy(want[100*sparse.Block:], page)
	clear(want[200*sparse.Block : 201*sparse.Block])
	var digests []string
	for _, change := range []func(*chunked.Config){nil, nil, func(c *chunked.Config) { c.Whole = true }} { // the second from the index
		ref := host + "/vm/web:v2"
		digest, p := push(t, client(t, here, change), second, ref)
		if digests = append(digests, digest); change == nil && p.Moved*4 > all.Moved {
			t.Errorf("%d bytes were sent where the first push sent %d", p.Moved, all.Moved)
		}
		got, _ := pull(t, client(t, there, nil), there, ref, "p"+string(rune('a'+len(digests))))
		f, err := os.Open(filepath.Join(got.Dir(), snapshot.FileMemory))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(f)
		closeFile(t, f)
		if err != nil || !bytes.Equal(b, want) || got.Snapshot().MemoryBase != "" {
			t.Errorf("push %d arrives as %d bytes on %q that are not the memory, %v", len(digests), len(b), got.Snapshot().MemoryBase, err)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("pushed again it is another: %v", digests)
	}
}
