package sparse

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const deltaBlocks = 200 // not a multiple of 64, nor of 8

// newDelta makes a base, a delta to it, and the expected combined content.
func newDelta(t *testing.T, seed uint64) (f, base *os.File, want []byte) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 1))
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		if err := f.Truncate(deltaBlocks * Block); err != nil {
			t.Fatal(err)
		}
		return f
	}
	f, base = open("delta"), open("base")
	want = make([]byte, deltaBlocks*Block)
	own := NewPages(int64(len(want)))
	block := func(n int64, to *os.File, fill byte, seen bool) {
		b := bytes.Repeat([]byte{fill}, Block)
		if _, err := to.WriteAt(b, n*Block); err != nil {
			t.Fatal(err)
		}
		if seen {
			copy(want[n*Block:], b)
		}
	}
	for n := int64(0); n < deltaBlocks; n++ {
		run := random.IntN(6) // a few blocks in a row are treated alike
		for ; n < deltaBlocks-1 && random.IntN(4) > 0; n++ {
			mix(n, run, own, f, base, block)
		}
		mix(n, run, own, f, base, block)
	}
	if err := EndDelta(f, int64(len(want)), own); err != nil {
		t.Fatal(err)
	}
	return f, base, want
}

func mix(n int64, how int, own Pages, f, base *os.File, block func(int64, *os.File, byte, bool)) {
	switch how {
	case 0: // zero in both
	case 1:
		block(n, base, 'b', true)
	case 2:
		block(n, f, 'd', true)
		own.Set(n)
	case 3:
		block(n, base, 'b', false)
		block(n, f, 'd', true)
		own.Set(n)
	case 4: // becomes zero
		block(n, base, 'b', false)
		own.Set(n)
	case 5: // an earlier write of the delta that does not count
		block(n, f, 'd', false)
		block(n, base, 'b', true)
	}
}

func TestDelta(t *testing.T) {
	for seed := range uint64(20) {
		d, base, want := newDelta(t, seed)
		f, err := NewDelta(d, base)
		if err != nil {
			t.Fatal(err)
		}
		if f.Size() != int64(len(want)) {
			t.Fatalf("size %d", f.Size())
		}
		random := rand.New(rand.NewPCG(seed, 2))
		for range 100 {
			off := random.IntN(len(want))
			p := make([]byte, random.IntN(20*Block))
			n, err := f.ReadAt(p, int64(off))
			short := off+len(p) > len(want)
			if !bytes.Equal(p[:n], want[off:min(off+len(p), len(want))]) || short != errors.Is(err, io.EOF) || !short && err != nil {
				t.Fatalf("seed %d: %d of %d bytes at %d, %v", seed, n, len(p), off, err)
			}
		}
		m, err := f.Extents()
		if err != nil || Check(m, f.Size()) != nil {
			t.Fatalf("extents %v, %v", m, err)
		}
		data := NewPages(f.Size())
		data.Add(m)
		for n := range int64(deltaBlocks) {
			if data.Has(n) == IsZero(want[n*Block:(n+1)*Block]) {
				t.Fatalf("seed %d: block %d has data: %t", seed, n, data.Has(n))
			}
		}
		out, err := os.Create(filepath.Join(t.TempDir(), "whole"))
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(CopyData(t.Context(), out, f), out.Close())
		if got, rerr := os.ReadFile(out.Name()); err != nil || rerr != nil || !bytes.Equal(got, want) {
			t.Fatalf("the copy is another: %v, %v", err, rerr)
		}
	}
}

func TestDeltaDamaged(t *testing.T) {
	spoil := func(name string, how func(f, base *os.File) error) {
		t.Run(name, func(t *testing.T) {
			f, base, _ := newDelta(t, 3)
			if err := how(f, base); err != nil {
				t.Fatal(err)
			}
			if _, err := NewDelta(f, base); !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("NewDelta: %v", err)
			}
		})
	}
	end := DeltaSize(deltaBlocks * Block)
	write := func(at int64) func(f, _ *os.File) error {
		return func(f, _ *os.File) error { _, err := f.WriteAt([]byte{0xa5}, at); return err }
	}
	spoil("bits", write(deltaBlocks*Block+1))
	spoil("magic", write(end-deltaTrailer))
	spoil("size", write(end-deltaTrailer+9))
	spoil("sum", write(end-8))
	spoil("last byte", write(end-1))
	spoil("shorter", func(f, _ *os.File) error { return f.Truncate(end - 1) })
	spoil("longer", func(f, _ *os.File) error { return f.Truncate(end + 1) })
	spoil("other base", func(_, base *os.File) error { return base.Truncate((deltaBlocks + 1) * Block) })
	spoil("odd base", func(_, base *os.File) error { return base.Truncate(deltaBlocks*Block + 1) })
	spoil("no base", func(_, base *os.File) error { return base.Truncate(0) })
}

func FuzzParseMap(f *testing.F) {
	own := NewPages(9 * Block)
	own.Set(0)
	own.Set(8)
	f.Add(encodeMap(9*Block, own), int64(9*Block))
	f.Add([]byte{}, int64(0))
	f.Add(encodeMap(0, nil), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		own, err := parseMap(b, size)
		if err != nil {
			return
		}
		if !bytes.Equal(encodeMap(size, own), b) || own.Count() > size/Block {
			t.Errorf("%d of %d blocks of %d bytes", own.Count(), size/Block, size)
		}
		for _, e := range own.Extents(size) {
			if e.End() > size {
				t.Errorf("extent %v of %d bytes", e, size)
			}
		}
	})
}
