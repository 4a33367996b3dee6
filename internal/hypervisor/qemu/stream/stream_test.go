package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// writer builds a stream in QEMU's format.
type writer struct{ bytes.Buffer }

func (w *writer) b(b ...byte) *writer  { w.Write(b); return w }
func (w *writer) u32(v uint32) *writer { return w.b(binary.BigEndian.AppendUint32(nil, v)...) }
func (w *writer) u64(v uint64) *writer { return w.b(binary.BigEndian.AppendUint64(nil, v)...) }
func (w *writer) str(s string) *writer { return w.b(byte(len(s))).b([]byte(s)...) }
func (w *writer) end() *writer         { return w.u64(flagEnd).b(sectionFooter).u32(2) }

func page(fill byte) []byte { return bytes.Repeat([]byte{fill}, PageSize) }

func (w *writer) head() *writer {
	const machine = "pc-q35-7.2"
	w.u32(magic).u32(version).b(configuration).u32(uint32(len(machine))).b([]byte(machine)...)
	w.b(sectionStart).u32(2).str("ram").u32(0).u32(4)
	w.u64(5*PageSize | flagSizes).str("mem").u64(4 * PageSize).str("bios").u64(PageSize)
	return w.end()
}

const devices = "\x04devices as they are\x00\x06and their description"

// whole returns a stream with everything that the parser knows.
func whole() []byte {
	w := new(writer).head()
	w.b(sectionPart).u32(2)
	w.u64(0 | flagPage).str("mem").b(page('a')...)
	w.u64(1*PageSize | flagPage | flagContinue).b(page('b')...)
	w.u64(2*PageSize | flagZero | flagContinue).b(0)
	w.u64(0 | flagPage).str("bios").b(page('r')...)
	w.end()
	w.b(sectionPart).u32(2).end() // a section without new pages
	w.b(sectionPart).u32(2)
	w.u64(3*PageSize | flagPage).str("mem").b(page('d')...)
	w.u64(1*PageSize | flagZero | flagContinue).b(0) // page b is zero now
	w.end()
	w.b(sectionEnd).u32(2)
	w.u64(2*PageSize | flagPage | flagContinue).b(page('c')...) // the block is that of the previous section
	w.u64(0 | flagZero).str("bios").b(0)
	w.end()
	return w.b([]byte(devices)...).Bytes()
}

// rest returns the part of whole that is not the guest's memory.
func rest() []byte {
	w := new(writer).head()
	w.b(sectionPart).u32(2).u64(0 | flagPage).str("bios").b(page('r')...).end()
	w.b(sectionEnd).u32(2).u64(0 | flagZero).str("bios").b(0).end()
	return w.b([]byte(devices)...).Bytes()
}

func newFile(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestSplit(t *testing.T) {
	f := newFile(t)
	m := NewFile(f, nil)
	var state bytes.Buffer
	machine, err := Split(bytes.NewReader(whole()), "mem", m, &state)
	if err != nil || machine != "pc-q35-7.2" {
		t.Fatalf("Split = %q, %v", machine, err)
	}
	if !bytes.Equal(state.Bytes(), rest()) {
		t.Errorf("the rest is %q", state.Bytes())
	}
	w, err := m.Finish()
	if d := diff.Of(Written{Used: 3 * PageSize}, w); err != nil || d != "" {
		t.Errorf("Finish: %v, %s", err, d)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Join([][]byte{page('a'), page(0), page('c'), page('d')}, nil)
	if !bytes.Equal(got, want) {
		t.Errorf("memory of %d bytes is not as saved", len(got))
	}
}

func TestSplitOfRest(t *testing.T) {
	var again bytes.Buffer
	if _, err := Split(bytes.NewReader(rest()), "mem", NewFile(newFile(t), nil), &again); err != nil || !bytes.Equal(again.Bytes(), rest()) {
		t.Errorf("what Split writes it does not read: %v", err)
	}
}

func TestSplitCut(t *testing.T) {
	all := whole()
	end := len(all) - len(devices) + 1 // from here on the content is passed through unread
	for n := range end {
		if n > 200 && n < end-200 && n%97 != 0 {
			continue
		}
		_, err := Split(bytes.NewReader(all[:n]), "mem", NewFile(newFile(t), nil), io.Discard)
		if !errdefs.Is(err, errdefs.DataLoss) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
}

func TestSplitRefuses(t *testing.T) {
	tests := []struct {
		name  string
		in    *writer
		class errdefs.Class
	}{
		{"text", new(writer).b([]byte("#!/bin/sh\n")...), errdefs.DataLoss},
		{"version", new(writer).u32(magic).u32(2).b(configuration), errdefs.Unsupported},
		{"no machine", new(writer).u32(magic).u32(version).b(sectionStart), errdefs.Unsupported},
		{"long machine", new(writer).u32(magic).u32(version).b(configuration).u32(1 << 30), errdefs.DataLoss},
		{"devices only", new(writer).u32(magic).u32(version).b(configuration).u32(0).b(sectionFull), errdefs.DataLoss},
		{"other section", new(writer).u32(magic).u32(version).b(configuration).u32(0).b(sectionStart).u32(1).str("block").u32(0).u32(1), errdefs.Unsupported},
		{"second section", new(writer).head().b(sectionStart).u32(3).str("block").u32(0).u32(1), errdefs.Unsupported},
		{"command", new(writer).head().b(8), errdefs.Unsupported},
		{"beyond the end", new(writer).head().b(sectionPart).u32(2).u64(4*PageSize | flagPage).str("mem"), errdefs.DataLoss},
		{"negative", new(writer).head().b(sectionPart).u32(2).u64(1<<63 | flagPage).str("mem"), errdefs.DataLoss},
		{"unknown block", new(writer).head().b(sectionPart).u32(2).u64(flagPage).str("vga"), errdefs.DataLoss},
		{"no block", new(writer).head().b(sectionPart).u32(2).u64(flagPage | flagContinue), errdefs.DataLoss},
		{"xbzrle", new(writer).head().b(sectionPart).u32(2).u64(0x40).str("mem"), errdefs.Unsupported},
		{"compressed", new(writer).head().b(sectionPart).u32(2).u64(0x100).str("mem"), errdefs.Unsupported},
		{"filled", new(writer).head().b(sectionPart).u32(2).u64(flagZero).str("mem").b(7), errdefs.Unsupported},
		{"sizes again", new(writer).head().b(sectionPart).u32(2).u64(PageSize | flagSizes), errdefs.DataLoss},
		{"no end", new(writer).head().b(sectionPart).u32(2).u64(flagEnd).b(0), errdefs.DataLoss},
		{"other end", new(writer).head().b(sectionPart).u32(2).u64(flagEnd).b(sectionFooter).u32(9), errdefs.DataLoss},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Split(&tt.in.Buffer, "mem", NewFile(newFile(t), nil), io.Discard)
			if !errdefs.Is(err, tt.class) {
				t.Errorf("%v (%v), want %v", err, errdefs.ClassOf(err), tt.class)
			}
		})
	}
	t.Run("no such memory", func(t *testing.T) {
		if _, err := Split(bytes.NewReader(whole()), "pc.ram", NewFile(newFile(t), nil), io.Discard); !errdefs.Is(err, errdefs.Unsupported) {
			t.Error(err)
		}
	})
}

func TestFinishMissesPages(t *testing.T) {
	m := NewFile(newFile(t), nil)
	if _, err := Split(bytes.NewReader(rest()), "mem", m, io.Discard); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Finish(); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "4 of 4 pages") {
		t.Errorf("Finish: %v", err)
	}
}

// TestRuns writes more pages than fit into one run, in an order that interrupts runs.
func TestRuns(t *testing.T) {
	const pages = 3*runLength/PageSize + 5
	f := newFile(t)
	m := NewFile(f, nil)
	if err := m.Size(pages * PageSize); err != nil {
		t.Fatal(err)
	}
	for n := range int64(pages) {
		at := n
		if n < 10 {
			at = 9 - n
		}
		if err := m.Page(at*PageSize, page(byte(at)|1)); err != nil {
			t.Fatal(err)
		}
	}
	if w, err := m.Finish(); err != nil || w.Used != pages*PageSize {
		t.Fatalf("Finish = %+v, %v", w, err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	for n := range pages {
		if got[n*PageSize] != byte(n)|1 || got[(n+1)*PageSize-1] != byte(n)|1 {
			t.Fatalf("page %d is not what was written", n)
		}
	}
}

// pages is a Memory that keeps the pages in memory.
type pages struct {
	size int64
	data map[int64]byte
}

func (p *pages) Size(n int64) error { p.size = n; return nil }

func (p *pages) Page(at int64, data []byte) error {
	if at < 0 || at%PageSize != 0 || at >= p.size || len(data) != PageSize {
		panic("a page that cannot be")
	}
	p.data[at] = data[0]
	return nil
}

func (p *pages) Zero(at int64) error { return p.Page(at, make([]byte, PageSize)) }

func FuzzSplit(f *testing.F) {
	f.Add(whole())
	f.Add(rest())
	f.Add(new(writer).head().b(sectionPart).u32(2).u64(3*PageSize | flagZero).str("mem").b(0).end().b(sectionFull).Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		p := &pages{data: map[int64]byte{}}
		var out bytes.Buffer
		machine, err := Split(bytes.NewReader(data), "mem", p, &out)
		if err != nil {
			if errdefs.ClassOf(err) == errdefs.Internal {
				t.Fatalf("unclassified: %v", err)
			}
			return
		}
		q := &pages{data: map[int64]byte{}}
		var again bytes.Buffer
		machine2, err := Split(bytes.NewReader(out.Bytes()), "mem", q, &again)
		if err != nil || machine != machine2 || p.size != q.size || len(q.data) != 0 || !bytes.Equal(out.Bytes(), again.Bytes()) {
			t.Fatalf("the rest is no stream of its own: %v", err)
		}
	})
}
