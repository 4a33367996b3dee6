package microvm

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// engine is one with a VM that has a log.
type engine struct {
	Engine
	removed []string
}

func (*engine) Logs(_ context.Context, _ string, _ guest.LogOptions, fn func(guest.LogEntry) error) error {
	return fn(guest.LogEntry{Data: []byte("last words\n")})
}

func (e *engine) Remove(_ context.Context, ref string, _ bool) error {
	e.removed = append(e.removed, ref)
	return nil
}

// A VM is removed although its log cannot be kept: it may be what fills the disk.
func TestRemoveWithoutItsLog(t *testing.T) {
	e, dir := &engine{}, t.TempDir()
	d := New(Deps{Engine: e, Logs: dir, Log: slog.New(slog.DiscardHandler)})
	i := reconcile.Instance{Name: "web", ID: "one", StartedAt: time.Unix(1, 0)}
	if err := d.Remove(t.Context(), i); err != nil || len(e.removed) != 1 {
		t.Fatal(err, e.removed)
	}
	if files, err := d.logs.files("web"); err != nil || len(files) != 1 {
		t.Errorf("kept: %v, %v", files, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "full"), nil, 0o600); err != nil { // where the folder of the logs would be
		t.Fatal(err)
	}
	i.Name, i.ID = "full", "two"
	if err := d.logs.keep(t.Context(), e, i); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the log is kept: %v", err)
	}
	if err := d.Remove(t.Context(), i); err != nil || len(e.removed) != 2 {
		t.Error(err, e.removed)
	}
}

// files are those that a test names, as images.
type files struct{ Files }

func (files) Ready(_ context.Context, b Boot) (kernelImage, rootfsImage string, err error) {
	return "kernel of " + b.Kernel + " " + b.Initramfs, "files of " + b.Rootfs, nil
}

// A VM with a kernel of its own boots its files, with an initramfs if it has one.
func TestOwnKernel(t *testing.T) {
	const args = "ro root=/dev/vda console=ttyS0 reboot=k panic=1 ip=dhcp quiet"
	d := New(Deps{Files: files{}})
	for initramfs, want := range map[string]vm.Kernel{
		"":   {Volume: kernelVolume, Path: KernelFile, Args: args},
		"/i": {Volume: kernelVolume, Path: KernelFile, Initrd: InitramfsFile, Args: args},
	} {
		w := &capsulev1.Workload{Name: "own", MicroVm: &capsulev1.MicroVMSpec{KernelPath: "/k", InitramfsPath: initramfs, RootfsPath: "/r", KernelCmdlineExtra: "quiet"}}
		s, err := d.spec(t.Context(), w, "hash")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Kernel(); got == nil || *got != want {
			t.Errorf("initramfs %q: the kernel is %+v, want %+v", initramfs, got, want)
		}
		if s.Image != "files of /r" || len(s.Volumes) != 1 || s.Volumes[0].Image != "kernel of /k "+initramfs {
			t.Errorf("initramfs %q: the images are %q and %+v", initramfs, s.Image, s.Volumes)
		}
	}
}

// A backend is refused by name where it does not work now; nothing stands in for it. Without one, the default of the machine runs the VM.
func TestBackendMustWorkHere(t *testing.T) {
	for backend, driver := range map[capsulev1.MicroVMBackend]string{
		capsulev1.MicroVMBackend_MICRO_VM_BACKEND_UNSPECIFIED: "",
		capsulev1.MicroVMBackend_MICRO_VM_BACKEND_QEMU:        "qemu",
		capsulev1.MicroVMBackend_MICRO_VM_BACKEND_FIRECRACKER: "firecracker",
	} {
		w := &capsulev1.Workload{Name: "vm", MicroVm: &capsulev1.MicroVMSpec{Image: "demo", Backend: backend}}
		if s, err := Spec(w, ""); err != nil || s.Driver != driver {
			t.Errorf("%s is the driver %q, %v", backend, s.Driver, err)
		}
		for _, here := range [][]string{{"qemu"}, {"firecracker"}, {"firecracker", "qemu"}} {
			d := New(Deps{Hypervisors: func(context.Context) []string { return here }})
			err := d.Check(t.Context(), w)
			if works := driver == "" || slices.Contains(here, driver); errdefs.Is(err, errdefs.Unsupported) == works {
				t.Errorf("%s with %v: %v", backend, here, err)
			}
			if err != nil && strings.Contains(err.Error(), "on QEMU") {
				t.Errorf("%v: it runs in the default hypervisor, whichever that is", err)
			}
		}
	}
}
