// Command images packs static binaries into container images, one archive each, without a container engine. An image contains
// only the binary and the certificate authorities of this machine, and runs as an unprivileged user.
//
// It builds no binary and pushes no image: use crane, skopeo or podman with the archives.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// epoch is the time of every file, so that the same binary produces the same image.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

const authorities = "/etc/ssl/certs/ca-certificates.crt"

func main() {
	registry := flag.String("registry", "cocoonstack.io", "where the images will be: REGISTRY/NAME:TAG")
	tag := flag.String("tag", "latest", "tag of the images")
	out := flag.String("out", "bin/images", "folder of the archives NAME.tar")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: images [flags] NAME=BINARY...")
		flag.PrintDefaults()
	}
	flag.Parse()
	for _, arg := range flag.Args() {
		program, binary, ok := strings.Cut(arg, "=")
		if !ok {
			flag.Usage()
			os.Exit(2)
		}
		if err := pack(program, binary, *registry+"/"+program+":"+*tag, filepath.Join(*out, program+".tar")); err != nil {
			fmt.Fprintln(os.Stderr, "images:", err)
			os.Exit(1)
		}
	}
}

func pack(program, binary, image, path string) error {
	tag, err := name.NewTag(image)
	if err != nil {
		return fmt.Errorf("name of image %s: %w", program, err)
	}
	text, err := layer(program, binary)
	if err != nil {
		return fmt.Errorf("image %s: %w", program, err)
	}
	files, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil })
	if err != nil {
		return fmt.Errorf("image %s: %w", program, err)
	}
	img, err := mutate.AppendLayers(empty.Image, files)
	if err != nil {
		return fmt.Errorf("image %s: %w", program, err)
	}
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{
		OS: "linux", Architecture: runtime.GOARCH, Created: v1.Time{Time: epoch},
		RootFS: must(img.ConfigFile()).RootFS, History: must(img.ConfigFile()).History,
		Config: v1.Config{Entrypoint: []string{"/" + program}, User: "65532:65532", WorkingDir: "/"},
	})
	if err != nil {
		return fmt.Errorf("image %s: %w", program, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := tarball.WriteToFile(path, tag, img); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	fmt.Println(path, image)
	return nil
}

func must(c *v1.ConfigFile, err error) *v1.ConfigFile {
	if err != nil {
		panic(err) // cannot fail: the image was made here
	}
	return c
}

// layer is a tar with the program and the certificate authorities that it trusts.
func layer(program, binary string) ([]byte, error) {
	data, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	trusted, err := os.ReadFile(authorities)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		mode int64
		data []byte
	}{{program, 0o755, data}, {strings.TrimPrefix(authorities, "/"), 0o644, trusted}} {
		if f.data == nil {
			continue
		}
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), Typeflag: tar.TypeReg, ModTime: epoch}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}
