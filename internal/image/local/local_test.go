package local_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/imagetest"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
)

func open(t testing.TB, dir string) *local.Store {
	t.Helper()
	s, err := local.New(local.Config{Dir: dir, Arch: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func app(body string) ociimage.Image {
	return ociimage.Image{
		Layers:     []ociimage.Layer{ociimage.Of(ociimage.Dir("bin"), ociimage.File("bin/app", body))},
		Entrypoint: []string{"/bin/app"}, Cmd: []string{"serve"}, Env: []string{"A=b=c", "EMPTY"}, User: "1000", WorkDir: "/srv",
	}
}

const diskSize = 2 << 20

// rawDisk has an MBR with one partition.
func rawDisk() []byte {
	d := make([]byte, diskSize)
	d[446+4], d[446+8] = 0x83, 1
	d[510], d[511] = 0x55, 0xaa
	copy(d[1<<20:], "content")
	return d
}

func TestStore(t *testing.T) {
	imagetest.Run(t, func(t *testing.T) image.Store { return open(t, t.TempDir()) }, imagetest.Fixtures{
		OCI: app("one").OCI(), Other: ociimage.Docker(map[string]ociimage.Image{"x:latest": app("two")}), Disk: rawDisk(), Size: diskSize,
	})
}

func TestTwoStoresOfOneFolder(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	imagetest.Run(t, func(t *testing.T) image.Store { return open(t, t.TempDir()) }, imagetest.Fixtures{
		OCI: ociimage.Gzip(app("one").OCI()), Other: ociimage.Zstd(app("two").OCI()), Disk: ociimage.Gzip(rawDisk()), Size: diskSize,
	})
	img, err := first.Import(t.Context(), "app", bytes.NewReader(app("x").OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := open(t, dir).Get(t.Context(), "app"); err != nil || got.ID != img.ID {
		t.Errorf("another store of the folder sees %+v, %v", got, err)
	}
}

func TestConfigOfImage(t *testing.T) {
	src := app("x")
	img, err := open(t, t.TempDir()).Import(t.Context(), "app", bytes.NewReader(src.OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	if img.ID != src.ID() {
		t.Errorf("id is %s, want the digest of the configuration %s", img.ID, src.ID())
	}
	p := img.Config
	if p.Entrypoint[0] != "/bin/app" || p.Args[0] != "serve" || p.User != "1000" || p.WorkDir != "/srv" ||
		p.Env[0] != (vm.EnvVar{Name: "A", Value: "b=c"}) || p.Env[1] != (vm.EnvVar{Name: "EMPTY"}) {
		t.Errorf("configuration is %+v", p)
	}
}

// leftovers returns the content of the store's temporary folder.
func leftovers(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestBadContentIsOneClearSentence(t *testing.T) {
	good := app("x").OCI()
	gz := ociimage.Gzip(good)
	qcow := qcow2(t)
	for name, c := range map[string]struct {
		data  []byte
		class errdefs.Class
		says  string
	}{
		"empty":               {nil, errdefs.InvalidArgument, "empty"},
		"text":                {[]byte("hello"), errdefs.InvalidArgument, "unknown image format"},
		"zeros":               {make([]byte, 1<<20), errdefs.InvalidArgument, "unknown image format"},
		"a tar of files":      {ociimage.Tar(ociimage.File("etc/passwd", "x")), errdefs.InvalidArgument, "docker export"},
		"vmdk":                {append([]byte("KDMV"), make([]byte, 4096)...), errdefs.InvalidArgument, "version 0"},
		"truncated tar":       {good[:len(good)-3000], errdefs.DataLoss, "truncated"},
		"half a tar":          {good[:len(good)/2+100], errdefs.DataLoss, "truncated"},
		"truncated gzip":      {gz[:len(gz)-10], errdefs.DataLoss, "truncated"},
		"truncated gzip disk": {ociimage.Gzip(rawDisk())[:1500], errdefs.DataLoss, "truncated"},
		"truncated qcow2":     {qcow[:len(qcow)/2], errdefs.DataLoss, "truncated"},
		"truncated raw":       {partitioned(), errdefs.DataLoss, "truncated"},
		"broken gzip":         {append([]byte{0x1f, 0x8b}, make([]byte, 100)...), errdefs.DataLoss, "damaged"},
		"corrupt tar":         {corrupt(good), errdefs.DataLoss, "damaged"},
		"other architecture":  {ociimage.Image{Layers: app("x").Layers, Arch: "arm64"}.OCI(), errdefs.Unsupported, "arm64"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			_, err := open(t, dir).Import(t.Context(), "app", bytes.NewReader(c.data), nil)
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
			if left := leftovers(t, dir); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if files, _ := filepath.Glob(filepath.Join(dir, "data", "*")); len(files) > 0 {
				t.Errorf("left behind: %v", files)
			}
		})
	}
}

func corrupt(tar []byte) []byte {
	b := bytes.Clone(tar)
	i := bytes.LastIndex(b, []byte("index.json"))
	b[i+1] = 'X'
	return b
}

// partitioned is a disk whose only partition starts after its end.
func partitioned() []byte {
	d := rawDisk()
	d[446+10] = 1
	return d
}

// qcow2 makes a disk image with content, using another implementation.
func qcow2(t *testing.T, args ...string) []byte {
	t.Helper()
	raw, out := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "qcow2")
	if err := os.WriteFile(raw, append(rawDisk(), bytes.Repeat([]byte("data"), 1<<18)...), 0o600); err != nil {
		t.Fatal(err)
	}
	args = append(append([]string{"convert", "-O", "qcow2"}, args...), raw, out)
	if msg, err := exec.Command(need.Tool(t, "qemu-img"), args...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img: %v %s", err, msg)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestLimits(t *testing.T) {
	s, err := local.New(local.Config{Dir: t.TempDir(), Arch: "amd64", Disk: 1 << 20, Limits: oci.Limits{Archive: 1 << 20, Unpacked: 1 << 19, File: 1 << 18, Entries: 100}})
	if err != nil {
		t.Fatal(err)
	}
	many := make([]ociimage.Entry, 200)
	for i := range many {
		many[i] = ociimage.File("f"+strings.Repeat("x", i), "")
	}
	big := func(n int) ociimage.Entry {
		return ociimage.File("big"+strings.Repeat("b", n>>17), string(make([]byte, n)))
	}
	layer := func(e ...ociimage.Entry) []byte {
		return ociimage.Image{Layers: []ociimage.Layer{{Tar: ociimage.Tar(e...), Compress: "gzip"}}}.OCI()
	}
	for name, data := range map[string][]byte{
		"archive":    ociimage.Gzip(layer(ociimage.File("x", "y"))[:512:512]),
		"entries":    layer(many...),
		"file":       layer(big(1 << 19)),
		"unpacked":   layer(big(1<<18), big(1<<18-1), big(1<<17)),
		"disk":       ociimage.Gzip(rawDisk()),
		"deep paths": layer(ociimage.File(strings.Repeat("d/", 150)+"f", "")),
	} {
		_, err := s.Import(t.Context(), "bomb", bytes.NewReader(data), nil)
		want := errdefs.ResourceExhausted
		if name == "archive" {
			continue
		}
		if !errdefs.Is(err, want) {
			t.Errorf("%s: got %v (%v), want %v", name, err, errdefs.ClassOf(err), want)
		}
	}
	bomb := ociimage.Gzip(ociimage.Tar(ociimage.File("oci-layout", string(make([]byte, 2<<20)))))
	if _, err := s.Import(t.Context(), "bomb", bytes.NewReader(bomb), nil); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a bomb: %v", err)
	}
}

func TestCancelLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	data := app(strings.Repeat("x", 1<<20)).OCI()
	r := io.MultiReader(bytes.NewReader(data[:len(data)/2]), reader(func([]byte) (int, error) { cancel(); return 0, nil }))
	if _, err := open(t, dir).Import(ctx, "app", r, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

func TestDisksAreSoundForQEMU(t *testing.T) {
	s := open(t, t.TempDir())
	check := func(d vm.Disk, size string) {
		t.Helper()
		if out, err := exec.Command("qemu-img", "check", d.Path).CombinedOutput(); err != nil {
			t.Errorf("qemu-img check: %v %s", err, out)
		}
		out, err := exec.Command("qemu-img", "info", "--output=json", d.Path).CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte(`"virtual-size": `+size)) || !bytes.Contains(out, []byte(`"backing-filename": "`+d.Backing.Path+`"`)) ||
			!bytes.Contains(out, []byte(`"backing-filename-format": "`+string(d.Backing.Format)+`"`)) {
			t.Errorf("qemu-img info: %v %s", err, out)
		}
		if !filepath.IsAbs(d.Path) || !filepath.IsAbs(d.Backing.Path) {
			t.Errorf("paths are %s on %s", d.Path, d.Backing.Path)
		}
	}
	need.Tool(t, "qemu-img")
	for _, c := range []struct {
		name, size string
		data       []byte
		storage    int64
	}{
		{"raw", "2097152", rawDisk(), 0},
		{"raw", "8589934592", rawDisk(), 8 << 30},
		{"qcow2", "3145728", qcow2(t), 0},
		{"qcow2-v2", "1073741824", qcow2(t, "-o", "compat=0.10"), 1 << 30},
		{"qcow2-zstd", "1073741824", qcow2(t, "-c", "-o", "compression_type=zstd"), 1 << 30},
		{"qcow2-zlib", "1073741824", qcow2(t, "-c"), 1 << 30},
		{"qcow2-sub", "1073741824", qcow2(t, "-o", "extended_l2=on,cluster_size=128k"), 1 << 30},
		{"app", "16777216", app("x").OCI(), 16 << 20},
		{"app", "10737418240", app("x").OCI(), 0},
		{"app", "1099511627776", app("x").OCI(), 1 << 40},
	} {
		img, err := s.Import(t.Context(), c.name, bytes.NewReader(c.data), nil)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		root, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: c.storage})
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		check(root.Disks[len(root.Disks)-1], c.size)
	}
}

func TestTemplateIsSoundAndTheSameEverywhere(t *testing.T) {
	var paths [2]string
	for i := range paths {
		p, err := open(t, t.TempDir()).Template(t.Context(), 64<<20)
		if err != nil {
			t.Fatal(err)
		}
		paths[i] = p
		if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", p).CombinedOutput(); err != nil {
			t.Errorf("e2fsck: %v\n%s", err, out)
		}
	}
	if out, err := exec.Command("cmp", paths[0], paths[1]).CombinedOutput(); err != nil {
		t.Errorf("two templates of one size differ: %s", out)
	}
}

func TestTemplateIsNeverReplaced(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	inodes := make([]os.FileInfo, 4)
	for i := range inodes {
		wg.Go(func() {
			p, err := open(t, dir).Template(t.Context(), 32<<20)
			if err != nil {
				t.Error(err)
				return
			}
			inodes[i], _ = os.Stat(p)
		})
	}
	wg.Wait()
	for _, i := range inodes {
		if !os.SameFile(i, inodes[0]) {
			t.Error("a template was replaced while another caller had it")
		}
	}
}

func TestRootfsIsDeterministic(t *testing.T) {
	src := app("x")
	var paths [2]string
	for i, compress := range []string{"gzip", "zstd"} {
		src.Layers[0].Compress = compress
		s := open(t, t.TempDir())
		img, err := s.Import(t.Context(), "app", bytes.NewReader(src.OCI()), nil)
		if err != nil {
			t.Fatal(err)
		}
		root, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: 16 << 20})
		if err != nil {
			t.Fatal(err)
		}
		paths[i] = root.Disks[0].Path
	}
	if out, err := exec.Command("cmp", paths[0], paths[1]).CombinedOutput(); err != nil {
		t.Errorf("one image gave two file systems: %s", out)
	}
}

func TestDamagedContentIsReplacedByImport(t *testing.T) {
	s := open(t, t.TempDir())
	img, err := s.Import(t.Context(), "app", bytes.NewReader(app("x").OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	root, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	path := root.Disks[0].Path
	before, _ := os.ReadFile(path)
	if err := os.Truncate(path, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), "app", bytes.NewReader(app("x").OCI()), nil); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("the damaged file is still there")
	}
}

func TestOverlayEmptiedByPowerCutIsMadeAnew(t *testing.T) {
	s, dir := open(t, t.TempDir()), t.TempDir()
	img, err := s.Import(t.Context(), "d", bytes.NewReader(rawDisk()), nil)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, local.OverlayFile)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	head, _ := os.ReadFile(path)
	if _, err := disk.Recognise(head); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(path, []byte("something of somebody else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: dir}); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a foreign file: %v", err)
	}
}

func TestMissingMkfsNamesTheRemedy(t *testing.T) {
	s, err := local.New(local.Config{Dir: t.TempDir(), Arch: "amd64", Mkfs: "/nonexistent/mkfs.ext4"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Template(t.Context(), 16<<20); err == nil {
		t.Error("no error")
	}
}
