package local_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/ociimage"

	"cocoonstack.io/cocoon/internal/image"
)

// bigImage has two layers of many files, 64 MiB in all, half of it compressible.
func bigImage() []byte {
	var img ociimage.Image
	rng := rand.NewChaCha8([32]byte{1})
	for l := range 2 {
		var entries []ociimage.Entry
		for i := range 2000 {
			b := make([]byte, 16<<10)
			_, _ = rng.Read(b[:8<<10])
			entries = append(entries, ociimage.File(fmt.Sprintf("l%d/d%d/f%d", l, i%50, i), string(b)))
		}
		img.Layers = append(img.Layers, ociimage.Layer{Tar: ociimage.Tar(entries...), Compress: "gzip"})
	}
	return img.OCI()
}

func BenchmarkImport(b *testing.B) {
	data := bigImage()
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		b.StopTimer()
		dir := b.TempDir()
		b.StartTimer()
		if _, err := open(b, dir).Import(b.Context(), "big", bytes.NewReader(data), nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPrepare(b *testing.B) {
	s, dir := open(b, b.TempDir()), b.TempDir()
	img, err := s.Import(b.Context(), "app", bytes.NewReader(app("x").OCI()), nil)
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	for b.Loop() {
		vm := filepath.Join(dir, fmt.Sprint(n))
		n++
		if err := os.Mkdir(vm, 0o700); err != nil {
			b.Fatal(err)
		}
		if _, err := s.Prepare(b.Context(), img, image.Layout{Dir: vm}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := open(b, b.TempDir())
	if _, err := s.Import(b.Context(), "app", bytes.NewReader(app("x").OCI()), nil); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Get(b.Context(), "app"); err != nil {
			b.Fatal(err)
		}
	}
}
