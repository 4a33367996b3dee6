package qcow2_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// header is a minimal valid version 3 image: header, reference count table, L1 table, no data.
func header() []byte {
	b := make([]byte, 4<<16)
	be := binary.BigEndian
	copy(b, "QFI\xfb")
	be.PutUint32(b[4:], 3)
	be.PutUint32(b[20:], 16)
	be.PutUint64(b[24:], 1<<30)
	be.PutUint32(b[36:], 2)
	be.PutUint64(b[40:], 3<<16)
	be.PutUint64(b[48:], 1<<16)
	be.PutUint32(b[56:], 1)
	be.PutUint32(b[96:], 4)
	be.PutUint32(b[100:], 104)
	return b
}

func check(b []byte) error {
	q, err := qcow2.Parse(b[:min(len(b), qcow2.HeadSize)])
	if err != nil {
		return err
	}
	return q.Check(bytes.NewReader(b), int64(len(b)))
}

func TestQCOW2(t *testing.T) {
	be := binary.BigEndian
	u32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { be.PutUint32(b[off:], v); return b }
	}
	u64 := func(off int, v uint64) func([]byte) []byte {
		return func(b []byte) []byte { be.PutUint64(b[off:], v); return b }
	}
	cut := func(n int) func([]byte) []byte { return func(b []byte) []byte { return b[:n] } }
	both := func(f, g func([]byte) []byte) func([]byte) []byte { return func(b []byte) []byte { return g(f(b)) } }
	const ok = errdefs.Class(-1)
	for name, c := range map[string]struct {
		change func([]byte) []byte
		class  errdefs.Class
		says   string
	}{
		"sound":                 {cut(4 << 16), ok, ""},
		"version 2":             {u32(4, 2), ok, ""},
		"dirty":                 {u64(72, 1), ok, ""},
		"snapshots":             {both(u32(60, 1), u64(64, 1<<16)), ok, ""},
		"unknown extension":     {both(u32(104, 0x12345678), u32(108, 8)), ok, ""},
		"no magic":              {u32(0, 0), errdefs.InvalidArgument, "QFI"},
		"version 4":             {u32(4, 4), errdefs.InvalidArgument, "version 4"},
		"empty":                 {cut(4), errdefs.DataLoss, "truncated"},
		"short header":          {cut(80), errdefs.DataLoss, "truncated"},
		"backing file":          {both(u64(8, 1024), u32(16, 11)), errdefs.InvalidArgument, "backing file"},
		"backing offset only":   {u64(8, 1024), errdefs.InvalidArgument, "backing file"},
		"data file bit":         {u64(72, 4), errdefs.InvalidArgument, "another file"},
		"data file extension":   {both(u32(104, 0x44415441), u32(108, 8)), errdefs.InvalidArgument, "data file"},
		"encrypted":             {u32(32, 2), errdefs.InvalidArgument, "encrypted"},
		"encryption extension":  {both(u32(104, 0x0537be77), u32(108, 16)), errdefs.InvalidArgument, "encrypted"},
		"corrupt bit":           {u64(72, 2), errdefs.DataLoss, "corrupt"},
		"unknown feature":       {u64(72, 1<<40), errdefs.InvalidArgument, "features"},
		"unknown compression":   {both(u64(72, 8), both(u32(100, 112), func(b []byte) []byte { b[104] = 9; return b })), errdefs.InvalidArgument, "method 9"},
		"no size":               {u64(24, 0), errdefs.InvalidArgument, "0 bytes"},
		"absurd size":           {u64(24, 1<<47), errdefs.InvalidArgument, "64 TiB"},
		"negative size":         {u64(24, 1<<63), errdefs.InvalidArgument, "64 TiB"},
		"tiny clusters":         {u32(20, 8), errdefs.InvalidArgument, "clusters"},
		"huge clusters":         {u32(20, 63), errdefs.InvalidArgument, "clusters"},
		"short L1":              {u32(36, 1), errdefs.InvalidArgument, "L1"},
		"huge L1":               {u32(36, 1<<31), errdefs.InvalidArgument, "L1"},
		"L1 outside":            {u64(40, 5<<16), errdefs.DataLoss, "L1"},
		"L1 far outside":        {u64(40, 0xffffffffffff0000), errdefs.DataLoss, "L1"},
		"L1 unaligned":          {u64(40, 3<<16+8), errdefs.InvalidArgument, "impossible"},
		"refcounts outside":     {u64(48, 7<<16), errdefs.DataLoss, "reference count"},
		"refcounts far outside": {u64(48, 0x8000000000000000), errdefs.DataLoss, "reference count"},
		"huge refcounts":        {u32(56, 1<<30), errdefs.InvalidArgument, "reference count"},
		"refcount width":        {u32(96, 7), errdefs.InvalidArgument, "reference counts"},
		"header length":         {u32(100, 1<<20), errdefs.InvalidArgument, "header"},
		"extension length":      {both(u32(104, 1), u32(108, 0xffffffff)), errdefs.InvalidArgument, "extension"},
		"many snapshots":        {u32(60, 1<<20), errdefs.InvalidArgument, "snapshots"},
		"snapshots outside":     {both(u32(60, 1), u64(64, 9<<16)), errdefs.DataLoss, "snapshot"},
		"L2 outside":            {u64(3<<16, 9<<16), errdefs.DataLoss, "L2"},
		"L2 twice":              {both(u64(3<<16, 2<<16), u64(3<<16+8, 2<<16)), errdefs.DataLoss, "twice"},
		"data outside":          {both(u64(3<<16, 2<<16), u64(2<<16, 9<<16)), errdefs.DataLoss, "data"},
		"data unaligned":        {both(u64(3<<16, 2<<16), u64(2<<16, 512)), errdefs.DataLoss, "middle"},
		"compressed outside":    {both(u64(3<<16, 2<<16), u64(2<<16, 1<<62|9<<16)), errdefs.DataLoss, "compressed"},
		"compressed too long":   {both(u64(3<<16, 2<<16), u64(2<<16, 1<<62|0xff<<54|3<<16)), errdefs.DataLoss, "compressed"},
		"data many times": {both(u64(3<<16, 2<<16), func(b []byte) []byte {
			for n := range 100 {
				be.PutUint64(b[2<<16+8*n:], 1<<63|1<<16)
			}
			return b
		}), errdefs.DataLoss, "more clusters"},
		"zero cluster": {both(u64(3<<16, 2<<16), u64(2<<16, 1)), ok, ""},
		"data inside":  {both(u64(3<<16, 2<<16), u64(2<<16, 1<<63|1<<16)), ok, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := check(c.change(header()))
			if c.class == ok {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
		})
	}
}

// TestImagesOfQEMU lets QEMU make images and cuts them everywhere: complete ones pass, those that lack data do not.
func TestImagesOfQEMU(t *testing.T) {
	need.Tool(t, "qemu-img")
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	content := bytes.Repeat([]byte("0123456789abcde\n"), 1<<17) // 2 MiB
	if err := os.WriteFile(raw, append(content, make([]byte, 5<<20+512)...), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, opts := range []string{"", "-o compat=0.10", "-c", "-c -o compression_type=zstd", "-o extended_l2=on,cluster_size=64k", "-o cluster_size=512", "-o cluster_size=2M", "-o preallocation=metadata", "-o refcount_bits=1", "-o lazy_refcounts=on"} {
		t.Run(opts, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "qcow2")
			args := append(append([]string{"convert", "-O", "qcow2"}, strings.Fields(opts)...), raw, out)
			if msg, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
				t.Fatalf("%s", msg)
			}
			data, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			if err := check(data); err != nil {
				t.Errorf("whole: %v", err)
			}
			for _, n := range []int{100, len(data) / 4, len(data) / 2} {
				if opts == "-o preallocation=metadata" && n > 1<<20 {
					continue // only zeros are lost
				}
				if err := check(data[:n]); err == nil {
					t.Errorf("cut to %d of %d bytes: accepted", n, len(data))
				}
			}
		})
	}
}

func TestOverlay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "o.qcow2")
	for name, o := range map[string]qcow2.Overlay{
		"no size":   {0, "/b", vm.DiskRaw},
		"odd size":  {513, "/b", vm.DiskRaw},
		"too large": {qcow2.MaxVirtualSize + 512, "/b", vm.DiskRaw},
		"relative":  {512, "b", vm.DiskRaw},
		"long name": {512, "/" + strings.Repeat("x", 1023), vm.DiskRaw},
	} {
		if err := o.Create(path); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	stale := filepath.Join(filepath.Dir(path), ".o.qcow2.tmp-1")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (qcow2.Overlay{VirtualSize: qcow2.MaxVirtualSize, Backing: "/b", BackingFormat: vm.DiskRaw}).Create(path); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("there is more than the overlay: %v", left)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := qcow2.Parse(data); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "backing file") {
		t.Errorf("our own overlay would be imported: %v", err)
	}
	if h, err := qcow2.ReadLayer(bytes.NewReader(data), int64(len(data))); err != nil || h.VirtualSize != qcow2.MaxVirtualSize {
		t.Errorf("our own overlay is no layer: %d bytes, %v", h.VirtualSize, err)
	}
	copy(data[8:20], make([]byte, 12))
	if err := check(data); err != nil {
		t.Errorf("apart from its backing file our overlay is not sound: %v", err)
	}
}

func BenchmarkOverlay(b *testing.B) {
	dir := b.TempDir()
	o := qcow2.Overlay{VirtualSize: 10 << 30, Backing: "/b", BackingFormat: vm.DiskRaw}
	for b.Loop() {
		path := filepath.Join(dir, "o")
		if err := o.Create(path); err != nil {
			b.Fatal(err)
		}
		if err := os.Remove(path); err != nil {
			b.Fatal(err)
		}
	}
}

// FuzzQCOW2 passes any bytes to the parser and the checker: they accept them or return a classified error, and never read
// beyond the end.
func FuzzQCOW2(f *testing.F) {
	f.Add(header())
	v2 := header()
	binary.BigEndian.PutUint32(v2[4:], 2)
	f.Add(v2[:1024])
	tables := header()
	binary.BigEndian.PutUint64(tables[3<<16:], 2<<16)
	binary.BigEndian.PutUint64(tables[2<<16:], 1<<62|1<<16)
	f.Add(tables)
	small := header()[:4<<9]
	binary.BigEndian.PutUint32(small[20:], 9)
	f.Add(small)
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := check(b); err != nil && errdefs.ClassOf(err) == errdefs.Internal {
			t.Errorf("unclassified: %v", err)
		}
	})
}
