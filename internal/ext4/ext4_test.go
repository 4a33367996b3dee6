package ext4_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
)

func file(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "fs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func sound(t *testing.T, f *os.File) {
	t.Helper()
	if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", f.Name()).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
}

var when = time.Unix(3_000_000_000, 123456789) // after the end of 32-bit time

func folder(children map[string]*ext4.Node) *ext4.Node {
	return &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeFolder | 0o755, ModTime: when}, Children: children}
}

func regular(t testing.TB, w *ext4.Writer, body string) *ext4.Node {
	t.Helper()
	e, err := w.Content(strings.NewReader(body), int64(len(body)))
	if err != nil {
		t.Fatal(err)
	}
	return &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeRegular | 0o4711, UID: 70000, GID: 1 << 20, ModTime: when, Content: e}}
}

// zeros is a file of zeros that uses no space.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// holes is a file that keeps zeros as holes, so that a test can write many gigabytes.
type holes struct{ *os.File }

var nothing = make([]byte, 1<<20)

func (h holes) WriteAt(p []byte, off int64) (int, error) {
	if bytes.Equal(p, nothing[:len(p)]) {
		return len(p), nil
	}
	return h.File.WriteAt(p, off)
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	f := file(t)
	w := ext4.NewWriter(f)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	dropped := regular(t, w, strings.Repeat("dropped", 5000))
	a := regular(t, w, big)
	dropped.Content = ext4.Extent{}
	a.Xattrs = map[string]string{"user.a": "1", "trusted.overlay.opaque": "y", "user.long": strings.Repeat("v", 500), "security.capability": "\x01\x00", "user.": "empty name"}
	delete(a.Xattrs, "user.")
	link := strings.Repeat("t", 300)
	many := map[string]*ext4.Node{}
	for i := range 3000 {
		many[fmt.Sprintf("%0100d", i)] = regular(t, w, "x")
	}
	root := folder(map[string]*ext4.Node{
		"a": a, "b": {Inode: a.Inode}, "d": folder(map[string]*ext4.Node{"e": folder(nil), "many": folder(many)}),
		"s": {Inode: &ext4.Inode{Mode: ext4.TypeSymlink, Link: "x"}}, "long": {Inode: &ext4.Inode{Mode: ext4.TypeSymlink, Link: link}},
		"w": {Inode: &ext4.Inode{Mode: ext4.TypeChar}}, "p": {Inode: &ext4.Inode{Mode: ext4.TypeFIFO | 0o600}}, "none": regular(t, w, ""),
	})
	size, err := w.Finish(root, [16]byte{1})
	if err != nil {
		t.Fatal(err)
	}
	if info, err := f.Stat(); err != nil || info.Size() != size {
		t.Errorf("%d bytes, %v; want %d", info.Size(), err, size)
	}
	sound(t, f)
	fs, err := ext4.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := fs.Root()
	if err != nil {
		t.Fatal(err)
	}
	get := func(path string) *ext4.Entry {
		t.Helper()
		e := dir
		for part := range strings.SplitSeq(path, "/") {
			next, err := e.Lookup(part)
			if err != nil || next == nil {
				t.Fatalf("%s: %v, %v", path, next, err)
			}
			e = next
		}
		return e
	}
	got := get("b")
	if body, err := io.ReadAll(got.Open()); err != nil || string(body) != big {
		t.Errorf("content differs: %d bytes, %v", len(body), err)
	}
	if got.Mode != ext4.TypeRegular|0o4711 || got.UID != 70000 || got.GID != 1<<20 || !got.ModTime.Equal(when) || !maps.Equal(got.Xattrs, a.Xattrs) {
		t.Errorf("%+v", got.Inode)
	}
	if got.Number != get("a").Number || get("s").Link != "x" || get("long").Link != link || get("w").Mode != ext4.TypeChar || !get("d/e").IsFolder() {
		t.Error("links or types differ")
	}
	if list, err := get("d/many").List(); err != nil || len(list) != 3000 {
		t.Errorf("%d names, %v", len(list), err)
	}
	if e, err := dir.Lookup("nothing"); e != nil || err != nil {
		t.Errorf("%v, %v", e, err)
	}
}

func TestLargeFilesAndManyGroups(t *testing.T) {
	f := file(t)
	w := ext4.NewWriter(holes{f})
	nodes := map[string]*ext4.Node{}
	for name, size := range map[string]int64{"half": 1 << 29, "more": 640 << 20} {
		e, err := w.Content(zeros{}, size)
		if err != nil {
			t.Fatal(err)
		}
		nodes[name] = &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeRegular | 0o644, Content: e}}
	}
	if _, err := w.Finish(folder(nodes), [16]byte{}); err != nil {
		t.Fatal(err)
	}
	sound(t, f)
	fs, err := ext4.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	root, _ := fs.Root()
	if e, err := root.Lookup("more"); err != nil || e.Open().Size() != 640<<20 {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestWhatCannotBeHeldIsRefused(t *testing.T) {
	for name, n := range map[string]*ext4.Node{
		"attributes": {Inode: &ext4.Inode{Mode: ext4.TypeRegular, Xattrs: map[string]string{"user.a": strings.Repeat("x", 5000)}}},
		"name space": {Inode: &ext4.Inode{Mode: ext4.TypeRegular, Xattrs: map[string]string{"odd": "x"}}},
		"link":       {Inode: &ext4.Inode{Mode: ext4.TypeSymlink, Link: strings.Repeat("x", 5000)}},
	} {
		if _, err := ext4.NewWriter(file(t)).Finish(folder(map[string]*ext4.Node{"x": n}), [16]byte{}); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ext4.NewWriter(file(t)).Content(zeros{}, 1<<50); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a huge file: %v", err)
	}
	if _, err := ext4.NewWriter(file(t)).Content(strings.NewReader("x"), 2); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a short file: %v", err)
	}
}

func TestMoreInodesThanOneGroupHolds(t *testing.T) {
	f := file(t)
	w := ext4.NewWriter(f)
	nodes := map[string]*ext4.Node{}
	for i := range 40000 {
		nodes[fmt.Sprint(i)] = &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeRegular | 0o644}}
	}
	if _, err := w.Finish(folder(nodes), [16]byte{}); err != nil {
		t.Fatal(err)
	}
	sound(t, f)
}

// FuzzRead reads damaged file systems: the result is an error or a tree, never a panic or a loop.
func FuzzRead(f *testing.F) {
	out := file(f)
	w := ext4.NewWriter(out)
	a := regular(f, w, "content")
	a.Xattrs = map[string]string{"user.a": strings.Repeat("b", 200), "user.c": "d"}
	if _, err := w.Finish(folder(map[string]*ext4.Node{"a": a, "d": folder(map[string]*ext4.Node{"b": {Inode: a.Inode}})}), [16]byte{}); err != nil {
		f.Fatal(err)
	}
	whole, err := os.ReadFile(out.Name())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(0), []byte{})
	f.Add(uint32(4096), []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})
	f.Add(uint32(len(whole)-3*4096+256), []byte{0xff, 0xff})
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		b := bytes.Clone(whole)
		copy(b[int(at)%len(b):], patch)
		fs, err := ext4.Open(bytes.NewReader(b))
		if err != nil {
			return
		}
		root, err := fs.Root()
		for depth := 0; err == nil && root != nil && depth < 4; depth++ {
			if !root.IsFolder() {
				_, _ = io.Copy(io.Discard, root.Open())
				break
			}
			if _, err = root.Lookup("a"); err == nil {
				root, err = root.Lookup("d")
			}
		}
		if err != nil && !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("unclassified: %v", err)
		}
	})
}
