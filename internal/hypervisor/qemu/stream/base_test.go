package stream

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

const basePages = 1000

// earlier creates the file of an earlier memory, of which a third is holes. It is open for reading.
func earlier(t testing.TB, size int64) (*os.File, []byte) {
	t.Helper()
	f, content := newFile(t), make([]byte, size)
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for n := range size / PageSize {
		if n/7%3 == 0 {
			continue
		}
		copy(content[n*PageSize:], page(byte(n)|1))
		if _, err := f.WriteAt(content[n*PageSize:(n+1)*PageSize], n*PageSize); err != nil {
			t.Fatal(err)
		}
	}
	return f, content
}

// TestDelta saves memories that differ from an earlier one in more and more pages, in several passes as for a running guest: a
// page may come again, even with its earlier content.
func TestDelta(t *testing.T) {
	const size = basePages * PageSize
	for _, tt := range []struct {
		changed int // of 100 pages
		delta   bool
	}{{0, true}, {3, true}, {30, true}, {90, false}} {
		t.Run(fmt.Sprint(tt.changed), func(t *testing.T) {
			under, content := earlier(t, size)
			random := rand.New(rand.NewPCG(1, uint64(tt.changed)))
			f := newFile(t)
			m := NewFile(f, under)
			if err := m.Size(size); err != nil {
				t.Fatal(err)
			}
			put := func(n int64, p []byte) {
				t.Helper()
				var err error
				if sparse.IsZero(p) {
					err = m.Zero(n * PageSize)
				} else {
					err = m.Page(n*PageSize, p)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			now := bytes.Clone(content)
			for n := range int64(basePages) {
				at := now[n*PageSize : (n+1)*PageSize]
				for pass := random.IntN(4); pass > 0; pass-- { // the final content comes last
					put(n, page(byte(random.IntN(3))))
				}
				if random.IntN(100) < tt.changed {
					copy(at, page(byte(random.IntN(4)*50)))
				}
				put(n, at)
			}
			w, err := m.Finish()
			if err != nil || w.Delta != tt.delta {
				t.Fatalf("Finish = %+v, %v", w, err)
			}
			read, err := sparse.NewFile(f)
			if w.Delta {
				read, err = sparse.NewDelta(f, under)
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(io.NewSectionReader(read, 0, size+1))
			if err != nil || !bytes.Equal(got, now) {
				t.Fatalf("%d bytes are not the memory, %v", len(got), err)
			}
			info, err := f.Stat()
			if err != nil {
				t.Fatal(err)
			}
			if limit := (int64(tt.changed)*2 + 3) * size / 100; w.Delta && sparse.Occupied(info) > limit {
				t.Errorf("the delta of %d pages in a hundred has %d bytes", tt.changed, sparse.Occupied(info))
			}
		})
	}
}

func TestDeltaToOtherSize(t *testing.T) {
	under, _ := earlier(t, 10*PageSize)
	f := newFile(t)
	m := NewFile(f, under)
	if err := m.Size(2 * PageSize); err != nil {
		t.Fatal(err)
	}
	for n := range int64(2) {
		if err := m.Page(n*PageSize, page('x')); err != nil {
			t.Fatal(err)
		}
	}
	if w, err := m.Finish(); err != nil || w.Delta {
		t.Errorf("Finish = %+v, %v", w, err)
	}
}

// TestBaseUnreadable has a base that can no longer be read: the memory must not be filled with zeros instead.
func TestBaseUnreadable(t *testing.T) {
	under, content := earlier(t, basePages*PageSize)
	writer, err := os.OpenFile(filepath.Join(filepath.Dir(under.Name()), "w"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	if err := writer.Truncate(basePages * PageSize); err != nil {
		t.Fatal(err)
	}
	m := NewFile(newFile(t), under)
	if err := m.Size(basePages * PageSize); err != nil {
		t.Fatal(err)
	}
	m.base.f = writer // not open for reading
	if err := m.Page(8*PageSize, content[8*PageSize:9*PageSize]); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("Page: %v", err)
	}
}

func BenchmarkPages(b *testing.B) {
	const size = 64 << 20
	under, content := earlier(b, size)
	for _, bb := range []struct {
		name  string
		under *os.File
	}{{"whole", nil}, {"same", under}} {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				f := newFile(b)
				m := NewFile(f, bb.under)
				if err := m.Size(size); err != nil {
					b.Fatal(err)
				}
				for at := int64(0); at < size; at += PageSize {
					var err error
					if p := content[at : at+PageSize]; p[0] == 0 {
						err = m.Zero(at)
					} else {
						err = m.Page(at, p)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				if _, err := m.Finish(); err != nil {
					b.Fatal(err)
				}
				_ = f.Close()
			}
		})
	}
}
