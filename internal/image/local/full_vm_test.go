//go:build vm

package local_test

import (
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// filling is a reader that fills the disk after half of it was read.
type filling struct {
	io.Reader
	left int
	fill func()
}

func (f *filling) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p[:min(len(p), 64<<10)])
	if before := f.left; before > 0 {
		if f.left -= n; f.left <= 0 {
			f.fill()
		}
	}
	return n, err
}

// TestVMDiskFullInTheMiddle needs its own file system, so it uses the namespace in which tests of this tier run.
func TestVMDiskFullInTheMiddle(t *testing.T) {
	const size = 24 << 20
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=32m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	s, err := local.New(local.Config{Dir: filepath.Join(dir, "images")})
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other")
	fill := func() {
		f, err := os.Create(other)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := io.Copy(f, rand.Reader); err == nil {
			t.Fatal("the disk did not get full")
		}
	}
	disk := make([]byte, size)
	_, _ = rand.Read(disk[512:])
	disk[510], disk[511] = 0x55, 0xaa
	archive := ociimage.Image{Entrypoint: []string{"/a"}, Layers: []ociimage.Layer{ociimage.Of(ociimage.File("a", string(disk)))}}.OCI()
	for name, content := range map[string][]byte{"disk": disk, "container": archive} {
		r, w := io.Pipe()
		go func() {
			_, err := w.Write(content)
			w.CloseWithError(err)
		}()
		_, err := s.Import(t.Context(), name, &filling{Reader: r, left: size / 2, fill: fill}, nil)
		r.Close()
		if !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Errorf("%s: %v (%s)", name, err, errdefs.ClassOf(err))
		}
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		for _, left := range []string{"tmp/*", "data/*", "links/*", "layers/*"} {
			if found, _ := filepath.Glob(filepath.Join(dir, "images", left)); len(found) != 0 {
				t.Errorf("%s: left behind: %v", name, found)
			}
		}
	}
}
