package sparse_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

type extents = []sparse.Extent

// holey makes a file of size bytes with pieces of data at the given places.
func holey(t testing.TB, size int64, at ...int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "holey"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, off := range at {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(off>>12) | 1}, sparse.Block), off); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func content(t testing.TB, f *os.File) []byte {
	t.Helper()
	data, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func occupied(t testing.TB, f *os.File) int64 {
	t.Helper()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return sparse.Occupied(info)
}

func TestExtentsTellDataFromHoles(t *testing.T) {
	for name, c := range map[string]struct {
		size int64
		at   []int64
		want extents
	}{
		"empty":      {0, nil, nil},
		"all hole":   {1 << 20, nil, nil},
		"begin":      {1 << 20, []int64{0}, extents{{0, 4096}}},
		"end":        {1 << 20, []int64{1<<20 - 4096}, extents{{1<<20 - 4096, 4096}}},
		"two":        {1 << 30, []int64{1 << 20, 1 << 29}, extents{{1 << 20, 4096}, {1 << 29, 4096}}},
		"neighbours": {1 << 20, []int64{8192, 12288}, extents{{8192, 8192}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := sparse.Extents(holey(t, c.size, c.at...), c.size)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, c.want) && !covers(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// covers reports whether every extent of small lies within one of big: a file system may report data where there are only zeros.
func covers(big, small extents) bool {
	for _, s := range small {
		in := false
		for _, b := range big {
			in = in || b.Offset <= s.Offset && s.End() <= b.End()
		}
		if !in {
			return false
		}
	}
	return true
}

func TestCopyKeepsContentAndHoles(t *testing.T) {
	src := holey(t, 64<<20+100, 0, 1<<20, 5<<20, 64<<20-4096)
	if _, err := src.WriteAt(make([]byte, 4<<20), 20<<20); err != nil { // zeros that are not a hole yet
		t.Fatal(err)
	}
	if _, err := src.WriteAt([]byte("end"), 64<<20+97); err != nil {
		t.Fatal(err)
	}
	dst := holey(t, 0)
	if err := sparse.Copy(t.Context(), dst, src); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(content(t, dst), content(t, src)) {
		t.Error("the copy differs")
	}
	if n := occupied(t, dst); n > occupied(t, src) || n > 1<<20 {
		t.Errorf("the copy occupies %d bytes", n)
	}
}

func TestCopyOfShrunkenFileFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := sparse.CopyFile(t.Context(), path, filepath.Join(t.TempDir(), "none")); !os.IsNotExist(err) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a failed copy left its file")
	}
}

func TestLinkFileLinksOrCopies(t *testing.T) {
	src := holey(t, 1<<20, 4096)
	linked := filepath.Join(filepath.Dir(src.Name()), "linked")
	if err := sparse.LinkFile(t.Context(), linked, src.Name()); err != nil {
		t.Fatal(err)
	}
	a, _ := os.Stat(linked)
	b, _ := src.Stat()
	if !os.SameFile(a, b) {
		t.Error("it is a copy on one file system")
	}
	if err := sparse.LinkFile(t.Context(), linked, src.Name()); !os.IsExist(err) {
		t.Errorf("onto what is there: %v", err)
	}
	other, err := os.MkdirTemp("/dev/shm", "sparse")
	if err != nil {
		t.Skip("no second file system")
	}
	defer os.RemoveAll(other)
	far := filepath.Join(other, "far")
	if err := sparse.LinkFile(t.Context(), far, src.Name()); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(far); !bytes.Equal(got, content(t, src)) {
		t.Error("the copy on another file system differs")
	}
}

func TestWriteAtLeavesZerosOut(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		want := make([]byte, 1+r.IntN(40000))
		for range r.IntN(5) {
			want[r.IntN(len(want))] = 1
		}
		off := int64(r.IntN(10000))
		f := holey(t, off+int64(len(want)))
		if err := sparse.WriteAt(f, want, off); err != nil {
			t.Fatal(err)
		}
		if got := content(t, f)[off:]; !bytes.Equal(got, want) {
			t.Fatalf("%d bytes at %d differ", len(want), off)
		}
	}
}

func TestCheckRefusesImpossibleMaps(t *testing.T) {
	const huge = 1<<63 - 1
	for name, c := range map[string]struct {
		m    extents
		size int64
		says string
	}{
		"negative size":   {nil, -1, "-1 bytes"},
		"negative offset": {extents{{-1, 1}}, 10, "invalid offset"},
		"negative length": {extents{{1, -1}}, 10, "invalid offset"},
		"nothing":         {extents{{1, 0}}, 10, "invalid offset"},
		"beyond":          {extents{{8, 3}}, 10, "beyond"},
		"overflow":        {extents{{8, huge}}, 10, "beyond"},
		"far":             {extents{{huge, 1}}, 10, "beyond"},
		"overlap":         {extents{{0, 5}, {4, 2}}, 10, "before the end"},
		"order":           {extents{{5, 1}, {0, 1}}, 10, "before the end"},
	} {
		if err := sparse.Check(c.m, c.size); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := sparse.Check(extents{{0, 5}, {5, 5}}, 10); err != nil {
		t.Error(err)
	}
}

func TestFitCoversWithinItsLimit(t *testing.T) {
	var m extents
	r := rand.New(rand.NewPCG(3, 4))
	for at := int64(0); len(m) < 5000; {
		at += 4096 * (1 + r.Int64N(100))
		n := 4096 * (1 + r.Int64N(10))
		m = append(m, sparse.Extent{Offset: at, Length: n})
		at += n
	}
	size := m[len(m)-1].End() + 1
	for _, limit := range []int{60, 100, 1000, 100_000, 1 << 20} {
		got := sparse.Fit(m, limit)
		if n := len(sparse.Encode(got)); n > limit {
			t.Errorf("limit %d: %d bytes", limit, n)
		}
		if err := sparse.Check(got, size); err != nil || !covers(got, m) {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
	if got := sparse.Coarsen(extents{{0, 1}, {10, 1}, {12, 1}, {30, 1}}, 3); !reflect.DeepEqual(got, extents{{0, 1}, {10, 3}, {30, 1}}) {
		t.Errorf("it gave up another hole than the smallest: %v", got)
	}
}

func TestWidenPutsZerosBetween(t *testing.T) {
	file := []byte("abc...def.ghi....x")
	data := bytes.ReplaceAll(file, []byte("."), []byte{0})
	m := extents{{0, 3}, {6, 3}, {10, 3}, {17, 1}}
	for n := 1; n <= 4; n++ {
		wide := sparse.Coarsen(m, n)
		got, err := io.ReadAll(sparse.Widen(sparse.Reader(bytes.NewReader(data), m), m, wide))
		want, _ := io.ReadAll(sparse.Reader(bytes.NewReader(data), wide))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d extents: %q, %v; want %q", n, got, err, want)
		}
	}
	short := sparse.Widen(strings.NewReader("ab"), m, m)
	if _, err := io.ReadAll(short); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut data: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`[{"o":0,"l":4096},{"o":8192,"l":1}]`), int64(1<<20))
	f.Add([]byte(`[{"o":9223372036854775807,"l":9223372036854775807}]`), int64(1<<62))
	f.Add([]byte(`null`), int64(0))
	f.Fuzz(func(t *testing.T, data []byte, size int64) {
		m, err := sparse.Parse(data, size)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%v is %v", err, errdefs.ClassOf(err))
			}
			return
		}
		if n := sparse.Data(m); n < 0 || n > size {
			t.Errorf("%d bytes of data in a file of %d", n, size)
		}
		again, err := sparse.Parse(sparse.Encode(m), size)
		if err != nil || len(again) != len(m) {
			t.Errorf("it does not survive encoding: %v", err)
		}
		if fit := sparse.Fit(m, 64); sparse.Check(fit, size) != nil || !covers(fit, m) {
			t.Errorf("%v does not cover %v", fit, m)
		}
	})
}

// What CanClone tells beforehand is what Clone does, and nothing is left of the test.
func TestCanClone(t *testing.T) {
	dir := t.TempDir()
	told := sparse.CanClone(dir, dir)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left are %v, %v", entries, err)
	}
	src, err := os.Create(filepath.Join(dir, "src"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.Create(filepath.Join(dir, "dst"))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if _, err := src.Write(make([]byte, sparse.Block)); err != nil {
		t.Fatal(err)
	}
	if err := sparse.Clone(dst, src); errdefs.ClassOf(err) != errdefs.ClassOf(told) || (err == nil) != (told == nil) {
		t.Errorf("told %v, but it is %v", told, err)
	}
	if err := sparse.CanClone("/proc", dir); !errors.Is(err, errors.ErrUnsupported) || errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("a file system without unnamed files: %v", err)
	}
	if err := sparse.CanClone(dir, filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no such folder: %v", err)
	}
}
