//go:build bench

package bench

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	contract "cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

const (
	layerRounds = 3
	layerGoal   = 1.5 // of the time of tar -x
)

// layers compares converting the layers of a container image into file systems with unpacking them.
func layers(t *testing.T, results *table) {
	dir := scratch(t)
	for _, kind := range []string{"", "gzip"} {
		img := layeredImage(kind)
		name := "plain"
		if kind != "" {
			name = kind
		}
		var files []string
		for n, l := range img.Layers {
			blob, _ := l.Blob()
			file := filepath.Join(dir, fmt.Sprintf("%s-%d", name, n))
			if err := os.WriteFile(file, blob, 0o600); err != nil {
				t.Fatal(err)
			}
			files = append(files, file)
		}
		parsed := must(oci.NewImage(img.Config(), len(img.Layers), "amd64"))(t)
		var ours, theirs samples
		for n := range layerRounds {
			ours = append(ours, buildLayers(t, filepath.Join(dir, fmt.Sprint("store", name, n)), parsed, files))
			theirs = append(theirs, unpackLayers(t, filepath.Join(dir, fmt.Sprint("tree", name, n)), files))
		}
		ratio := float64(ours.median()) / float64(theirs.median())
		results.add(row{
			what: fmt.Sprintf("layers to file systems, %s, %d MiB", name, layersBytes>>20), a: ms(ours.median()), b: "tar -x " + ms(theirs.median()),
			figure: fmt.Sprintf("%.2fx", ratio), goal: fmt.Sprintf("<= %.1fx", layerGoal), n: layerRounds, missed: ratio > layerGoal,
		})
		if kind == "gzip" {
			registryPull(t, results, dir, img)
		}
	}
}

const layersBytes = 256 << 20

// layeredImage returns an image of two layers, with files of typical sizes, half of whose bytes are compressible.
func layeredImage(compress string) ociimage.Image {
	var img ociimage.Image
	rng := rand.New(rand.NewPCG(1, 2))
	noise := rand.NewChaCha8([32]byte{})
	for l := range 2 {
		var entries []ociimage.Entry
		for i, left := 0, layersBytes/2; left > 0; i++ {
			size := min(left, 1<<(8+rng.IntN(14))) // 256 B to 2 MiB
			b := make([]byte, size)
			_, _ = noise.Read(b[:size/2])
			if i%50 == 0 {
				entries = append(entries, ociimage.Dir(fmt.Sprintf("l%d-%d", l, i/50)))
			}
			entries = append(entries, ociimage.File(fmt.Sprintf("l%d-%d/file%d", l, i/50, i), string(b)))
			left -= size
		}
		img.Layers = append(img.Layers, ociimage.Layer{Tar: ociimage.Tar(entries...), Compress: compress})
	}
	return img
}

func newStore(t *testing.T, dir string) *local.Store {
	t.Helper()
	return must(local.New(local.Config{Dir: dir, Arch: "amd64"}))(t)
}

func buildLayers(t *testing.T, dir string, img *oci.Image, files []string) time.Duration {
	t.Helper()
	s := newStore(t, dir)
	defer os.RemoveAll(dir)
	start := time.Now()
	_, err := s.PutImage(t.Context(), "bench", img, func(_ context.Context, n int) (io.ReadCloser, error) { return os.Open(files[n]) }, contract.Fetched{})
	if err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

func unpackLayers(t *testing.T, dir string, files []string) time.Duration {
	t.Helper()
	defer os.RemoveAll(dir)
	start := time.Now()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if out, err := exec.CommandContext(t.Context(), "tar", "-xf", f, "-C", dir).CombinedOutput(); err != nil {
			t.Fatalf("tar: %v %s", err, out)
		}
	}
	return time.Since(start)
}

// registryPull measures a pull from a registry on loopback, and how much a second VM of the image adds to the store.
func registryPull(t *testing.T, results *table, dir string, img ociimage.Image) {
	t.Helper()
	srv := httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	var l ociimage.Layout
	l.Push(t, srv.URL, "app", "v1", img.Blobs(&l))
	ref := strings.TrimPrefix(srv.URL, "http://") + "/app:v1"
	var took samples
	for n := range layerRounds {
		s := newStore(t, filepath.Join(dir, fmt.Sprint("pulled", n)))
		start := time.Now()
		stored, err := distribution.New(distribution.Config{}, s).Pull(t.Context(), ref, ref, nil, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(start))
		if n > 0 {
			continue
		}
		prepare := func() {
			if _, err := s.Prepare(t.Context(), stored.Image, contract.Layout{Dir: t.TempDir(), Storage: guestStorage}); err != nil {
				t.Fatal(err)
			}
		}
		prepare()
		before := occupied(t, filepath.Join(dir, "pulled0"))
		prepare()
		added := occupied(t, filepath.Join(dir, "pulled0")) - before
		results.add(row{what: "second VM of an image, bytes in the store", a: fmt.Sprint(added), goal: "0", n: 1, missed: added != 0})
	}
	results.add(row{what: fmt.Sprintf("pull from a registry, gzip, %d MiB", layersBytes>>20), a: ms(took.median()), n: layerRounds})
}

func occupied(t *testing.T, dir string) (sum int64) {
	t.Helper()
	err := filepath.Walk(dir, func(_ string, i os.FileInfo, err error) error {
		if err == nil && i.Mode().IsRegular() {
			sum += i.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
