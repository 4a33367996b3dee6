package oci_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/image/oci"
	. "cocoonstack.io/cocoon/internal/testkit/ociimage" // a vocabulary for tables of images
)

func scratch(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "scratch"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func choose(t testing.TB, archive []byte, name string) (*oci.Image, error) {
	t.Helper()
	a, err := oci.Read(t.Context(), bytes.NewReader(archive), &memory{}, oci.DefaultLimits())
	if err != nil {
		return nil, err
	}
	return a.Image(name, "amd64")
}

// build returns the path of the ext4 file made from an archive.
func build(t testing.TB, archive []byte) (string, error) {
	t.Helper()
	img, err := choose(t, archive, "app:latest")
	if err != nil {
		return "", err
	}
	stack, err := stackOf(t, t.Context(), img)
	if err != nil {
		return "", err
	}
	out := scratch(t)
	_, err = oci.Merge(t.Context(), stack, out, "", oci.NewBudget(oci.DefaultLimits()))
	return out.Name(), err
}

// layerFile builds one layer on top of those below it.
func layerFile(ctx context.Context, r io.Reader, want string, out ext4.File, recipe io.Writer, below []*ext4.FS) (oci.Layer, error) {
	return oci.BuildLayer(ctx, r, want, oci.Target{
		FS: out, Recipe: recipe, Budget: oci.NewBudget(oci.DefaultLimits()),
		Below: func(context.Context) (*oci.Stack, error) { return oci.NewStack(below) },
	})
}

func stackOf(t testing.TB, ctx context.Context, img *oci.Image) (*oci.Stack, error) { //nolint:revive // the context is what is tested
	t.Helper()
	var layers []*ext4.FS
	for n, want := range img.DiffIDs {
		f := scratch(t)
		if _, err := layerFile(ctx, img.Layer(n), want, f, nil, layers); err != nil {
			return nil, err
		}
		fs, err := ext4.Open(f)
		if err != nil {
			return nil, err
		}
		layers = append(layers, fs)
	}
	return oci.NewStack(layers)
}

// debugfs queries the file system with e2fsprogs, an independent implementation.
func debugfs(t *testing.T, fs, request string) string {
	t.Helper()
	cmd := exec.Command("/usr/sbin/debugfs", "-R", request, fs)
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("debugfs: %v", err)
	}
	return string(out)
}

func sound(t *testing.T, fs string) {
	t.Helper()
	if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", fs).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
}

// files lists the paths below dir with the content of regular files.
func files(t *testing.T, fs, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for line := range strings.Lines(debugfs(t, fs, "ls -p "+dir)) {
		f := strings.Split(strings.TrimSpace(line), "/") // /inode/mode/uid/gid/name/size/
		if len(f) < 7 || f[1] == "0" || f[5] == "." || f[5] == ".." || f[5] == "lost+found" {
			continue
		}
		path := strings.TrimSuffix(dir, "/") + "/" + f[5]
		switch f[2][:2] {
		case "04":
			out[path+"/"] = f[2]
			for k, v := range files(t, fs, path) {
				out[k] = v
			}
		case "12":
			out[path] = "-> " + strings.TrimSpace(strings.SplitN(debugfs(t, fs, "stat "+path)+`Fast link dest: "?"`, `link dest: "`, 2)[1])
		default:
			out[path] = debugfs(t, fs, "cat "+path)
		}
	}
	return out
}

func TestLayersAreFlattened(t *testing.T) {
	for name, c := range map[string]struct {
		layers [][]Entry
		want   string // path=content, sorted as written; folders end in a slash
	}{
		"upper wins": {[][]Entry{{File("a", "1"), File("b", "1")}, {File("a", "2")}}, "/a=2 /b=1"},
		"whiteout of a file": {
			[][]Entry{{Dir("d"), File("d/a", "1"), File("d/b", "1")}, {Whiteout("d", "a")}}, "/d/ /d/b=1",
		},
		"whiteout of a folder":            {[][]Entry{{Dir("d"), File("d/a", "1")}, {Whiteout(".", "d")}}, ""},
		"whiteout keeps its own layer":    {[][]Entry{{Dir("d"), File("d/a", "1")}, {File("d/a", "2"), Whiteout("d", "a")}}, "/d/ /d/a=2"},
		"whiteout after content below it": {[][]Entry{{Dir("d"), File("d/a", "1")}, {File("d/b", "2"), Whiteout(".", "d")}}, "/d/ /d/b=2"},
		"whiteout then new folder": {
			[][]Entry{{Dir("d"), File("d/a", "1")}, {Whiteout(".", "d"), Dir("d"), File("d/b", "2")}}, "/d/ /d/b=2",
		},
		"opaque folder, mark first": {
			[][]Entry{{Dir("d"), File("d/a", "1"), Dir("d/e"), File("d/e/f", "1")}, {Dir("d"), Opaque("d"), File("d/b", "2")}}, "/d/ /d/b=2",
		},
		"opaque folder, mark last": {
			[][]Entry{{Dir("d"), File("d/a", "1")}, {Dir("d"), File("d/b", "2"), Opaque("d")}, {File("d/c", "3")}}, "/d/ /d/b=2 /d/c=3",
		},
		"whiteout of nothing":         {[][]Entry{{File("a", "1")}, {Whiteout("x", "y"), Opaque("z"), Whiteout("a", "b")}}, "/a=1"},
		"aufs bookkeeping is dropped": {[][]Entry{{File("a", "1"), Dir(".wh..wh.plnk"), File(".wh..wh.aufs", "")}}, "/a=1"},
		"file replaces folder":        {[][]Entry{{Dir("d"), File("d/a", "1")}, {File("d", "2")}}, "/d=2"},
		"folder replaces file":        {[][]Entry{{File("d", "1")}, {Dir("d"), File("d/a", "2")}}, "/d/ /d/a=2"},
		"last of a layer wins":        {[][]Entry{{File("a", "1"), File("a", "2")}}, "/a=2"},
		"missing parents are made":    {[][]Entry{{File("x/y/z", "1")}}, "/x/ /x/y/ /x/y/z=1"},
		"leading dot and slash":       {[][]Entry{{Dir("."), File("./a", "1"), File("/b", "2"), File("//c//d", "3")}}, "/a=1 /b=2 /c/ /c/d=3"},
		"hard link across layers":     {[][]Entry{{File("a", "1")}, {HardLink("b", "a")}, {Whiteout(".", "a")}}, "/b=1"},
		"hard link to a symlink":      {[][]Entry{{Symlink("s", "x"), HardLink("h", "s")}}, `/h=-> x" /s=-> x"`},
		"hard link to itself":         {[][]Entry{{File("a", "1"), HardLink("a", "./a")}}, "/a=1"},
		"devices are left out":        {[][]Entry{{Dir("dev"), Device("dev/null"), File("dev/x", "1")}, {Device("dev/x")}}, "/dev/"},
		"write through a link inside": {
			[][]Entry{{Dir("usr/lib"), Symlink("lib", "usr/lib")}, {File("lib/a", "1")}}, `/lib=-> usr/lib" /usr/ /usr/lib/ /usr/lib/a=1`,
		},
		"links cannot leave": {
			[][]Entry{{Symlink("out", "../../../etc"), Symlink("abs", "/etc")}, {File("out/passwd", "1"), File("abs/group", "2")}},
			`/abs=-> /etc" /etc/ /etc/group=2 /etc/passwd=1 /out=-> ../../../etc"`,
		},
		"long names": {
			[][]Entry{{File(strings.Repeat("n", 255), "1"), Symlink("l", strings.Repeat("t", 300))}},
			"",
		},
		"empty image": {[][]Entry{{}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var img Image
			for i, l := range c.layers {
				img.Layers = append(img.Layers, Layer{Tar: Tar(l...), Compress: []string{"gzip", "", "zstd"}[i%3]})
			}
			fs, err := build(t, img.OCI())
			if err != nil {
				t.Fatal(err)
			}
			sound(t, fs)
			if name == "long names" {
				return
			}
			got := render(files(t, fs, "/"))
			if got != c.want {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
}

func render(files map[string]string) string {
	var out []string
	for path, content := range files {
		if strings.HasSuffix(path, "/") {
			out = append(out, path)
		} else {
			out = append(out, path+"="+strings.SplitN(content, "\n", 2)[0])
		}
	}
	return strings.Join(sorted(out), " ")
}

func TestAttributesAreKept(t *testing.T) {
	acl := "\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff\x02\x00\x07\x00\xe8\x03\x00\x00\x04\x00\x05\x00\xff\xff\xff\xff\x10\x00\x07\x00\xff\xff\xff\xff\x20\x00\x05\x00\xff\xff\xff\xff"
	fs, err := build(t, Image{Layers: []Layer{Of(
		Entry{Name: "su", Body: "x", Mode: 0o4755, UID: 70000, GID: 12},
		Entry{Name: "tmp/", Type: '5', Mode: 0o1777},
		Entry{Name: "ping", Body: "x", Mode: 0o755, Xattrs: map[string]string{
			"security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"user.note":           strings.Repeat("n", 500), "trusted.overlay.opaque": "y", "system.posix_acl_access": acl,
		}},
		HardLink("ping6", "ping"),
	)}}.OCI())
	if err != nil {
		t.Fatal(err)
	}
	sound(t, fs)
	for path, wants := range map[string][]string{
		"su":    {"Mode:  04755", "User: 70000", "Group:    12", "0x6553f100"},
		"tmp":   {"Mode:  01777"},
		"ping6": {"Links: 2", "security.capability", "user.note (500)", "system.posix_acl_access", "01 00 00 00 01 00 07 00 02 00 07 00 e8 03 00 00 04 00 05 00 10 00 07 00 20 00 05 00"},
	} {
		got := debugfs(t, fs, "stat "+path)
		for _, w := range wants {
			if !strings.Contains(got, w) {
				t.Errorf("%s lacks %q:\n%s", path, w, got)
			}
		}
		if strings.Contains(got, "overlay") {
			t.Errorf("%s kept an attribute of overlayfs", path)
		}
	}
}

func TestHostileLayersAreRefused(t *testing.T) {
	loop := []Entry{Symlink("a", "b"), Symlink("b", "a"), File("a/x", "1")}
	for name, c := range map[string]struct {
		entries []Entry
		class   errdefs.Class
	}{
		"parent":               {[]Entry{File("../etc/passwd", "x")}, errdefs.InvalidArgument},
		"parent inside":        {[]Entry{File("a/../../b", "x")}, errdefs.InvalidArgument},
		"hard link outside":    {[]Entry{HardLink("x", "../../etc/shadow")}, errdefs.InvalidArgument},
		"hard link to nothing": {[]Entry{HardLink("x", "/etc/shadow")}, errdefs.InvalidArgument},
		"hard link to folder":  {[]Entry{Dir("d"), HardLink("x", "d")}, errdefs.InvalidArgument},
		"symlink loop":         {loop, errdefs.InvalidArgument},
		"file as folder":       {[]Entry{File("a", "x"), File("a/b", "x")}, errdefs.InvalidArgument},
		"root is a file":       {[]Entry{Symlink(".", "x")}, errdefs.InvalidArgument},
		"whiteout of parent":   {[]Entry{File("a/.wh...", "")}, errdefs.InvalidArgument},
		"whiteout of nothing":  {[]Entry{File("a/.wh.", "")}, errdefs.InvalidArgument},
		"long component":       {[]Entry{File(strings.Repeat("n", 256), "x")}, errdefs.InvalidArgument},
		"long path":            {[]Entry{File(strings.Repeat("n/", 3000)+"f", "x")}, errdefs.InvalidArgument},
		"empty symlink":        {[]Entry{Symlink("a", "")}, errdefs.InvalidArgument},
		"huge symlink":         {[]Entry{Symlink("a", strings.Repeat("n", 5000))}, errdefs.InvalidArgument},
		"unknown type":         {[]Entry{{Name: "a", Type: 'Z'}}, errdefs.InvalidArgument},
		"attribute too big":    {[]Entry{{Name: "a", Xattrs: map[string]string{"user.a": strings.Repeat("x", 5000)}}}, errdefs.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := build(t, Image{Layers: []Layer{Of(c.entries...)}}.OCI())
			if !errdefs.Is(err, c.class) {
				t.Errorf("got %v (%v), want %v", err, errdefs.ClassOf(err), c.class)
			}
		})
	}
}

func TestHostileArchivesAreRefused(t *testing.T) {
	good := Image{Layers: []Layer{Of(File("a", "1"))}}
	tamper := func(f func(*Layout)) []byte {
		var l Layout
		l.Close(good.Blobs(&l))
		f(&l)
		return l.Tar()
	}
	without := func(prefix string) []byte {
		return tamper(func(l *Layout) {
			for i, f := range l.Files {
				if strings.HasPrefix(f.Name, prefix) {
					l.Files = append(l.Files[:i], l.Files[i+1:]...)
					return
				}
			}
		})
	}
	blob, _ := good.Layers[0].Blob()
	layerName := "blobs/sha256/" + Digest(blob)[7:]
	deep := func() []byte {
		var l Layout
		d := good.Blobs(&l)
		for range 10 {
			d = l.Index(d)
		}
		l.Close(d)
		return l.Tar()
	}
	for name, c := range map[string]struct {
		archive []byte
		class   errdefs.Class
		says    string
	}{
		"traversal":       {tamper(func(l *Layout) { l.Files = append(l.Files, File("../x", "")) }), errdefs.InvalidArgument, "outside"},
		"absolute":        {tamper(func(l *Layout) { l.Files = append(l.Files, File("/etc/x", "")) }), errdefs.InvalidArgument, "outside"},
		"link outside":    {tamper(func(l *Layout) { l.Files = append(l.Files, Symlink("a/b", "../../x")) }), errdefs.InvalidArgument, "outside"},
		"absolute link":   {tamper(func(l *Layout) { l.Files = append(l.Files, Symlink("a", "/etc/passwd")) }), errdefs.InvalidArgument, "outside"},
		"device":          {tamper(func(l *Layout) { l.Files = append(l.Files, Device("null")) }), errdefs.InvalidArgument, "neither file nor folder"},
		"twice":           {tamper(func(l *Layout) { l.Files = append(l.Files, File("./index.json", "{}")) }), errdefs.InvalidArgument, "twice"},
		"missing layer":   {without(layerName), errdefs.DataLoss, "missing"},
		"changed layer":   {tamper(func(l *Layout) { change(l, layerName) }), errdefs.DataLoss, "digest"},
		"wrong diff id":   {Image{Layers: good.Layers, DiffIDs: []string{Digest([]byte("other"))}}.OCI(), errdefs.DataLoss, "expected"},
		"missing diff id": {Image{Layers: good.Layers, DiffIDs: []string{}}.OCI(), errdefs.InvalidArgument, "lists 0"},
		"no layers":       {Image{DiffIDs: []string{}}.OCI(), errdefs.InvalidArgument, "no file system layers"},
		"other platform":  {Image{Layers: good.Layers, OS: "windows"}.OCI(), errdefs.Unsupported, "windows/amd64"},
		"NUL in command":  {Image{Layers: good.Layers, Cmd: []string{"a\x00b"}}.OCI(), errdefs.InvalidArgument, "NUL"},
		"deep indexes":    {deep(), errdefs.InvalidArgument, "nested"},
		"bad json":        {Tar(File("oci-layout", "{}"), File("index.json", "[[[")), errdefs.InvalidArgument, "index"},
		"empty index":     {Tar(File("oci-layout", "{}"), File("index.json", "{}")), errdefs.InvalidArgument, "no image"},
		"docker bad json": {Tar(File("manifest.json", "{")), errdefs.InvalidArgument, "docker save"},
		"docker no image": {Tar(File("manifest.json", "[]")), errdefs.InvalidArgument, "0 of them"},
		"huge index":      {Tar(File("oci-layout", "{}"), File("index.json", strings.Repeat(" ", 9<<20))), errdefs.InvalidArgument, "allowed"},
		"gzip garbage":    {Image{Layers: []Layer{{Tar: []byte("\x1f\x8b rubbish")}}}.OCI(), errdefs.DataLoss, "damaged"},
		"layer no tar":    {Image{Layers: []Layer{{Tar: bytes.Repeat([]byte("rubbish "), 100)}}}.OCI(), errdefs.DataLoss, "damaged"},
		"layer cut":       {Image{Layers: []Layer{{Tar: Of(File("a", strings.Repeat("x", 5000))).Tar[:3000]}}}.OCI(), errdefs.DataLoss, "truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := build(t, c.archive)
			if !errdefs.Is(err, c.class) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
		})
	}
}

func change(l *Layout, name string) {
	for i := range l.Files {
		if l.Files[i].Name == name {
			b := []byte(l.Files[i].Body)
			b[600] ^= 1
			l.Files[i].Body = string(b)
		}
	}
}

func TestOneOfManyIsChosen(t *testing.T) {
	of := func(body, arch string) Image {
		return Image{Layers: []Layer{Of(File("a", body))}, Arch: arch}
	}
	platform := func(d Descriptor, os, arch string) Descriptor {
		d.Platform = map[string]string{"os": os, "architecture": arch}
		return d
	}
	named := func(d Descriptor, name string) Descriptor {
		d.Annotations = map[string]string{"org.opencontainers.image.ref.name": name}
		return d
	}
	amd, arm, other := of("amd", ""), of("arm", "arm64"), of("other", "")
	multi := func(nested bool) []byte {
		var l Layout
		list := []Descriptor{
			platform(arm.Blobs(&l), "linux", "arm64"), platform(amd.Blobs(&l), "linux", "amd64"),
			{MediaType: MediaManifest, Digest: Digest([]byte("absent")), Platform: map[string]string{"os": "windows", "architecture": "amd64"}},
			{MediaType: MediaManifest, Digest: Digest([]byte("attestation")), Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest"}},
		}
		if nested {
			list = []Descriptor{l.Index(list...)}
		}
		l.Close(list...)
		return l.Tar()
	}
	two := func(a, b string) []byte {
		var l Layout
		l.Close(named(amd.Blobs(&l), a), named(other.Blobs(&l), b))
		return l.Tar()
	}
	docker := Docker(map[string]Image{"app:latest": amd, "other:1": other})
	old := Tar(File("manifest.json", `[{"Config":"c","Layers":["b/layer.tar"]}]`), File("c", string(amd.Config())),
		Symlink("b/layer.tar", "../a/layer.tar"), File("a/layer.tar", string(amd.Layers[0].Tar)))
	for name, c := range map[string]struct {
		archive []byte
		ref     string
		want    string
	}{
		"multi-arch":          {multi(false), "app:latest", amd.ID()},
		"nested index":        {multi(true), "app:latest", amd.ID()},
		"by tag":              {two("v1", "v2"), "app:v2", other.ID()},
		"by name":             {two("docker.io/library/app:v1", "docker.io/library/x:v1"), "x:v1", other.ID()},
		"ambiguous":           {two("v1", "v2"), "app:v3", ""},
		"docker by tag":       {docker, "other:1", other.ID()},
		"docker unknown tag":  {docker, "third:1", ""},
		"docker linked layer": {old, "app:latest", amd.ID()},
		"only other platform": {arm.OCI(), "app:latest", ""},
		"docker-style single": {Docker(map[string]Image{"whatever:x": amd}), "app:latest", amd.ID()},
	} {
		t.Run(name, func(t *testing.T) {
			img, err := choose(t, c.archive, c.ref)
			if c.want == "" {
				if !errdefs.IsInvalid(err) && !errdefs.Is(err, errdefs.Unsupported) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil || img.ID != c.want {
				t.Errorf("got %+v, %v; want %s", img, err, c.want)
			}
		})
	}
}

func TestCanceledUnpackStops(t *testing.T) {
	img, err := choose(t, Image{Layers: []Layer{Of(File("a", "1"))}}.OCI(), "app:latest")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := stackOf(t, ctx, img); !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("got %v", err)
	}
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
