// Command demo-image writes the image cocoon/demo:latest as an OCI image layout archive, without a network and without
// privileges: busybox with its applets, a few users, and an HTTP server as the entrypoint.
//
// With -disk it writes the image cocoon/disk-demo:latest instead. That image has a disk at /disk/disk.img, where KubeVirt's container disks
// have theirs. With -pause it writes localhost/cocoon/pause:latest, the image of containerd's sandboxes on a node of `cocoon up --kubelet`.
//
// The same files and Go release give the same bytes. It imports nothing into any store.
package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	imageName     = "cocoon/demo:latest"
	diskImageName = "cocoon/disk-demo:latest"
	pauseName     = "localhost/cocoon/pause:latest"
)

// epoch is the time of every file and of the image itself, so that building twice gives the same bytes.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "demo-image:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("demo-image", flag.ExitOnError)
	busybox := flags.String("busybox", "/bin/busybox", "static busybox to put in")
	server := flags.String("server", "", "static HTTP server to put in; built from ./examples/demo-image/server when empty")
	disk := flags.String("disk", "", "disk to put in, alone")
	pause := flags.Bool("pause", false, "write the image of sandboxes")
	out := flags.String("o", "demo.tar", "archive to write")
	if err := flags.Parse(args); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "demo-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if *disk != "" {
		img, err := buildDisk(*disk)
		if err != nil {
			return err
		}
		return write(img, diskImageName, filepath.Join(tmp, "layout"), *out)
	}
	if *pause {
		img, err := buildPause(*busybox)
		if err != nil {
			return err
		}
		return write(img, pauseName, filepath.Join(tmp, "layout"), *out)
	}
	if *server == "" {
		*server = filepath.Join(tmp, "server")
		if err := buildServer(*server); err != nil {
			return err
		}
	}
	img, err := build(*busybox, *server)
	if err != nil {
		return err
	}
	return write(img, imageName, filepath.Join(tmp, "layout"), *out)
}

func buildServer(path string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", path, "cocoonstack.io/cocoon/examples/demo-image/server")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build the server: %w", err)
	}
	return nil
}

// build assembles the image: one layer for the system, one for the server.
func build(busybox, server string) (v1.Image, error) {
	system, err := systemFiles(busybox)
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(server)
	if err != nil {
		return nil, fmt.Errorf("read the server: %w", err)
	}
	return assemble(v1.Config{
		Entrypoint:   []string{"/usr/bin/server"},
		Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PORT=8080"},
		WorkingDir:   "/",
		ExposedPorts: map[string]struct{}{"80/tcp": {}, "8080/tcp": {}},
		Labels:       map[string]string{"org.opencontainers.image.title": "cocoon demo"},
	}, part{system, "busybox and its applets"}, part{[]file{{name: "usr/bin/server", mode: 0o755, data: program}}, "HTTP server"})
}

// buildDisk assembles the image of a disk. KubeVirt's disks belong to the user of its QEMU.
func buildDisk(path string) (v1.Image, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the disk: %w", err)
	}
	return assemble(v1.Config{Labels: map[string]string{"org.opencontainers.image.title": "cocoon demo disk"}},
		part{[]file{{name: "disk", mode: 0o555, dir: true}, {name: "disk/disk.img", mode: 0o444, data: data, uid: 107, gid: 107}}, "disk of a small system"})
}

// buildPause assembles the image of sandboxes: one process, which waits until it is stopped and reaps others.
func buildPause(busybox string) (v1.Image, error) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	return assemble(v1.Config{
		Entrypoint: []string{"/busybox", "sh", "-c", "trap 'exit 0' TERM INT; while :; do /busybox sleep 86400 & wait; done"},
		User:       "65535:65535",
		Labels:     map[string]string{"org.opencontainers.image.title": "cocoon pause"},
	}, part{[]file{{name: "busybox", mode: 0o755, data: program}}, "busybox"})
}

// part is a layer.
type part struct {
	files []file
	what  string
}

func assemble(config v1.Config, layers ...part) (v1.Image, error) {
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	for _, l := range layers {
		layer, err := tarLayer(l.files)
		if err != nil {
			return nil, err
		}
		if img, err = mutate.Append(img, mutate.Addendum{
			Layer: layer, MediaType: types.OCILayer, History: v1.History{CreatedBy: l.what, Created: v1.Time{Time: epoch}},
		}); err != nil {
			return nil, fmt.Errorf("add layer of %s: %w", l.what, err)
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Created = "linux", "amd64", v1.Time{Time: epoch}
	cfg.Config = config
	return mutate.ConfigFile(img, cfg)
}

type file struct {
	name     string
	mode     int64
	data     []byte
	link     string // symbolic link
	dir      bool
	uid, gid int
}

const (
	passwd = "root:x:0:0:root:/root:/bin/sh\ncocoon:x:1000:1000:cocoon:/home/cocoon:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
	group  = "root:x:0:\ncocoon:x:1000:\nnogroup:x:65534:\n"
)

func systemFiles(busybox string) ([]file, error) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	files := []file{
		{name: "etc/passwd", mode: 0o644, data: []byte(passwd)},
		{name: "etc/group", mode: 0o644, data: []byte(group)},
		{name: "etc/os-release", mode: 0o644, data: []byte("ID=cocoon-demo\nNAME=\"Cocoon demo\"\nPRETTY_NAME=\"Cocoon demo\"\n")},
		{name: "home/cocoon", mode: 0o755, dir: true, uid: 1000, gid: 1000},
		{name: "root", mode: 0o700, dir: true},
		{name: "tmp", mode: 0o1777, dir: true},
		{name: "bin/busybox", mode: 0o755, data: program},
	}
	for _, d := range []string{"bin", "dev", "etc", "home", "proc", "run", "sbin", "sys", "usr", "usr/bin", "usr/sbin", "var", "var/log"} {
		files = append(files, file{name: d, mode: 0o755, dir: true})
	}
	names, err := applets(busybox)
	if err != nil {
		return nil, err
	}
	for _, a := range names {
		if a != "busybox" && a != "linuxrc" {
			files = append(files, file{name: "bin/" + a, link: "busybox", mode: 0o777})
		}
	}
	return files, nil
}

// applets asks busybox itself what it can do.
func applets(busybox string) ([]string, error) {
	path, err := filepath.Abs(busybox)
	if err != nil {
		return nil, err
	}
	out, err := exec.Command(path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its applets: %w", busybox, err)
	}
	names := slices.Collect(func(yield func(string) bool) {
		for l := range bytes.Lines(out) {
			if !yield(string(bytes.TrimSpace(l))) {
				return
			}
		}
	})
	return slices.DeleteFunc(names, func(s string) bool { return s == "" || s != filepath.Base(s) }), nil
}

func tarLayer(files []file) (v1.Layer, error) {
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Uid: f.uid, Gid: f.gid, Size: int64(len(f.data)), Typeflag: tar.TypeReg, ModTime: epoch}
		switch {
		case f.dir:
			h.Typeflag, h.Name = tar.TypeDir, f.name+"/"
		case f.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
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
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
}

// write lays the image, called name, out in dir and packs that, sorted, into one archive.
func write(img v1.Image, name, dir, out string) (err error) {
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	if err := l.AppendImage(img,
		layout.WithAnnotations(map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": "latest"}),
		layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"})); err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(out), ".demo-image-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(pack(f, dir), f.Chmod(0o644), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	return os.Rename(f.Name(), out)
}

// pack writes the files below dir, in lexical order, as a tar archive.
func pack(w io.Writer, dir string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := tw.WriteHeader(&tar.Header{Name: filepath.ToSlash(name), Mode: 0o644, Size: int64(len(data)), Typeflag: tar.TypeReg, ModTime: epoch}); err != nil {
			return err
		}
		_, err = tw.Write(data)
		return err
	})
	return errors.Join(err, tw.Close())
}
