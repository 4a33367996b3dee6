package engine_test

import (
	"context"
	"errors"
	"hash/crc32"
	"os"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// kernelSpec is a VM that boots the kernel of the image "layered" and has no disk of its own.
func kernelSpec() vm.Spec {
	s := cloud()
	s.Image = vm.FromVolume("boot")
	s.Volumes = []vm.Volume{{Name: "boot", Kind: vm.VolumeImage, Image: "layered"}}
	s.Hardware = &vm.Hardware{Kernel: &vm.Kernel{Volume: "boot", Path: "/boot/vmlinuz", Initrd: "/boot/initrd", Args: "a=b"}}
	return s
}

// boots are the boots of the plans of a driver.
type boots struct {
	mu   sync.Mutex
	last vm.Boot
}

func (b *boots) watch(r *rig) {
	r.world.Process = func(p hypervisor.Plan) int {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.last = p.Boot
		return 4711
	}
}

// loaded are the files that the last plan boots, with its command line.
func (b *boots) loaded(t *testing.T) (out [3]string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, path := range []string{b.last.Kernel, b.last.Initrd} {
		text, err := os.ReadFile(path)
		st, also := os.Stat(path)
		if err := errors.Join(err, also); err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o444 {
			t.Errorf("%s has the mode %s", path, st.Mode())
		}
		out[i] = string(text)
	}
	out[2] = b.last.Cmdline
	if b.last.Direct() {
		t.Errorf("no firmware boots it: %+v", b.last)
	}
	return out
}

// A VM boots the kernel of an image, which is in use as long as the VM. It finds the kernel again over a restart of the engine and of itself,
// and also if its copy is gone.
func TestKernel(t *testing.T) {
	var b boots
	r, ctx := newRig(t, b.watch), t.Context()
	want := [3]string{enginetest.KernelFiles["/boot/vmlinuz"], enginetest.KernelFiles["/boot/initrd"], "a=b"}
	sums := vm.KernelSums{Kernel: crc32.ChecksumIEEE([]byte(want[0])), Initrd: crc32.ChecksumIEEE([]byte(want[1]))}
	boot := func(what string) {
		t.Helper()
		if d := diff.Of(sums, r.must(r.Inspect(ctx, "web")).KernelSums); d != "" {
			t.Errorf("%s: checksums: %s", what, d)
		}
		if d := diff.Of(want, b.loaded(t)); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		if rec := r.must(r.Inspect(ctx, "web")); len(rec.ImageVolumes) != 1 || len(rec.ImageVolumes[0].Layers) > 0 || !r.ImageInUse("sha256:layered") {
			t.Errorf("%s: %+v", what, rec.ImageVolumes)
		}
	}
	rec := r.must(r.Launch(ctx, kernelSpec()))
	boot("launched")
	r.placed("without a disk", "cidata", rec)
	r.restart()
	r.must(r.Stop(ctx, "web", 0))
	r.must(r.Start(ctx, "web"))
	boot("started again")
	if err := os.Remove(rec.Boot.Kernel); err != nil {
		t.Fatal(err)
	}
	r.must(r.Restart(ctx, "web", 0))
	boot("without its copy")
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	if r.ImageInUse("sha256:layered") {
		t.Error("the image of a VM that is gone is in use")
	}

	s := kernelSpec()
	s.Image, s.Hardware.Kernel.Initrd = "cloud", ""
	s.Firmware = vm.FirmwareUEFI
	rec = r.must(r.Launch(ctx, s))
	r.placed("with a disk", "cow, cidata", rec)
	if rec.Boot.Firmware != vm.FirmwareUEFI || rec.Boot.Initrd != "" || rec.Boot.Direct() {
		t.Errorf("with a disk: %+v", rec.Boot)
	}
}

// No snapshot has the kernel of an image.
func TestKernelIsNotSaved(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := kernelSpec()
	s.Image = "cloud"
	r.must(r.Launch(ctx, s))
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "a snapshot", err, errdefs.FailedPrecondition)
	_, err = r.Hibernate(ctx, "web", "")
	wantClass(t, "a hibernation", err, errdefs.FailedPrecondition)
	r.must(r.Stop(ctx, "web", 0))
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "a snapshot of its disks", err, errdefs.FailedPrecondition)
}

// A kernel that does not exist, or that no guest can boot, leaves nothing behind.
func TestKernelThatCannotBe(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	for what, c := range map[string]struct {
		change func(*vm.Spec)
		class  errdefs.Class
	}{
		"no file":         {func(s *vm.Spec) { s.Hardware.Kernel.Path = "/boot/none" }, errdefs.NotFound},
		"no initrd":       {func(s *vm.Spec) { s.Hardware.Kernel.Initrd = "/boot/none" }, errdefs.NotFound},
		"a large file":    {func(s *vm.Spec) { s.Hardware.Kernel.Initrd = "/huge" }, errdefs.InvalidArgument},
		"of no image":     {func(s *vm.Spec) { s.Volumes[0].Image = "none" }, errdefs.NotFound},
		"of a disk image": {func(s *vm.Spec) { s.Volumes[0].Image = "disk" }, errdefs.InvalidArgument},
		"of a container":  {func(s *vm.Spec) { s.Image = "demo" }, errdefs.InvalidArgument},
		"more files": {func(s *vm.Spec) {
			s.Volumes = append(s.Volumes, vm.Volume{Name: "more", Kind: vm.VolumeImage, Image: "layered"})
		}, errdefs.InvalidArgument},
	} {
		s := kernelSpec()
		c.change(&s)
		_, err := r.Launch(ctx, s)
		wantClass(t, what, err, c.class)
	}
	r.clearAll()
}

func launchedByKernel(ctx context.Context, r *rig) error {
	if _, err := r.Launch(ctx, kernelSpec()); err != nil {
		return err
	}
	return until(ctx, r, ready)
}
