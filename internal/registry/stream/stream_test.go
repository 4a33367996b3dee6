package stream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
)

type file struct{ *bytes.Reader }

func (file) Close() error { return nil }

func source(b []byte) Source {
	return func(context.Context) (io.ReadSeekCloser, error) { return file{bytes.NewReader(b)}, nil }
}

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := range b {
		b[i] = byte(r.IntN(8))
	}
	return b
}

func pack(t testing.TB, b []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

// silent returns a frame that does not state its size.
func silent(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	for len(b) > 0 {
		n := min(len(b), 100)
		if _, err := w.Write(b[:n]); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		b = b[n:]
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestPiecesAreOneFile(t *testing.T) {
	a, b := random(1000), random(300_000)
	pieces := []Piece{Bytes([]byte("head")), Zeros(0), Plain(1000, source(a)), Zeros(77), Unpacked(300_000, source(pack(t, b))), Bytes([]byte("tail"))}
	want := bytes.Join([][]byte{[]byte("head"), a, make([]byte, 77), b, []byte("tail")}, nil)
	s := New(t.Context(), pieces)
	if s.Size() != int64(len(want)) {
		t.Fatalf("%d bytes, want %d", s.Size(), len(want))
	}
	if err := iotest.TestReader(s, want); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, 3, 4, 1003, 1004, 1080, 1081, 1082, 200_000, int64(len(want)) - 4, int64(len(want))} {
		if _, err := s.Seek(at, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(s)
		if err != nil || !bytes.Equal(got, want[at:]) {
			t.Errorf("from %d: %d bytes, %v", at, len(got), err)
		}
	}
}

func TestStreamNeverEndsEarlyOrLate(t *testing.T) {
	b := random(5000)
	packed := pack(t, b)
	for name, p := range map[string]Piece{
		"short":            Plain(5001, source(b)),
		"long":             Plain(4999, source(b)),
		"short unpacked":   Unpacked(5001, source(packed)),
		"long unpacked":    Unpacked(4999, source(packed)),
		"truncated":        Unpacked(5000, source(packed[:len(packed)-5])),
		"not compressed":   Unpacked(5000, source(b)),
		"cannot be open":   {Size: 1, Open: func(context.Context, int64) (io.ReadCloser, error) { return nil, errdefs.NotFoundf("gone") }},
		"fails at its end": Plain(5000, func(context.Context) (io.ReadSeekCloser, error) { return failing{file{bytes.NewReader(b)}}, nil }),
	} {
		got, err := io.ReadAll(New(t.Context(), []Piece{p, Bytes([]byte("more"))}))
		if err == nil || bytes.HasSuffix(got, []byte("more")) {
			t.Errorf("%s: %d bytes without an error", name, len(got))
		}
	}
}

type failing struct{ file }

func (f failing) Read(p []byte) (int, error) {
	n, err := f.file.Read(p)
	if errors.Is(err, io.EOF) {
		err = errors.New("bad disk")
	}
	return n, err
}

func TestUnpackedSize(t *testing.T) {
	a, b := random(100_000), random(400_000)
	skip := append([]byte{0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0}, "abc"...)
	for name, c := range map[string]struct {
		blob []byte
		size int64
	}{
		"one frame":       {pack(t, b), 400_000},
		"without a sum":   {pack(t, b, zstd.WithEncoderCRC(false)), 400_000},
		"two frames":      {append(pack(t, a), pack(t, b)...), 500_000},
		"a frame to skip": {append(append([]byte{}, skip...), pack(t, a)...), 100_000},
		"zeros":           {pack(t, make([]byte, 1<<20)), 1 << 20},
		"silent":          {silent(t, a), 100_000},
		"silent second":   {append(pack(t, b), silent(t, a)...), 500_000},
	} {
		n, err := UnpackedSize(t.Context(), source(c.blob))
		if err != nil || n != c.size {
			t.Errorf("%s: %d, %v; want %d", name, n, err, c.size)
		}
	}
	for name, blob := range map[string][]byte{"empty": {}, "other": a, "cut": pack(t, b)[:5000]} {
		if n, err := UnpackedSize(t.Context(), source(blob)); err == nil {
			t.Errorf("%s: %d without an error", name, n)
		}
	}
}

func FuzzUnpackedSize(f *testing.F) {
	f.Add(pack(f, random(1000)))
	f.Add(silent(f, random(300)))
	f.Add([]byte{0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, blob []byte) {
		if n, err := UnpackedSize(t.Context(), source(blob)); err == nil && n < 0 {
			t.Fatalf("size %d", n)
		}
	})
}
