package cocoond

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/appliance/microvm"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// Files of the folder become images, once for each content. No path and no link leaves the folder.
func TestOwnKernels(t *testing.T) {
	store, err := local.New(local.Config{Dir: filepath.Join(t.TempDir(), "images")})
	if err != nil {
		t.Fatal(err)
	}
	o, ctx := ownKernels{t.TempDir(), catalog.Images{Store: store}}, t.Context()
	kernel, rootfs := filepath.Join(o.dir, "vmlinux"), filepath.Join(o.dir, "root.ext4")
	if err := os.WriteFile(kernel, []byte("a kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(need.Tool(t, "mkfs.ext4"), "-q", rootfs, "8M").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, link := range [][2]string{{"/etc/passwd", "out"}, {"vmlinux", "in"}} {
		if err := os.Symlink(link[0], filepath.Join(o.dir, link[1])); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]errdefs.Class{
		"/etc/passwd": errdefs.InvalidArgument, o.dir: errdefs.InvalidArgument, o.dir + "/../x": errdefs.InvalidArgument,
		o.dir + "/out": errdefs.FailedPrecondition, o.dir + "/none": errdefs.FailedPrecondition,
	} {
		if err := o.Check(path, rootfs); !errdefs.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := o.Check(filepath.Join(o.dir, "in"), rootfs); err != nil {
		t.Error(err)
	}
	k, r, err := o.Ready(ctx, kernel, rootfs)
	if err != nil {
		t.Fatal(err)
	}
	img, err := store.Get(ctx, k)
	if err != nil || img.Type != vm.ImageOCI {
		t.Fatal(img, err)
	}
	f, err := store.OpenFile(ctx, img, microvm.KernelFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if text, err := io.ReadAll(f); err != nil || string(text) != "a kernel" {
		t.Errorf("%q, %v", text, err)
	}
	if img, err := store.Get(ctx, r); err != nil || img.Type == vm.ImageOCI {
		t.Error(img, err)
	}
	if k2, r2, err := o.Ready(ctx, kernel, rootfs); err != nil || k2 != k || r2 != r {
		t.Error(k2, r2, err)
	}
	if err := os.WriteFile(kernel, []byte("another kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k2, _, err := o.Ready(ctx, kernel, rootfs); err != nil || k2 == k {
		t.Error("a kernel that has changed is the same image", err)
	}
}
