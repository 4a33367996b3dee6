package cocoond

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/appliance/microvm"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// Files of the folder become images, once for each content. The image of a kernel has its initramfs. No path and no link leaves the folder.
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
	initramfs, huge := filepath.Join(o.dir, "initrd"), filepath.Join(o.dir, "huge")
	if err := os.WriteFile(initramfs, []byte(strings.Repeat("drivers ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(huge, nil, 0o600), os.Truncate(huge, vm.MaxKernelFile+1)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]errdefs.Class{
		"/etc/passwd": errdefs.InvalidArgument, o.dir: errdefs.InvalidArgument, o.dir + "/../x": errdefs.InvalidArgument,
		o.dir + "/out": errdefs.FailedPrecondition, o.dir + "/none": errdefs.FailedPrecondition, huge: errdefs.InvalidArgument,
	} {
		for what, b := range map[string]microvm.Boot{
			"kernel": {Kernel: path, Rootfs: rootfs}, "initramfs": {Kernel: kernel, Initramfs: path, Rootfs: rootfs}, "file system": {Kernel: kernel, Rootfs: path},
		} {
			if what == "file system" && path == huge {
				continue // it may be large
			}
			if err := o.Check(b); !errdefs.Is(err, want) || !strings.Contains(err.Error(), filepath.Base(path)) {
				t.Errorf("%s as %s: %v", path, what, err)
			}
			if _, _, err := o.Ready(ctx, b); !errdefs.Is(err, want) {
				t.Errorf("%s as %s: ready, %v", path, what, err)
			}
		}
	}
	if err := o.Check(microvm.Boot{Kernel: filepath.Join(o.dir, "in"), Initramfs: filepath.Join(o.dir, "in"), Rootfs: rootfs}); err != nil {
		t.Error(err)
	}
	alone := microvm.Boot{Kernel: kernel, Rootfs: rootfs}
	k, r, err := o.Ready(ctx, alone)
	if err != nil {
		t.Fatal(err)
	}
	img, err := store.Get(ctx, k)
	if err != nil || img.Type != vm.ImageOCI {
		t.Fatal(img, err)
	}
	content := func(img image.Image, path, want string) {
		t.Helper()
		f, err := store.OpenFile(ctx, img, path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if text, err := io.ReadAll(f); err != nil || string(text) != want {
			t.Errorf("%s: %q, %v", path, text, err)
		}
	}
	content(img, microvm.KernelFile, "a kernel")
	if _, err := store.OpenFile(ctx, img, microvm.InitramfsFile); !errdefs.IsNotFound(err) {
		t.Errorf("an initramfs that nobody gave: %v", err)
	}
	if img, err := store.Get(ctx, r); err != nil || img.Type == vm.ImageOCI {
		t.Error(img, err)
	}
	if k2, r2, err := o.Ready(ctx, alone); err != nil || k2 != k || r2 != r {
		t.Error(k2, r2, err)
	}
	with := microvm.Boot{Kernel: kernel, Initramfs: initramfs, Rootfs: rootfs}
	ki, r2, err := o.Ready(ctx, with)
	if err != nil || ki == k || r2 != r {
		t.Fatal(ki, r2, err)
	}
	if img, err = store.Get(ctx, ki); err != nil {
		t.Fatal(err)
	}
	content(img, microvm.KernelFile, "a kernel")
	content(img, microvm.InitramfsFile, strings.Repeat("drivers ", 100))
	if err := os.WriteFile(initramfs, []byte("other drivers"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k2, _, err := o.Ready(ctx, with); err != nil || k2 == ki {
		t.Error("an initramfs that has changed is the same image", err)
	}
	if err := os.WriteFile(kernel, []byte("another kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k2, _, err := o.Ready(ctx, alone); err != nil || k2 == k {
		t.Error("a kernel that has changed is the same image", err)
	}
}
