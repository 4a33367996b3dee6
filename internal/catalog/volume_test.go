package catalog_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// here pulls what a store has.
type here struct {
	store *local.Store
	err   error // of PullAlways
}

func (h *here) Pull(ctx context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	if r.Policy == image.PullAlways {
		return image.Image{}, h.err
	}
	return h.store.Get(ctx, r.Name)
}

// granted has the images that a namespace may use.
type granted map[string]*local.Store

func (g granted) Get(ctx context.Context, ref string) (image.Image, error) {
	if s := g[vm.Behalf(ctx).Namespace]; s != nil {
		return s.Get(ctx, ref)
	}
	return image.Image{}, errdefs.NotFoundf("there is no image %s", ref)
}

func TestVolumeFromImage(t *testing.T) {
	need.Tool(t, "qemu-img")
	dir := t.TempDir()
	disk := make([]byte, 2<<20)
	disk[510], disk[511] = 0x55, 0xaa
	copy(disk[1<<20+17:], "what a guest wrote")
	raw, qcow := filepath.Join(dir, "raw"), filepath.Join(dir, "qcow2")
	if err := os.WriteFile(raw, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	if msg, err := exec.Command("qemu-img", "convert", "-c", "-O", "qcow2", raw, qcow).CombinedOutput(); err != nil {
		t.Fatalf("%s", msg)
	}
	images, err := local.New(local.Config{Dir: filepath.Join(dir, "images")})
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"raw": raw, "qcow2": qcow} {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := images.Import(t.Context(), name, bytes.NewReader(b), nil); err != nil {
			t.Fatal(err)
		}
	}
	volumes, err := file.New(t.Context(), file.Config{Dir: filepath.Join(dir, "volumes")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = volumes.Close() })
	puller := &here{store: images, err: errdefs.Existsf("it was imported")}
	f := catalog.Filler{Puller: puller, Images: granted{"team": images}, Disks: images, Into: volumes}
	for _, name := range []string{"raw", "qcow2"} {
		var last image.Progress
		v, err := f.FromImage(t.Context(), volume.Spec{Name: name}, image.PullRequest{Name: name, Policy: image.PullAlways}, func(p image.Progress) { last = p })
		if err != nil || v.Size != int64(len(disk)) || last.Phase != image.PhaseFill {
			t.Fatalf("%s: %+v, %v; progress %+v", name, v, err, last)
		}
		var got bytes.Buffer
		if err := volumes.Export(t.Context(), name, &got); err != nil || !bytes.Equal(got.Bytes(), disk) {
			t.Errorf("%s: the volume has %d other bytes, %v", name, got.Len(), err)
		}
		usage, err := volumes.Usage(t.Context())
		if err != nil || usage[v.ID].Allocated >= v.Size {
			t.Errorf("%s: the volume uses %+v, %v", name, usage[v.ID], err)
		}
		v, err = f.FromImage(t.Context(), volume.Spec{Name: name + "-large", Size: 3 << 20}, image.PullRequest{Name: name, Policy: image.PullNever}, nil)
		if err != nil || v.Size != 3<<20 {
			t.Errorf("%s: larger: %+v, %v", name, v, err)
		}
		_, err = f.FromImage(t.Context(), volume.Spec{Name: name + "-small", Size: 1 << 20}, image.PullRequest{Name: name, Policy: image.PullNever}, nil)
		if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "2097152") || !strings.Contains(err.Error(), "1048576") {
			t.Errorf("%s: smaller: %v", name, err)
		}
	}
	if all, err := volumes.List(t.Context()); err != nil || len(all) != 4 {
		t.Errorf("there is %+v, %v", all, err)
	}
	_, err = f.FromImage(t.Context(), volume.Spec{Name: "none"}, image.PullRequest{Name: "none", Policy: image.PullNever}, nil)
	if !errdefs.IsNotFound(err) {
		t.Errorf("no such image: %v", err)
	}
	// A private image: the namespace that has shown credentials before may use it, others may not.
	puller.err = errdefs.Preconditionf("the registry wants credentials")
	private := image.PullRequest{Name: "raw", Policy: image.PullAlways}
	if v, err := f.FromImage(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "team"}), volume.Spec{Name: "private"}, private, nil); err != nil || v.Owner.Namespace != "team" {
		t.Errorf("a private image: %+v, %v", v, err)
	}
	if _, err := f.FromImage(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "other"}), volume.Spec{Name: "private"}, private, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the private image of another namespace: %v", err)
	}
	if _, err := images.OpenDisk(t.Context(), image.Image{Type: vm.ImageOCI}); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "/disk") {
		t.Errorf("a container image: %v", err)
	}
}
