package conformance

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// made is the time of every file of ours in an image.
var made = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// file is one file, folder or link of an image's layer.
type file struct {
	name string
	mode int64
	data []byte
	link string // symbolic link
	dir  bool
}

// sources are the programs that images are made of.
type sources struct {
	dir     string // what hack/conformance/build.sh leaves
	busybox string // static
}

// images returns the stand-in of each image that the tests use and that we have one for, by the last part of its name.
func images(s sources) (map[string]v1.Image, error) {
	userland := filepath.Join(s.dir, "userland.tar")
	debian, err := tarball.LayerFromFile(userland, tarball.WithCompressionLevel(gzip.BestSpeed), tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("layer of Debian's tools: %w", err)
	}
	has, err := names(userland)
	if err != nil {
		return nil, err
	}
	applets, err := s.applets()
	if err != nil {
		return nil, err
	}
	small := slices.Concat(base(), s.shell(applets), s.programs("bin/getent", "bin/printenv", "bin/sh"))
	full := slices.Concat(base(), s.complete(applets, has))
	agnhost := slices.Concat(full, s.program("agnhost", "agnhost", 0o755), s.pages("porter"), []file{{name: "agnhost-2", link: "agnhost"}, {name: "uploads", dir: true, mode: 0o1777}})

	// A test mounts kitten's files, and knows its system by this file.
	alpine := []file{{name: "etc/os-release", mode: 0o644, data: []byte("NAME=\"Alpine Linux\"\nID=alpine\n")}}

	recipes := map[string]struct {
		under  v1.Layer // nil: none
		files  []file
		config v1.Config
	}{
		"agnhost":           {debian, agnhost, v1.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}},
		"nautilus":          {debian, slices.Concat(agnhost, s.pages("nautilus")), v1.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"test-webserver"}}},
		"kitten":            {debian, slices.Concat(agnhost, s.pages("kitten"), alpine), v1.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"test-webserver"}}},
		"glibc-dns-testing": {debian, full, v1.Config{Cmd: []string{"bash"}}},
		"ipc-utils":         {debian, full, v1.Config{Cmd: []string{"sh"}}},
		"busybox":           {nil, small, v1.Config{Cmd: []string{"sh"}}},
		"nonroot":           {nil, small, v1.Config{Cmd: []string{"sh"}, User: "1234"}},
		"nonewprivs":        {nil, slices.Concat(small, s.program("usr/local/bin/nnp", "nnp", 0o6755)), v1.Config{Cmd: []string{"nnp"}}},
		"pause":             {nil, s.program("pause", "standin", 0o755), v1.Config{Entrypoint: []string{"/pause"}, User: "65535:65535"}},
		"nginx": {
			nil, slices.Concat(small, []file{{name: "usr/share/nginx/html/index.html", mode: 0o644, data: []byte("<title>Welcome to nginx!</title>\n")}}),
			v1.Config{Entrypoint: []string{"/bin/busybox", "httpd"}, Cmd: []string{"-f", "-p", "80", "-h", "/usr/share/nginx/html"}},
		},
	}
	all := map[string]v1.Image{}
	layers := map[string]v1.Layer{}
	for _, name := range slices.Sorted(maps.Keys(recipes)) {
		r := recipes[name]
		layer, err := pack(r.files, layers)
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", name, err)
		}
		r.config.Env = []string{searchPath}
		if all[name], err = assemble(r.config, r.under, layer); err != nil {
			return nil, fmt.Errorf("image %s: %w", name, err)
		}
	}
	return all, nil
}

// base is what every image with a shell has. The tests know the users and groups by their names.
func base() []file {
	var files []file
	for _, dir := range []string{"bin", "dev", "etc", "proc", "run", "sys", "usr", "usr/bin", "usr/local", "usr/local/bin", "usr/share", "var"} {
		files = append(files, file{name: dir, mode: 0o755, dir: true})
	}
	return append(files, []file{
		{name: "etc/passwd", mode: 0o644, data: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\nuser-defined-in-image:x:1000:1000::/home:/bin/sh\n")},
		{name: "etc/group", mode: 0o644, data: []byte("root:x:0:\nnogroup:x:65534:\nuser-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n")},
		{name: "etc/nsswitch.conf", mode: 0o644, data: []byte("passwd: files\ngroup: files\nhosts: files dns\n")},
		{name: "root", mode: 0o700, dir: true},
		{name: "home", mode: 0o755, dir: true},
		{name: "tmp", mode: 0o1777, dir: true},
	}...)
}

// applets asks busybox what it can do.
func (s sources) applets() ([]string, error) {
	out, err := exec.Command(s.busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its applets: %w", s.busybox, err)
	}
	return slices.DeleteFunc(strings.Fields(string(out)), func(name string) bool { return name == "busybox" || name == "linuxrc" }), nil
}

// shell is busybox with its applets, and bash for what its shell cannot do.
func (s sources) shell(applets []string) []file {
	files := []file{{name: "bin/busybox", mode: 0o755, data: mustRead(s.busybox)}, {name: "bin/bash", mode: 0o755, data: s.fromUserland("bin/bash-static")}}
	for _, name := range applets {
		if name != "sh" {
			files = append(files, file{name: "bin/" + name, link: "busybox"})
		}
	}
	return files
}

// complete adds to Debian's tools the names that its packages set when they are configured, and busybox's other applets. The shell is
// a static one, which starts sooner; that of busybox would take its own nc.
func (s sources) complete(applets []string, has map[string]bool) []file {
	files := []file{
		{name: "bin/busybox", mode: 0o755, data: mustRead(s.busybox)},
		{name: "bin/sh", link: "bash-static"},
		{name: "bin/nc", link: "nc.openbsd"},
		{name: "usr/bin/awk", link: "gawk"},
	}
	has["sh"], has["nc"], has["awk"] = true, true, true
	for _, name := range applets {
		if !has[name] {
			files = append(files, file{name: "bin/" + name, link: "busybox"})
		}
	}
	return files
}

// program is one of the built programs at a path of an image.
func (s sources) program(at, name string, mode int64) []file {
	return []file{{name: at, mode: mode, data: mustRead(filepath.Join(s.dir, name))}}
}

// programs puts our own program at several paths.
func (s sources) programs(at ...string) []file {
	files := s.program("bin/standin", "standin", 0o755)
	for _, name := range at {
		files = append(files, file{name: name, link: "/bin/standin"})
	}
	return files
}

// pages are the files of a folder, at the root of an image.
func (s sources) pages(folder string) []file {
	var files []file
	for _, path := range must(filepath.Glob(filepath.Join(s.dir, folder, "*"))) {
		files = append(files, file{name: filepath.Base(path), mode: 0o644, data: mustRead(path)})
	}
	return files
}

// fromUserland reads one file of Debian's tools.
func (s sources) fromUserland(name string) []byte {
	var data []byte
	err := eachEntry(filepath.Join(s.dir, "userland.tar"), func(h *tar.Header, r io.Reader) (err error) {
		if path.Clean(h.Name) == name {
			data, err = io.ReadAll(r)
		}
		return err
	})
	if err == nil && data == nil {
		err = fmt.Errorf("userland.tar has no %s", name)
	}
	if err != nil {
		panic(err)
	}
	return data
}

// names are the commands in an archive's folders of programs.
func names(archive string) (map[string]bool, error) {
	has := map[string]bool{}
	err := eachEntry(archive, func(h *tar.Header, _ io.Reader) error {
		if dir, name := path.Split(path.Clean(h.Name)); strings.HasSuffix(dir, "bin/") {
			has[name] = true
		}
		return nil
	})
	return has, err
}

func eachEntry(archive string, do func(*tar.Header, io.Reader) error) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", archive, err)
		}
		if err := do(h, r); err != nil {
			return err
		}
	}
}

// pack makes a layer of files. Layers of the same bytes are one.
func pack(files []file, packed map[string]v1.Layer) (v1.Layer, error) {
	files = slices.Clone(files)
	slices.SortStableFunc(files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), Typeflag: tar.TypeReg, ModTime: made}
		switch {
		case f.dir:
			h.Typeflag, h.Name = tar.TypeDir, f.name+"/"
		case f.link != "":
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.link, 0o777
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil },
		tarball.WithCompressionLevel(gzip.BestSpeed), tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	id, err := layer.DiffID()
	if err != nil {
		return nil, err
	}
	if same, ok := packed[id.String()]; ok {
		return same, nil
	}
	packed[id.String()] = layer
	return layer, nil
}

func assemble(config v1.Config, layers ...v1.Layer) (v1.Image, error) {
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	for _, layer := range layers {
		if layer == nil {
			continue
		}
		var err error
		if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, MediaType: types.OCILayer, History: v1.History{Created: v1.Time{Time: made}}}); err != nil {
			return nil, err
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Created, cfg.Config = "linux", "amd64", v1.Time{Time: made}, config
	return mutate.ConfigFile(img, cfg)
}

// mustRead reads a file that the build has left. Without it there is nothing to run.
func mustRead(path string) []byte { return must(os.ReadFile(path)) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
