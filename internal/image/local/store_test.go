package local_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// diskOf is a bootable raw disk. Different bodies give different disks.
func diskOf(body string) []byte {
	d := rawDisk()
	copy(d[1<<20:], body)
	return d
}

func idOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func put(t testing.TB, s *local.Store, key, body string, o image.Origin) image.Image {
	t.Helper()
	img, err := s.Put(t.Context(), key, bytes.NewReader(diskOf(body)), image.Fetched{Origin: o})
	if err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
	return img
}

func entries(t testing.TB, dir, sub string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(dir, sub))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

func names(t testing.TB, s *local.Store) (out []string) {
	t.Helper()
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		out = append(out, i.Name)
	}
	return out
}

func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

var web = image.Origin{URL: "https://example.com/x.img", ETag: `"1"`, LastModified: "Sat, 21 Nov 2026 00:00:00 GMT", FetchedAt: time.Unix(1_700_000_000, 0).UTC()}

func TestStatement35_LayoutOfTheFolder(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	img := put(t, s, "example.com/whatever/etc", "one", web)
	put(t, s, "example.com:1234/foo/bar", "one", web)
	put(t, s, "my-image", "one", web)
	target := "../data/" + strings.TrimPrefix(img.ID, "sha256:")
	for _, link := range []string{"example.com%whatever%etc", "example.com:1234%foo%bar", "my-image"} {
		if got, err := os.Readlink(filepath.Join(dir, "links", link)); err != nil || got != target {
			t.Errorf("%s leads to %q, %v; want %q", link, got, err, target)
		}
	}
	equal(t, "data", entries(t, dir, "data"), []string{strings.TrimPrefix(idOf(diskOf("one")), "sha256:")})
	if fi, err := os.Stat(filepath.Join(dir, "origins", "my-image.json")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the origin is %v, %v", fi, err)
	}
}

func TestStatement36_FailedTransfersLeaveNothing(t *testing.T) {
	boom := errdefs.New(errdefs.DataLoss, "digest mismatch")
	late := func() io.Reader {
		return io.MultiReader(bytes.NewReader(diskOf("x")), reader(func([]byte) (int, error) { return 0, boom }))
	}
	gz := func() io.Reader { // a compressor's reader may stop before the end of its input
		var buf bytes.Buffer
		_, _ = buf.ReadFrom(late())
		return io.MultiReader(bytes.NewReader(buf.Bytes()), reader(func([]byte) (int, error) { return 0, boom }))
	}
	for name, c := range map[string]struct {
		r      io.Reader
		accept func(string) error
	}{
		"reader fails at its end": {r: late()},
		"reader fails after it":   {r: gz()},
		"not what was wanted":     {r: bytes.NewReader(diskOf("x")), accept: func(id string) error { return errdefs.As(errdefs.DataLoss, boom) }},
	} {
		dir := t.TempDir()
		s := open(t, dir)
		_, err := s.Put(t.Context(), "x", c.r, image.Fetched{Origin: web, Accept: c.accept})
		if !errors.Is(err, boom) || !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
		for _, sub := range []string{"data", "links", "origins", "tmp"} {
			if left := entries(t, dir, sub); len(left) > 0 {
				t.Errorf("%s: left in %s: %v", name, sub, left)
			}
		}
	}
}

func TestStatement38_ContentIsStoredOnce(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	a, b := put(t, s, "a", "one", web), put(t, s, "b", "one", web)
	c, err := s.Link(t.Context(), "c", a.ID, web)
	if err != nil || a.ID != b.ID || c.ID != a.ID || c.Name != "c" || c.Source != web.URL {
		t.Errorf("%+v %+v %+v %v", a, b, c, err)
	}
	if got := entries(t, dir, "data"); len(got) != 1 {
		t.Errorf("data holds %v", got)
	}
	if _, err := s.Link(t.Context(), "d", idOf([]byte("no such content")), web); !errdefs.IsNotFound(err) {
		t.Errorf("a link to nothing: %v", err)
	}
	if _, err := s.Link(t.Context(), "d", "one", web); !errdefs.IsInvalid(err) {
		t.Errorf("a link to no id: %v", err)
	}
	equal(t, "names", names(t, s), []string{"a", "b", "c"})
}

func TestStatement39_NewContentMovesTheName(t *testing.T) {
	s := open(t, t.TempDir())
	first := put(t, s, "a", "one", web)
	second := put(t, s, "a", "two", web)
	if got, err := s.Get(t.Context(), "a"); err != nil || got.ID != second.ID {
		t.Errorf("the name means %v, %v", got.ID, err)
	}
	collect := func(use func(string) bool) {
		t.Helper()
		if _, err := s.Collect(t.Context(), image.GCLimits{}, use); err != nil {
			t.Fatal(err)
		}
	}
	collect(func(d string) bool { return d == first.ID })
	if _, err := s.Get(t.Context(), first.ID); err != nil {
		t.Errorf("the old content went while it was in use: %v", err)
	}
	collect(nil)
	if _, err := s.Get(t.Context(), first.ID); !errdefs.IsNotFound(err) {
		t.Errorf("the old content stays: %v", err)
	}
}

func TestStatement40_NamesWithDigests(t *testing.T) {
	s := open(t, t.TempDir())
	manifest, pinned, other := idOf([]byte("manifest")), idOf([]byte("pinned")), idOf([]byte("other"))
	one := put(t, s, "app:v1", "one", image.Origin{Digest: manifest})
	two := put(t, s, "team/app@"+pinned, "two", image.Origin{Digest: pinned})
	url := put(t, s, "example.com/x.img", "three", web)
	for ref, want := range map[string]string{
		"app@" + manifest:                                  one.ID,
		"app@" + one.ID:                                    one.ID,
		"app:v1@" + one.ID:                                 one.ID,
		"docker.io/library/app@" + manifest:                one.ID,
		"team/app@" + pinned:                               two.ID,
		"docker.io/team/app@" + pinned:                     two.ID,
		"example.com/x.img@" + url.ID:                      url.ID,
		"virtlet.cloud/example.com/x.img:latest@" + url.ID: url.ID,
		"app@" + other:                                     "",
		"app@" + two.ID:                                    "", // another image has that digest, but not that name
		"app:v2@" + one.ID:                                 "",
		"example.com/x.img@" + one.ID:                      "",
	} {
		got, err := s.Get(t.Context(), ref)
		if got.ID != want || (want == "") != errdefs.IsNotFound(err) {
			t.Errorf("%s: %q, %v; want %q", ref, got.ID, err, want)
		}
	}
	for _, ref := range []string{"app@sha512:" + strings.Repeat("0", 128), "app@sha256:abc", "app@" + strings.ToUpper(one.ID), "app@", "@" + one.ID} {
		if _, err := s.Get(t.Context(), ref); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

func TestStatement41_RemovingWhatIsNotThereAndWhatIsUsed(t *testing.T) {
	s := open(t, t.TempDir())
	if err := s.Remove(t.Context(), "nobody", nil); !errdefs.IsNotFound(err) {
		t.Errorf("unknown: %v", err)
	}
	img := put(t, s, "a", "one", web)
	if err := s.Remove(t.Context(), "a", func(d string) bool { return d == img.ID }); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir()}); err != nil {
		t.Errorf("content in use is gone: %v", err)
	}
	if _, _, err := s.Origin(t.Context(), "a"); !errdefs.IsNotFound(err) {
		t.Errorf("the origin of a removed name: %v", err)
	}
}

func TestStatement42And44_OneEntryForEachLinkInOrder(t *testing.T) {
	s := open(t, t.TempDir())
	manifest := idOf([]byte("manifest"))
	img := put(t, s, "b", "one", web)
	put(t, s, "a:1", "one", image.Origin{Digest: manifest, URL: "registry.example/a"})
	if _, err := s.Import(t.Context(), "c", bytes.NewReader(diskOf("two")), nil); err != nil {
		t.Fatal(err)
	}
	all, err := s.List(t.Context())
	if err != nil || len(all) != 3 {
		t.Fatalf("%+v, %v", all, err)
	}
	a, b, c := all[0], all[1], all[2]
	if a.Name != "a:1" || b.Name != "b" || c.Name != "c:latest" || a.ID != img.ID || b.ID != img.ID {
		t.Errorf("list is %+v", all)
	}
	if a.Digest != manifest || a.Source != "registry.example/a" || b.Digest != "" || b.Source != web.URL || c.Digest != "" || c.Source != "" {
		t.Errorf("origins are wrong in %+v", all)
	}
	for _, i := range all {
		if i.UsedAt.IsZero() || i.Size <= 0 || i.CreatedAt.IsZero() || i.Type != vm.ImageDisk {
			t.Errorf("entry %+v", i)
		}
	}
}

func TestStatement43_Lookups(t *testing.T) {
	s := open(t, t.TempDir())
	tagless := put(t, s, "baz", "one", web)
	port := put(t, s, "example.com:1234/foo/bar", "two", web)
	tagged := put(t, s, "nginx:1.2", "three", image.Origin{Digest: idOf([]byte("m"))})
	long := put(t, s, "example.com/Path/To.Some_Thing~1.qcow2,x=1+2", "four", web)
	if _, err := s.Import(t.Context(), "docker.io/library/demo", bytes.NewReader(diskOf("five")), nil); err != nil {
		t.Fatal(err)
	}
	demo := idOf(diskOf("five"))
	for ref, want := range map[string]string{
		"baz": tagless.ID, "baz:latest": tagless.ID, "baz:v2": tagless.ID, "virtlet.cloud/baz": tagless.ID, "cocoon.cocoonstack.io/baz:v3": tagless.ID,
		"example.com:1234/foo/bar": port.ID, "example.com:1234/foo/bar:latest": port.ID, "virtlet.cloud/example.com:1234/foo/bar": port.ID,
		"nginx:1.2": tagged.ID, "docker.io/nginx:1.2": tagged.ID, "docker.io/library/nginx:1.2": tagged.ID, "index.docker.io/library/nginx:1.2": tagged.ID, "library/nginx:1.2": tagged.ID,
		"nginx": "", "nginx:latest": "", "example.com/foo/bar": "", "foo/bar": "",
		"example.com/Path/To.Some_Thing~1.qcow2,x=1+2": long.ID,
		"demo": demo, "demo:latest": demo, "docker.io/demo": demo, "docker.io/library/demo:latest": demo, "demo:v2": "",
		tagless.ID: tagless.ID, tagless.ID[:14]: tagless.ID, tagless.ID[7:20]: tagless.ID, strings.TrimPrefix(tagless.ID, "sha256:"): tagless.ID,
		idOf(nil): "",
	} {
		got, err := s.Get(t.Context(), ref)
		if got.ID != want || (want == "") != errdefs.IsNotFound(err) {
			t.Errorf("%s: %q, %v; want %q", ref, got.ID, err, want)
		}
	}
	for _, ref := range []string{"", "../x", "a/../b", "a//b", "/a", "a%b", "a b", "http://x/y", "-a", ".a", "a\x00", strings.Repeat("a", 300), "sha256:xyz", "sha256:ab"} {
		if _, err := s.Get(t.Context(), ref); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", ref, err)
		}
		if _, err := s.Put(t.Context(), ref, bytes.NewReader(diskOf("x")), image.Fetched{}); !errdefs.IsInvalid(err) && !strings.HasPrefix(ref, "sha256") {
			t.Errorf("put %q: %v", ref, err)
		}
	}
}

func TestStatement45_RemoveByID(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	img := put(t, s, "a", "one", web)
	put(t, s, "b:1", "one", web)
	put(t, s, "c", "two", web)
	if err := s.Remove(t.Context(), img.ID, nil); err != nil {
		t.Fatal(err)
	}
	equal(t, "names", names(t, s), []string{"c"})
	if d, o := entries(t, dir, "data"), entries(t, dir, "origins"); len(d) != 1 || len(o) != 1 {
		t.Errorf("data holds %v, origins %v", d, o)
	}
	if err := s.Remove(t.Context(), "c:whatever", nil); err != nil {
		t.Errorf("by name with a tag that means nothing: %v", err)
	}
	if d := entries(t, dir, "data"); len(d) != 0 {
		t.Errorf("data holds %v", d)
	}
}

func TestStatement46_CollectionLeavesWorkInProgressAlone(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	put(t, s, "gone", "one", web)
	if err := s.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := s.Put(context.Background(), "slow", pr, image.Fetched{Origin: web})
		done <- err
	}()
	data := diskOf("slow")
	if _, err := pw.Write(data[:1<<20]); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, dir).Collect(t.Context(), image.GCLimits{MaxSize: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s); len(got) != 0 {
		t.Errorf("there is %v", got)
	}
	_, err := pw.Write(data[1<<20:])
	if err := errors.Join(err, pw.Close(), <-done); err != nil {
		t.Errorf("the transfer: %v", err)
	}
	equal(t, "names", names(t, s), []string{"slow"})
}

func TestStatement47_BrokenLinksAreSkippedWithAWarning(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	s, err := local.New(local.Config{Dir: dir, Arch: "amd64", Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	img := put(t, s, "good", "one", web)
	link := func(name, target string) {
		if err := os.Symlink(target, filepath.Join(dir, "links", name)); err != nil {
			t.Fatal(err)
		}
	}
	link("dangling", "../data/"+strings.Repeat("0", 64))
	link("outside", "../../etc/passwd")
	link("absolute", filepath.Join(dir, "data", strings.TrimPrefix(img.ID, "sha256:")))
	if err := os.WriteFile(filepath.Join(dir, "links", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		equal(t, "names", names(t, s), []string{"good"})
	}
	for _, name := range []string{"dangling", "outside", "absolute", "file"} {
		if n := strings.Count(log.String(), filepath.Join(dir, "links", name)); n != 1 {
			t.Errorf("%s is in the log %d times", name, n)
		}
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{MaxSize: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, dir, "links"); len(got) != 4 {
		t.Errorf("links holds %v", got)
	}
}

func TestStatement48_ForeignDisksAreConverted(t *testing.T) {
	tool := need.Tool(t, "qemu-img")
	s := open(t, t.TempDir())
	raw := filepath.Join(t.TempDir(), "raw")
	if err := os.WriteFile(raw, diskOf("converted"), 0o600); err != nil {
		t.Fatal(err)
	}
	for format, opts := range map[string]string{"vmdk": "subformat=streamOptimized", "vhdx": "subformat=dynamic", "vpc": "force_size=on"} {
		out := filepath.Join(t.TempDir(), "out")
		if msg, err := exec.Command(tool, "convert", "-f", "raw", "-O", format, "-o", opts, raw, out).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, msg)
		}
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		var phases []string
		img, err := s.Put(t.Context(), format, bytes.NewReader(data), image.Fetched{Progress: func(p string, _ int64) {
			if !slices.Contains(phases, p) {
				phases = append(phases, p)
			}
		}})
		if err != nil || img.ID != idOf(data) || img.Type != vm.ImageDisk {
			t.Fatalf("%s: %+v, %v", format, img, err)
		}
		equal(t, "phases", phases, []string{image.PhaseDownload, image.PhaseConvert})
		root, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		if base := root.Disks[0].Backing; base.Format != vm.DiskQCOW2 || !strings.HasSuffix(base.Path, "disk.qcow2") {
			t.Errorf("%s: it stands on %+v", format, base)
		}
		back := filepath.Join(t.TempDir(), "back")
		if msg, err := exec.Command(tool, "convert", "-O", "raw", root.Disks[0].Path, back).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, msg)
		}
		if got, _ := os.ReadFile(back); !bytes.Equal(got, diskOf("converted")) {
			t.Errorf("%s: the disk has other content after its conversion", format)
		}
		if size, err := s.DiskSize(t.Context(), img); err != nil || size != diskSize {
			t.Errorf("%s: size %d, %v", format, size, err)
		}
	}
}

func TestStatement50_Usage(t *testing.T) {
	s := open(t, t.TempDir())
	before, err := s.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	img := put(t, s, "a", strings.Repeat("x", 1<<19), web)
	after, err := s.Usage(t.Context())
	if err != nil || after-before < img.Size {
		t.Errorf("an image of %d bytes made %d of %d, %v", img.Size, after, before, err)
	}
}

func TestOriginBelongsToItsContent(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	one := put(t, s, "a", "one", web)
	got, img, err := s.Origin(t.Context(), "a")
	if d := diff.Of(web, got); err != nil || d != "" || img.ID != one.ID {
		t.Errorf("image %s: %v, %s", img.ID, err, d)
	}
	if _, _, err := s.Origin(t.Context(), "a:latest"); !errdefs.IsNotFound(err) {
		t.Errorf("another key: %v", err)
	}
	// The state after a crash between origin and name.
	path := filepath.Join(dir, "origins", "a.json")
	data, _ := os.ReadFile(path)
	var f map[string]any
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	f["id"] = idOf(diskOf("two"))
	data, _ = json.Marshal(f)
	for _, data := range [][]byte{data, []byte("{"), nil} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, img, err := s.Origin(t.Context(), "a"); err != nil || !got.IsZero() || img.Source != "" {
			t.Errorf("%q: %+v %+v %v", data, got, img, err)
		}
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil {
		t.Fatal(err)
	}
	if left := entries(t, dir, "origins"); len(left) != 0 {
		t.Errorf("an origin of nothing stays: %v", left)
	}
	// An import has no origin, even of content that was fetched before.
	put(t, s, "b:latest", "one", web)
	if _, err := s.Import(t.Context(), "b", bytes.NewReader(diskOf("one")), nil); err != nil {
		t.Fatal(err)
	}
	if got, _, err := s.Origin(t.Context(), "b:latest"); err != nil || !got.IsZero() {
		t.Errorf("after an import: %+v %v", got, err)
	}
}

func TestDiskLargerThanTheDefault(t *testing.T) {
	s := open(t, t.TempDir())
	q := qcow2(t)
	size := int64(20 << 30)
	path := filepath.Join(t.TempDir(), "q")
	if err := os.WriteFile(path, q, 0o600); err != nil {
		t.Fatal(err)
	}
	if msg, err := exec.Command("qemu-img", "resize", path, "20G").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, msg)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := s.Import(t.Context(), "big", f, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.DiskSize(t.Context(), img); err != nil || got != size {
		t.Errorf("size is %d, %v", got, err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: 10 << 30}); !errdefs.IsInvalid(err) {
		t.Errorf("less storage than the image: %v", err)
	}
	small, err := local.New(local.Config{Dir: t.TempDir(), Arch: "amd64", Disk: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if _, err := small.Import(t.Context(), "big", f, nil); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("past the limit: %v", err)
	}
}

func TestImportOfACompressedDisk(t *testing.T) {
	s := open(t, t.TempDir())
	cmd := exec.Command(need.Tool(t, "xz"), "-c")
	cmd.Stdin = bytes.NewReader(diskOf("xz"))
	data, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Import(t.Context(), "x", bytes.NewReader(data), nil)
	if err != nil || img.ID != idOf(diskOf("xz")) {
		t.Errorf("%+v, %v", img, err)
	}
	if _, err := s.Import(t.Context(), "y", bytes.NewReader(data[:len(data)-8]), nil); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("truncated: %v", err)
	}
}

func TestExportOfADisk(t *testing.T) {
	s := open(t, t.TempDir())
	put(t, s, "a", "one", web)
	var buf bytes.Buffer
	if err := s.Export(t.Context(), "a:latest", &buf); err != nil || !bytes.Equal(buf.Bytes(), diskOf("one")) {
		t.Errorf("%d bytes, %v", buf.Len(), err)
	}
	if err := s.Export(t.Context(), "nobody", &buf); !errdefs.IsNotFound(err) {
		t.Errorf("unknown: %v", err)
	}
}

// TestOriginOutlivesACutPull: a crash between the new origin and the move of the name keeps the old origin.
func TestOriginOutlivesACutPull(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	one := put(t, s, "a", "one", image.Origin{ETag: "one"})
	put(t, s, "a", "two", image.Origin{ETag: "two"})
	link := filepath.Join(dir, "links", "a")
	if err := errors.Join(os.Remove(link), os.Symlink("../data/"+strings.TrimPrefix(one.ID, "sha256:"), link)); err != nil {
		t.Fatal(err)
	}
	if o, img, err := s.Origin(t.Context(), "a"); err != nil || o.ETag != "one" || img.ID != one.ID {
		t.Errorf("%+v %v %v", o, img.ID, err)
	}
	put(t, s, "a", "three", image.Origin{ETag: "three"})
	if o, _, err := s.Origin(t.Context(), "a"); err != nil || o.ETag != "three" {
		t.Errorf("%+v %v", o, err)
	}
}

// FuzzParseRef: for any reference, only safe file names are opened.
func FuzzParseRef(f *testing.F) {
	for _, s := range []string{"cocoon/demo:latest", "localhost:5000/x", "../x", "a%b", "a@sha256:" + strings.Repeat("0", 64), "docker.io/library/x:1", "virtlet.cloud/virtlet.cloud/x", "docker.io/", "library/", "a\x00", "x:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		keys, err := local.ParseRef(s)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		for _, k := range keys {
			file := strings.ReplaceAll(k, "/", "%")
			if !filepath.IsLocal(file) || filepath.Base(file) != file || strings.Contains(k, "%") || strings.ContainsAny(k, " \x00\\@") || strings.HasPrefix(k, "/") {
				t.Errorf("%q looks at %q", s, file)
			}
		}
	})
}
