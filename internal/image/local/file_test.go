package local_test

import (
	"bytes"
	"io"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// A file of an image is found as in the root folder of its container: by layers, and by links that lead nowhere out of it.
func TestOpenFile(t *testing.T) {
	s := open(t, t.TempDir())
	layers := []ociimage.Layer{
		ociimage.Of(ociimage.Dir("boot"), ociimage.File("boot/vmlinuz", "old"), ociimage.File("boot/gone", "x"), ociimage.Dir("etc"), ociimage.File("etc/shadow", "the image's own")),
		ociimage.Of(ociimage.File("boot/vmlinuz", "new"), ociimage.Whiteout("boot", "gone"), ociimage.Symlink("boot/link", "vmlinuz"), ociimage.Symlink("boot/shadow", "/etc/shadow"),
			ociimage.Symlink("boot/out", "../../../../etc/shadow"), ociimage.Symlink("kernels", "boot"), ociimage.Symlink("boot/loop", "loop"), ociimage.Symlink("boot/nowhere", "/proc/1/environ"),
			ociimage.Symlink("boot/self", "."), ociimage.Device("boot/null")),
	}
	img, err := s.Import(t.Context(), "kernel", bytes.NewReader(ociimage.Image{Layers: layers}.OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	read := func(path string) (string, error) {
		f, err := s.OpenFile(t.Context(), img, path)
		if err != nil {
			return "", err
		}
		defer f.Close()
		data, err := io.ReadAll(f)
		if int64(len(data)) != f.Size {
			t.Errorf("%s: %d bytes of %d", path, len(data), f.Size)
		}
		return string(data), err
	}
	for path, want := range map[string]string{
		"/boot/vmlinuz": "new", "/boot/link": "new", "/kernels/vmlinuz": "new", "/kernels/link": "new", "/boot/shadow": "the image's own", "/boot/out": "the image's own",
	} {
		got, err := read(path)
		if d := diff.Of(want, got); d != "" || err != nil {
			t.Errorf("%s: %s %v", path, d, err)
		}
	}
	for path, is := range map[string]func(error) bool{
		"/boot/gone": errdefs.IsNotFound, "/boot/loop": errdefs.IsNotFound, "/boot/nowhere": errdefs.IsNotFound, "/boot/self": errdefs.IsNotFound, "/boot/vmlinuz/x": errdefs.IsNotFound,
		"/boot": errdefs.IsInvalid, "/": errdefs.IsNotFound, "": errdefs.IsNotFound,
	} {
		if got, err := read(path); !is(err) {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	if got, err := read("/boot/null"); err == nil {
		t.Errorf("a device: %q", got)
	}
	disk := put(t, s, "disk", "disk", web)
	if _, err := s.OpenFile(t.Context(), disk, "/boot/vmlinuz"); !errdefs.IsInvalid(err) {
		t.Errorf("a disk image: %v", err)
	}
	if _, err := s.OpenFile(t.Context(), image.Image{ID: "sha256:none", Type: img.Type}, "/boot/vmlinuz"); !errdefs.IsNotFound(err) {
		t.Errorf("no image: %v", err)
	}
	f, err := s.OpenFile(t.Context(), img, "/boot/vmlinuz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := s.Remove(t.Context(), "kernel", func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(f); string(data) != "new" || err != nil {
		t.Errorf("after the removal: %q, %v", data, err)
	}
}
