package tree

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// archive makes an archive of headers; the content of a file is its Linkname.
func archive(t testing.TB, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Linkname = h.Linkname, ""
			h.Size = int64(len(content))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// The writer of the standard library does not write the records of sparse files.
	return bytes.NewBuffer(bytes.ReplaceAll(buf.Bytes(), []byte("XNU.sparse"), []byte("GNU.sparse")))
}

func file(name, content string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o4755, Linkname: content}
}

func folder(name string) tar.Header {
	return tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o500}
}

func link(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
}

// content returns what is below dir, by path: the content of a file, " -> " and the target of a link, "" of a folder.
func content(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.IsDir():
			out[rel] = ""
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(p)
			out[rel] = " -> " + to
			return err
		default:
			data, err := os.ReadFile(p)
			out[rel] = string(data)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestRoundTrip(t *testing.T) {
	src, dest := filepath.Join(t.TempDir(), "src"), t.TempDir()
	if err := os.MkdirAll(filepath.Join(src, "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	then := time.Unix(1_700_000_000, 0)
	for name, mode := range map[string]fs.FileMode{"one": 0o640, "a/two": 0o755} {
		p := filepath.Join(src, name)
		if err := os.WriteFile(p, []byte(name), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(p, then, then); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../one", filepath.Join(src, "a", "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(src, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	if err := Pack(&buf, src, "src"); err != nil {
		t.Fatal(err)
	}
	n, err := Unpack(&buf, dest, "src", "copy", func(e, why string) { t.Errorf("%s is skipped: %s", e, why) })
	if err != nil || n != 8 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if d := diff.Of(map[string]string{"copy": "", "copy/a": "", "copy/a/b": "", "copy/a/two": "a/two", "copy/a/link": " -> ../one", "copy/one": "one"}, content(t, dest)); d != "" {
		t.Error(d)
	}
	info, err := os.Stat(filepath.Join(dest, "copy", "one"))
	if err != nil || info.Mode() != 0o640 || !info.ModTime().Equal(then) {
		t.Errorf("%v, %v", info, err)
	}
}

func TestPackOneFile(t *testing.T) {
	p := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(p, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	if err := Pack(&buf, p, "name"); err != nil {
		t.Fatal(err)
	}
	h, err := tar.NewReader(&buf).Next()
	if err != nil || h.Name != "name" || h.Uid != 0 || h.Uname != "" {
		t.Errorf("%+v, %v", h, err)
	}
	if err := Pack(io.Discard, p+"x", "name"); !errdefs.IsInvalid(err) {
		t.Errorf("a file that is not there: %v", err)
	}
}

// Whatever the other side sends, nothing is written outside of the folder, and what was there is replaced, not written through.
func TestHostileArchive(t *testing.T) {
	fifo := tar.Header{Name: "top/fifo", Typeflag: tar.TypeFifo}
	device := tar.Header{Name: "top/sda", Typeflag: tar.TypeBlock, Devmajor: 8}
	hard := tar.Header{Name: "top/hard", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}
	sparseFile := file("top/huge", "1\n0\n1\n"+strings.Repeat("\x00", 506)+"x")
	sparseFile.PAXRecords = map[string]string{"XNU.sparse.major": "1", "XNU.sparse.minor": "0", "XNU.sparse.name": "top/huge", "XNU.sparse.realsize": "9000000000000000000"}
	for name, tc := range map[string]struct {
		entries []tar.Header
		want    map[string]string // without the top folder
		skipped int
		err     string
	}{
		"plain":                  {[]tar.Header{folder("top"), file("./top/f", "x")}, map[string]string{"got/f": "x"}, 0, ""},
		"dots":                   {[]tar.Header{file("top/../../f", "x")}, nil, 0, "is not below top"},
		"only dots":              {[]tar.Header{file("..", "x")}, nil, 0, "is not below top"},
		"absolute":               {[]tar.Header{file("/etc/f", "x")}, nil, 0, "is not below top"},
		"another top":            {[]tar.Header{file("other", "x")}, nil, 0, "is not below top"},
		"like the top":           {[]tar.Header{file("topper", "x")}, nil, 0, "is not below top"},
		"too deep":               {[]tar.Header{file("top"+strings.Repeat("/d", maxDepth+1), "x")}, nil, 0, "is not below top"},
		"link to elsewhere":      {[]tar.Header{link("top/l", "/etc")}, nil, 1, ""},
		"link above":             {[]tar.Header{link("top/l", "../outside")}, nil, 1, ""},
		"link within":            {[]tar.Header{folder("top/a"), link("top/a/l", "../f")}, map[string]string{"got/a": "", "got/a/l": " -> ../f"}, 0, ""},
		"link over a link":       {[]tar.Header{link("top/d", "a/b"), link("top/l", "d/../../../outside")}, map[string]string{"got/d": " -> a/b"}, 1, ""},
		"the top is a link":      {[]tar.Header{link("top", "secret")}, nil, 1, ""},
		"through a link":         {[]tar.Header{folder("top/a"), link("top/l", "a"), file("top/l/f", "x")}, map[string]string{"got/a": "", "got/l": " -> a"}, 0, "top is no folder"},
		"link through a link":    {[]tar.Header{link("top/l", "."), link("top/l/l/l/l/x", "../../../x")}, map[string]string{"got/l": " -> ."}, 0, "is no folder"},
		"file over a link":       {[]tar.Header{folder("top"), link("top/l", "f"), file("top/l", "x")}, map[string]string{"got/l": "x"}, 0, ""},
		"folder over a link":     {[]tar.Header{link("top/l", "f"), folder("top/l"), file("top/l/f", "x")}, map[string]string{"got/l": "", "got/l/f": "x"}, 0, ""},
		"devices and the like":   {[]tar.Header{fifo, device, hard}, nil, 3, ""},
		"sparse":                 {[]tar.Header{folder("top"), sparseFile}, nil, 1, ""},
		"file in place of a dir": {[]tar.Header{folder("top/a"), file("top/a/f", "x"), file("top/a", "x")}, map[string]string{"got/a": "", "got/a/f": "x"}, 0, "write got/a"},
	} {
		t.Run(name, func(t *testing.T) {
			outer := t.TempDir()
			dest := filepath.Join(outer, "dest")
			if err := os.Mkdir(dest, 0o755); err != nil {
				t.Fatal(err)
			}
			skipped := 0
			_, err := Unpack(archive(t, tc.entries...), dest, "top", "got", func(string, string) { skipped++ })
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), strings.ReplaceAll(tc.err, "top is", "is"))) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
			got := content(t, dest)
			delete(got, "got")
			if !maps.Equal(got, tc.want) || skipped != tc.skipped {
				t.Errorf("got %v, %d skipped; want %v, %d", got, skipped, tc.want, tc.skipped)
			}
			if names := content(t, outer); len(names)-len(content(t, dest)) != 1 {
				t.Errorf("written outside: %v", slices.Collect(maps.Keys(names)))
			}
		})
	}
}

func TestModes(t *testing.T) {
	dest := t.TempDir()
	if _, err := Unpack(archive(t, folder("top"), file("top/f", "x")), dest, "top", "top", nil); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{"top": fs.ModeDir | 0o700, "top/f": 0o755} {
		if info, err := os.Stat(filepath.Join(dest, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

// A file of ours that is a link is replaced: what it leads to stays as it is.
func TestOurLinksAreNotFollowed(t *testing.T) {
	dest, other := t.TempDir(), t.TempDir()
	if err := os.Symlink(other, filepath.Join(dest, "got")); err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(archive(t, folder("top"), file("top/f", "x")), dest, "top", "got", nil); err != nil {
		t.Fatal(err)
	}
	if got := content(t, other); len(got) > 0 {
		t.Errorf("written through the link: %v", got)
	}
}

// Any archive is unpacked below the folder or refused.
func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, folder("top"), file("top/f", "x"), link("top/l", "f"), file("top/l/x", "y")).Bytes())
	f.Add(archive(f, link("top/l", "../../x"), file("/top/../f", "x")).Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		outer := t.TempDir()
		dest := filepath.Join(outer, "dest")
		if err := os.Mkdir(dest, 0o755); err != nil {
			t.Fatal(err)
		}
		_, _ = Unpack(bytes.NewReader(data), dest, "top", "got", func(string, string) {})
		if names, err := os.ReadDir(outer); err != nil || len(names) != 1 {
			t.Errorf("written outside: %v, %v", names, err)
		}
		if names, err := os.ReadDir(dest); err != nil || len(names) > 1 || len(names) == 1 && names[0].Name() != "got" {
			t.Errorf("written beside: %v, %v", names, err)
		}
		for name, to := range content(t, dest) {
			if target, ok := strings.CutPrefix(to, " -> "); ok {
				if at := filepath.Join(filepath.Dir(name), target); filepath.IsAbs(target) || at != "got" && !strings.HasPrefix(at, "got/") {
					t.Errorf("%s leads to %s", name, target)
				}
			}
		}
	})
}
