package bundle_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/bundle"
	"cocoonstack.io/cocoon/internal/sparse"
)

type extents = []sparse.Extent

func header() artifact.TarHeader {
	return artifact.TarHeader{Config: artifact.TarConfig{ID: "x", Name: "n", Hypervisor: "qemu"}, Snapshot: []byte(`{"id":"x"}`)}
}

// stream writes a small stream: a plain file, a sparse one, an empty one.
func stream(t testing.TB, sums bool) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := bundle.NewWriter(&buf, sums)
	if err := w.Header(header()); err != nil {
		t.Fatal(err)
	}
	for _, f := range []struct {
		bundle.File
		data string
	}{
		{bundle.File{Name: "vmstate", Size: 7}, "devices"},
		{bundle.File{Name: "memory-ranges", Size: 1 << 30, Extents: extents{{Offset: 4096, Length: 4}, {Offset: 1 << 20, Length: 6}}}, "pagestable2"},
		{bundle.File{Name: "disk-0.0.raw", Size: 1 << 20, Extents: extents{}}, ""},
		{bundle.File{Name: "empty"}, ""},
	} {
		if err := w.File(f.File, strings.NewReader(f.data[:f.Data()])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// read returns the files of a stream, and the error that ended it unless that is io.EOF.
func read(t testing.TB, r io.Reader) (map[string][]byte, error) {
	t.Helper()
	dir := t.TempDir()
	b := bundle.NewReader(r)
	if _, err := b.Header(); err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for {
		f, err := b.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		file, err := os.Create(filepath.Join(dir, f.Name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.CopyTo(file, nil)
		file.Close()
		if err != nil {
			return out, err
		}
		if out[f.Name], err = os.ReadFile(file.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStreamComesBack(t *testing.T) {
	for _, sums := range []bool{true, false} {
		data := stream(t, sums)
		if _, err := read(t, iotest.DataErrReader(bytes.NewReader(data))); err != nil {
			t.Errorf("an end with the last bytes: %v", err)
		}
		got, err := read(t, iotest.OneByteReader(bytes.NewReader(data)))
		if err != nil {
			t.Fatal(err)
		}
		memory := make([]byte, 1<<20+6)
		copy(memory[4096:], "page")
		copy(memory[1<<20:], "stable")
		for name, want := range map[string][]byte{"vmstate": []byte("devices"), "memory-ranges": memory, "disk-0.0.raw": {}, "empty": {}} {
			if !bytes.Equal(got[name], want) {
				t.Errorf("sums %v: %s has %d bytes, want %d", sums, name, len(got[name]), len(want))
			}
		}
		if len(got) != 4 {
			t.Errorf("there are %d files", len(got))
		}
		h, err := bundle.NewReader(bytes.NewReader(data)).Header()
		if err != nil || h.Version != 1 || h.Config.Name != "n" || string(h.Snapshot) != `{"id":"x"}` {
			t.Errorf("header %+v, %v", h, err)
		}
	}
}

// TestMapThatIsTooLarge has more extents than fit in a tar header.
func TestMapThatIsTooLarge(t *testing.T) {
	var m extents
	for n := range int64(60_000) {
		m = append(m, sparse.Extent{Offset: n * 8192, Length: 16})
	}
	f := bundle.File{Name: "memory-ranges", Size: 60_000 * 8192, Extents: m}
	var buf bytes.Buffer
	w := bundle.NewWriter(&buf, true)
	data := bytes.Repeat([]byte("0123456789abcdef"), len(m))
	if err := errors.Join(w.Header(header()), w.File(f, bytes.NewReader(data)), w.Close()); err != nil {
		t.Fatal(err)
	}
	b := bundle.NewReader(&buf)
	if _, err := b.Header(); err != nil {
		t.Fatal(err)
	}
	got, err := b.Next()
	if err != nil || len(got.Extents) >= len(m) || len(got.Extents) < 10_000 || got.Size != f.Size {
		t.Fatalf("%d extents, %v", len(got.Extents), err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := b.CopyTo(file, nil); err != nil {
		t.Fatal(err)
	}
	page := make([]byte, 16)
	for _, e := range []sparse.Extent{m[0], m[33_333], m[len(m)-1]} {
		if _, err := file.ReadAt(page, e.Offset); err != nil || string(page) != "0123456789abcdef" {
			t.Errorf("byte %d: %q, %v", e.Offset, page, err)
		}
	}
	if info, err := file.Stat(); err != nil || sparse.Occupied(info) > 60_000*4096+64<<20 {
		t.Errorf("it occupies %d bytes, %v: the holes between are gone", sparse.Occupied(info), err)
	}
	if _, err := b.Next(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestWriterRefusesDataThatChanged(t *testing.T) {
	for name, data := range map[string]string{"less": "12", "more": "1234"} {
		w := bundle.NewWriter(io.Discard, true)
		if err := w.File(bundle.File{Name: "f", Size: 3}, strings.NewReader(data)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryTruncationIsNoticed(t *testing.T) {
	for _, sums := range []bool{true, false} {
		data := stream(t, sums)
		end := len(data)
		for end > 0 && data[end-1] == 0 {
			end--
		}
		for n := 0; n < len(data); n += 31 {
			for _, r := range []io.Reader{bytes.NewReader(data[:n]), iotest.DataErrReader(bytes.NewReader(data[:n]))} {
				if _, err := read(t, r); !errdefs.Is(err, errdefs.DataLoss) {
					t.Fatalf("cut to %d of %d bytes: %v", n, len(data), err)
				}
			}
		}
	}
}

func TestEveryFlippedBitOfDataIsNoticed(t *testing.T) {
	data := stream(t, true)
	for _, piece := range []string{"devices", "page", "stable"} {
		bad := bytes.Clone(data)
		bad[bytes.LastIndex(bad[:bytes.LastIndex(bad, []byte("empty"))], []byte(piece))] ^= 1
		if _, err := read(t, bytes.NewReader(bad)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", piece, err)
		}
	}
}

func TestErrorOfTheReaderStays(t *testing.T) {
	data := stream(t, false)
	boom := errdefs.Unavailablef("the network is gone")
	for _, n := range []int{0, 100, 2000, len(data) / 2} {
		r := io.MultiReader(bytes.NewReader(data[:n]), iotest.ErrReader(boom))
		if _, err := read(t, r); !errors.Is(err, boom) || !errdefs.IsUnavailable(err) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
}

func sumOf(s string) string { h := sha256.Sum256([]byte(s)); return hex.EncodeToString(h[:]) }

func TestHostileStreams(t *testing.T) {
	type entry struct {
		tar.Header
		data string
	}
	first := entry{tar.Header{Name: bundle.FileHeader}, `{"version":1,"config":{"id":"x"}}`}
	plain := func(name string) entry { return entry{tar.Header{Name: name}, "x"} }
	pax := func(kv ...string) entry {
		h := tar.Header{Name: "f", PAXRecords: map[string]string{}}
		for i := 0; i < len(kv); i += 2 {
			h.PAXRecords[kv[i]] = kv[i+1]
		}
		return entry{h, "x"}
	}
	mapped := func(m, size string) entry { return pax(artifact.PAXSparseMap, m, artifact.PAXSparseSize, size) }
	for name, c := range map[string]struct {
		entries []entry
		tail    string
		class   errdefs.Class
		says    string
	}{
		"no header":       {[]entry{plain("f")}, "", errdefs.InvalidArgument, "begins with"},
		"bad header":      {[]entry{{first.Header, "{"}}, "", errdefs.InvalidArgument, "record"},
		"other version":   {[]entry{{first.Header, `{"version":2}`}}, "", errdefs.InvalidArgument, "version 2"},
		"absolute":        {[]entry{first, plain("/etc/passwd")}, "", errdefs.InvalidArgument, "/etc/passwd"},
		"upwards":         {[]entry{first, plain("../x")}, "", errdefs.InvalidArgument, "../x"},
		"folder in name":  {[]entry{first, plain("a/b")}, "", errdefs.InvalidArgument, "a/b"},
		"hidden":          {[]entry{first, plain(".x")}, "", errdefs.InvalidArgument, ".x"},
		"long":            {[]entry{first, plain(strings.Repeat("x", 200))}, "", errdefs.InvalidArgument, "invalid name"},
		"link":            {[]entry{first, {tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, ""}}, "", errdefs.InvalidArgument, "regular file"},
		"hard link":       {[]entry{first, {tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "snapshot.json"}, ""}}, "", errdefs.InvalidArgument, "regular file"},
		"device":          {[]entry{first, {tar.Header{Name: "l", Typeflag: tar.TypeBlock}, ""}}, "", errdefs.InvalidArgument, "regular file"},
		"folder":          {[]entry{first, {tar.Header{Name: "d", Typeflag: tar.TypeDir}, ""}}, "", errdefs.InvalidArgument, "regular file"},
		"pipe":            {[]entry{first, {tar.Header{Name: "p", Typeflag: tar.TypeFifo}, ""}}, "", errdefs.InvalidArgument, "regular file"},
		"twice":           {[]entry{first, plain("f"), plain("f")}, "", errdefs.InvalidArgument, "twice"},
		"header twice":    {[]entry{first, first}, "", errdefs.InvalidArgument, "twice"},
		"garbage":         {[]entry{first}, "x", errdefs.InvalidArgument, "follows"},
		"second archive":  {[]entry{first}, string(stream(t, false)), errdefs.InvalidArgument, "follows"},
		"endless zeros":   {[]entry{first}, strings.Repeat("\x00", 2<<20), errdefs.InvalidArgument, "follows"},
		"map alone":       {[]entry{first, pax(artifact.PAXSparseMap, "[]")}, "", errdefs.InvalidArgument, "both"},
		"size alone":      {[]entry{first, pax(artifact.PAXSparseSize, "5")}, "", errdefs.InvalidArgument, "both"},
		"no number":       {[]entry{first, mapped("[]", "x")}, "", errdefs.InvalidArgument, "size"},
		"negative size":   {[]entry{first, mapped("[]", "-5")}, "", errdefs.InvalidArgument, "-5"},
		"absurd size":     {[]entry{first, mapped(`[{"o":0,"l":1}]`, "9223372036854775807")}, "", errdefs.InvalidArgument, "at most"},
		"map beyond":      {[]entry{first, mapped(`[{"o":5,"l":1}]`, "5")}, "", errdefs.InvalidArgument, "beyond"},
		"map overlaps":    {[]entry{first, mapped(`[{"o":0,"l":2},{"o":1,"l":2}]`, "5")}, "", errdefs.InvalidArgument, "before the end"},
		"map and data":    {[]entry{first, mapped(`[{"o":0,"l":2}]`, "5")}, "", errdefs.InvalidArgument, "but its sparse map has 2"},
		"map is none":     {[]entry{first, mapped(`{}`, "5")}, "", errdefs.InvalidArgument, "list"},
		"GNU sparse":      {[]entry{first, pax("GNX.sparse.map", "0,1", "GNX.sparse.numblocks", "1", "GNX.sparse.size", "1")}, "", errdefs.InvalidArgument, "GNU tar"},
		"sum is none":     {[]entry{first, pax(artifact.PAXSum, "abc")}, "", errdefs.InvalidArgument, "sha256"},
		"wrong sum":       {[]entry{first, pax(artifact.PAXSum, sumOf("y"))}, "", errdefs.DataLoss, "damaged"},
		"sums lack":       {[]entry{first, plain("f"), {tar.Header{Name: artifact.FileSums}, sumOf(first.data) + "  snapshot.json\n"}}, "", errdefs.InvalidArgument, "list f"},
		"sums are none":   {[]entry{first, {tar.Header{Name: artifact.FileSums}, "hello\n"}}, "", errdefs.InvalidArgument, "invalid line"},
		"sums of nothing": {[]entry{first, {tar.Header{Name: artifact.FileSums}, sumOf(first.data) + "  snapshot.json\n" + sumOf("") + "  g\n"}}, "", errdefs.DataLoss, "lacks g"},
		"after sums":      {[]entry{first, {tar.Header{Name: artifact.FileSums}, sumOf(first.data) + "  snapshot.json\n"}, plain("f")}, "", errdefs.InvalidArgument, "after its checksums"},
	} {
		t.Run(name, func(t *testing.T) {
			var buf bytes.Buffer
			w := tar.NewWriter(&buf)
			for _, e := range c.entries {
				h := e.Header
				h.Size, h.Mode = int64(len(e.data)), 0o777
				if err := w.WriteHeader(&h); err != nil {
					t.Skip("tar itself does not write this: ", err)
				}
				if _, err := io.WriteString(w, e.data); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			buf.WriteString(c.tail)
			data := bytes.ReplaceAll(buf.Bytes(), []byte("GNX"), []byte("GNU")) // tar.Writer does not write these keys
			if _, err := read(t, bytes.NewReader(data)); !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
		})
	}
	if _, err := read(t, strings.NewReader(strings.Repeat("hello ", 1000))); !errdefs.IsInvalid(err) {
		t.Errorf("no tar at all: %v", err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add(stream(f, true))
	f.Add(stream(f, false))
	f.Add(stream(f, true)[:1600])
	f.Fuzz(func(t *testing.T, data []byte) {
		b := bundle.NewReader(bytes.NewReader(data))
		ok := func(err error) bool {
			if err != nil && !errors.Is(err, io.EOF) && !slices.Contains([]errdefs.Class{errdefs.InvalidArgument, errdefs.DataLoss}, errdefs.ClassOf(err)) {
				t.Errorf("%v is %v", err, errdefs.ClassOf(err))
			}
			return err == nil
		}
		if _, err := b.Header(); !ok(err) {
			return
		}
		for {
			f, err := b.Next()
			if !ok(err) {
				return
			}
			if f.Data() > f.Size || sparse.Check(f.Map(), f.Size) != nil || filepath.Base(f.Name) != f.Name {
				t.Errorf("it accepts %+v", f)
			}
			if _, err := b.Copy(io.Discard); !ok(err) {
				return
			}
		}
	})
}
