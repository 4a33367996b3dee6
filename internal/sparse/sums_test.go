package sparse

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// sumFile makes a file with a checksum file: blocks of data, of zeros and holes, and a last block that is not full.
func sumFile(t *testing.T) (path string, want []byte) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "f")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want = make([]byte, 100*Block+123)
	random := rand.New(rand.NewPCG(1, 2))
	for n := 0; n < len(want); n += Block {
		if b := want[n:min(n+Block, len(want))]; n/Block%10 < 4 || n/Block == 100 {
			for i := range b {
				b[i] = byte(random.Uint32())
			}
			if _, err := f.WriteAt(b, int64(n)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := f.WriteAt(make([]byte, Block), 8*Block); err != nil { // zeros, but not a hole
		t.Fatal(err)
	}
	s, err := SumOf(t.Context(), f)
	if err == nil {
		err = s.Write(path + SumSuffix)
	}
	if err != nil {
		t.Fatal(err)
	}
	if s.Data() != 41*Block || len(s.runs) != 11 {
		t.Errorf("%d bytes of data in %d runs", s.Data(), len(s.runs))
	}
	return path, want
}

func TestSummedFileReadsAsItIs(t *testing.T) {
	path, want := sumFile(t)
	f, err := Open(os.Open, path, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	random := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		off := random.IntN(len(want))
		p := make([]byte, random.IntN(5*Block))
		n, err := f.ReadAt(p, int64(off))
		short := off+len(p) > len(want)
		if !bytes.Equal(p[:n], want[off:min(off+len(p), len(want))]) || short != errors.Is(err, io.EOF) || !short && err != nil {
			t.Fatalf("%d of %d bytes at %d, %v", n, len(p), off, err)
		}
	}
	if _, err := f.Extents(); err != nil {
		t.Error(err)
	}
}

func TestDamageIsFoundAndNamed(t *testing.T) {
	for name, c := range map[string]struct {
		how  func(f *os.File) error
		at   string
		open bool // opening already detects it
	}{
		"a bit":          {how: flip(21*Block + 100), at: "byte 86016"},
		"in zeros":       {how: flip(8 * Block), at: "byte 32768"},
		"in a hole":      {how: flip(5*Block + 7), at: "byte 20480"},
		"at the odd end": {how: flip(100*Block + 122), at: "byte 409600"},
		"a hole": {how: func(f *os.File) error {
			return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 32*Block, 2*Block)
		}, at: "byte 131072"},
		"zeros instead": {how: func(f *os.File) error { _, err := f.WriteAt(make([]byte, Block), 31*Block); return err }, at: "byte 126976"},
		"cut short":     {how: func(f *os.File) error { return f.Truncate(100 * Block) }, at: "instead of", open: true},
		"longer":        {how: func(f *os.File) error { return f.Truncate(102 * Block) }, at: "instead of", open: true},
	} {
		t.Run(name, func(t *testing.T) {
			path, _ := sumFile(t)
			w, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if err := c.how(w); err != nil {
				t.Fatal(err)
			}
			told := func(what string, err error) {
				t.Helper()
				if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), c.at) || !strings.Contains(err.Error(), path) {
					t.Errorf("%s: %v", what, err)
				}
			}
			s, err := ReadSums(path + SumSuffix)
			if err != nil {
				t.Fatal(err)
			}
			told("verified", s.Verify(t.Context(), w))
			f, err := Open(os.Open, path, "", true)
			if c.open {
				told("opened", err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			told("copied", copyOf(t, f))
		})
	}
}

func flip(at int64) func(f *os.File) error {
	return func(f *os.File) error {
		var b [1]byte
		if _, err := f.ReadAt(b[:], at); err != nil {
			return err
		}
		b[0] ^= 4
		_, err := f.WriteAt(b[:], at)
		return err
	}
}

func copyOf(t *testing.T, f *File) error {
	out, err := os.Create(filepath.Join(t.TempDir(), "copy"))
	if err != nil {
		return err
	}
	return errors.Join(CopyData(t.Context(), out, f), out.Close())
}

// TestSummedDelta damages one of the files of a delta.
func TestSummedDelta(t *testing.T) {
	for seed := range uint64(10) {
		d, base, want := newDelta(t, seed)
		for _, f := range []*os.File{d, base} {
			s, err := SumOf(t.Context(), f)
			if err == nil {
				err = s.Write(f.Name() + SumSuffix)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		try := func() error {
			f, err := Open(os.Open, d.Name(), base.Name(), true)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := copyOf(t, f); err != nil {
				return err
			}
			got := make([]byte, len(want))
			if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
				t.Errorf("seed %d: another content, %v", seed, err)
			}
			return nil
		}
		if err := try(); err != nil {
			t.Fatal(err)
		}
		own, _, _ := readMap(d, base)
		if own == nil {
			t.Fatal("no map")
		}
		for n := int64(0); n < deltaBlocks; n += 7 {
			if IsZero(want[n*Block : (n+1)*Block]) {
				continue
			}
			from := base
			if own.Has(n) {
				from = d
			}
			if err := flip(n*Block + 9)(from); err != nil {
				t.Fatal(err)
			}
			if err := try(); !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("seed %d: block %d of %s is another: %v", seed, n, from.Name(), err)
			}
			if err := flip(n*Block + 9)(from); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestDamagedSums(t *testing.T) {
	path, _ := sumFile(t)
	whole, err := os.ReadFile(path + SumSuffix)
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		b := bytes.Clone(whole)
		b[n] ^= 1
		if _, err := parseSums(b); !errdefs.Is(err, errdefs.DataLoss) {
			t.Fatalf("byte %d is another: %v", n, err)
		}
	}
	for n := range len(whole) {
		if _, err := parseSums(whole[:n]); !errdefs.Is(err, errdefs.DataLoss) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	if err := os.Remove(path + SumSuffix); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(os.Open, path, "", true); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("without sums: %v", err)
	}
}

func FuzzParseSums(f *testing.F) {
	s := &Sums{size: 9*Block + 5, runs: []sumRun{{0, 2, 0}, {9, 1, 2}}, of: []uint32{1, 2, 3}}
	f.Add(s.encode())
	f.Add((&Sums{}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseSums(b)
		if err != nil {
			return
		}
		if !bytes.Equal(s.encode(), b) {
			t.Error("another encoding")
		}
		_ = s.check("f", 0, make([]byte, 3*Block))
		_ = s.covered("f", nil)
	})
}

func BenchmarkSums(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "f"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := make([]byte, 64<<20)
	for i := range p {
		p[i] = byte(i * i >> 3)
	}
	if _, err := f.Write(p); err != nil {
		b.Fatal(err)
	}
	s, err := SumOf(context.Background(), f)
	if err != nil {
		b.Fatal(err)
	}
	run := func(name string, do func() error) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			for b.Loop() {
				if err := do(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	run("read", func() error {
		return eachBlock(context.Background(), f, int64(len(p)), func(int64, []byte) error { return nil })
	})
	run("sum", func() error { _, err := SumOf(context.Background(), f); return err })
	run("verify", func() error { return s.Verify(context.Background(), f) })
}
