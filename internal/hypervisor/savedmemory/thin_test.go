package savedmemory

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// TestThin: memory reads as it was written, alone or as a delta, whichever pages are zero, of the base or its own.
func TestThin(t *testing.T) {
	const pages = 300 // more than one piece, and not a multiple of one
	const size = pages * sparse.Block
	random := rand.New(rand.NewPCG(1, 2))
	fill := func(p []byte) {
		for n := range p {
			p[n] = byte(random.Uint32() | 1)
		}
	}
	for name, shares := range map[string]int{"alone": -1, "similar": 8, "other": 1} {
		base, memory := make([]byte, size), make([]byte, size)
		var full int64
		for n := range pages {
			b, m := base[n*sparse.Block:(n+1)*sparse.Block], memory[n*sparse.Block:(n+1)*sparse.Block]
			if random.IntN(3) > 0 {
				fill(b)
			}
			switch {
			case random.IntN(10) < shares:
				copy(m, b)
			case random.IntN(2) == 0:
				fill(m)
			}
			if !bytes.Equal(m, make([]byte, sparse.Block)) {
				full++
			}
		}
		f, old := thickFile(t, memory), (*os.File)(nil)
		if shares >= 0 {
			old = thickFile(t, base)
		}
		w, err := Thin(t.Context(), f, old, size)
		if err != nil || w.Used != full*sparse.Block || w.Delta != (shares == 8) {
			t.Errorf("%s: %+v, %v, of %d pages", name, w, err, full)
		}
		var read *sparse.File
		if w.Delta {
			read, err = sparse.NewDelta(f, old)
		} else {
			read, err = sparse.NewFile(f)
		}
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, size)
		if _, err := read.ReadAt(got, 0); err != nil || !bytes.Equal(got, memory) {
			t.Errorf("%s: another memory, %v", name, err)
		}
		if info, err := read.Stat(); err != nil || sparse.Occupied(info) >= size {
			t.Errorf("%s: not sparse: %v", name, err)
		}
		_ = read.Close()
	}
	if _, err := Thin(t.Context(), thickFile(t, make([]byte, sparse.Block)), nil, 2*sparse.Block); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("memory that is too short: %v", err)
	}
	other := thickFile(t, make([]byte, sparse.Block))
	if w, err := Thin(t.Context(), thickFile(t, bytes.Repeat([]byte("x"), 2*sparse.Block)), other, 2*sparse.Block); err != nil || w.Delta {
		t.Errorf("the memory of another machine as base: %+v, %v", w, err)
	}
}

func thickFile(t *testing.T, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	return f
}
