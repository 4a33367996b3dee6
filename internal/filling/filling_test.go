package filling

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

const size = 64 * sparse.Block

func extent(page, pages int64) sparse.Extent {
	return sparse.Extent{Offset: page * sparse.Block, Length: pages * sparse.Block}
}

// reader is a reader of a file.
type reader struct {
	net.Conn
	Decoder
}

func serve(t *testing.T, w *Writer) (dial func() *reader) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- w.Serve(t.Context(), l) }()
	t.Cleanup(func() {
		_ = l.Close()
		if err := <-ended; err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return func() *reader {
		conn, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return &reader{Conn: conn, Decoder: Decoder{Size: size}}
	}
}

// hear reads until the parts that were heard have so many pages.
func (r *reader) hear(t *testing.T, pages int64) (parts []sparse.Extent, err error) {
	t.Helper()
	for buf := make([]byte, 7); sparse.Data(parts) < pages*sparse.Block; {
		n, err := r.Read(buf)
		if err != nil {
			return parts, err
		}
		more, err := r.Decode(buf[:n])
		parts = append(parts, more...)
		if err != nil {
			return parts, err
		}
	}
	return parts, nil
}

func TestWriter(t *testing.T) {
	w := NewWriter(size, []sparse.Extent{extent(4, 4), extent(60, 4)})
	dial := serve(t, w)
	first := dial()
	got, err := first.hear(t, 56)
	if d := diff.Of([]sparse.Extent{extent(0, 4), extent(8, 52)}, got); err != nil || d != "" {
		t.Fatalf("%v: %s", err, d)
	}
	for _, page := range []int64{8, 61, 5} { // the first is there
		if _, err := first.Write(Want(page * sparse.Block)); err != nil {
			t.Fatal(err)
		}
	}
	var wanted []int64
	for len(wanted) < 2 {
		<-w.Wants()
		for at, ok := w.Wanted(); ok; at, ok = w.Wanted() {
			wanted = append(wanted, at/sparse.Block)
		}
	}
	if len(wanted) != 2 || wanted[0]+wanted[1] != 66 {
		t.Errorf("pages %v are wanted", wanted)
	}
	w.Put(extent(5, 1))
	second := dial()
	if got, err := second.hear(t, 57); err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	for _, e := range []sparse.Extent{extent(4, 1), extent(6, 2), extent(60, 4)} {
		w.Put(e)
	}
	for _, r := range []*reader{first, second} {
		if _, err := r.hear(t, 7); err != nil {
			t.Fatal(err)
		}
	}
	if n := w.Readers(); n != 2 {
		t.Errorf("%d readers", n)
	}
	_ = first.Close()
	_ = second.Close()
	w.Alone(t.Context())
	if n := w.Readers(); n != 0 {
		t.Errorf("%d readers", n)
	}
}

func TestFail(t *testing.T) {
	w := NewWriter(size, []sparse.Extent{extent(1, 1)})
	dial := serve(t, w)
	early := dial()
	if _, err := early.hear(t, 63); err != nil {
		t.Fatal(err)
	}
	w.Fail(errors.New("the registry has\nwrong \x1bbytes " + strings.Repeat("x", 2*maxReason)))
	for _, r := range []*reader{early, dial()} {
		_, err := r.hear(t, size)
		if !errdefs.Is(err, errdefs.DataLoss) || !strings.HasPrefix(err.Error(), "the registry has wrong  bytes xxx") || len(err.Error()) > maxReason {
			t.Errorf("%v", err)
		}
		if n, err := io.Copy(io.Discard, r); n != 0 || err != nil {
			t.Errorf("then %d bytes, %v", n, err)
		}
	}
}

// A reader that asks for nonsense is hung up on.
func TestForeignReader(t *testing.T) {
	w := NewWriter(size, []sparse.Extent{extent(1, 1)})
	r := serve(t, w)()
	if _, err := r.Write(Want(size)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.hear(t, size); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if at, ok := w.Wanted(); ok {
		t.Errorf("%d is wanted", at)
	}
}

// FuzzDecode: whatever a reader is told, and in which pieces, each part is in the file, and a reason is one short line.
func FuzzDecode(f *testing.F) {
	f.Add(encodePart(extent(1, 2)), uint8(5))
	f.Add(append(encodePart(extent(0, 64)), encodeReason("no\nmore")...), uint8(17))
	f.Add(encodePart(extent(64, 1)), uint8(16))
	f.Fuzz(func(t *testing.T, data []byte, step uint8) {
		d := Decoder{Size: size}
		for n := max(1, int(step)); len(data) > 0; data = data[min(n, len(data)):] {
			parts, err := d.Decode(data[:min(n, len(data))])
			for _, e := range parts {
				if e.Offset < 0 || e.Length <= 0 || e.End() > size || (e.Offset|e.Length)%sparse.Block != 0 {
					t.Fatalf("part %+v", e)
				}
			}
			if err != nil {
				if len(err.Error()) > maxReason+100 || strings.ContainsAny(err.Error(), "\n\x1b") {
					t.Fatalf("%q", err)
				}
				return
			}
		}
	})
}
