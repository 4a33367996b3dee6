//go:build vm

package qemu

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// unsigned returns a disk with a boot loader that nobody has signed.
func unsigned(t *testing.T) vm.Disk {
	t.Helper()
	const grub = "/usr/lib/grub/x86_64-efi/monolithic/grubx64.efi"
	if _, err := os.Stat(grub); err != nil {
		need.Missing(t, "GRUB for UEFI is missing; run `make setup`")
	}
	if _, err := exec.LookPath("mcopy"); err != nil {
		need.Missing(t, "mtools are missing; run `make setup`")
	}
	path := filepath.Join(secretDir(t), "disk.raw")
	run(t, "qemu-img", "create", "-q", "-f", "raw", path, "16M")
	run(t, "mformat", "-i", path, "::")
	run(t, "mmd", "-i", path, "::/EFI", "::/EFI/BOOT")
	run(t, "mcopy", "-i", path, grub, "::/EFI/BOOT/BOOTX64.EFI")
	return vm.Disk{Path: path, Format: vm.DiskRaw, Serial: "root", Role: vm.RoleCOW}
}

func uefiPlan(t *testing.T, disk vm.Disk, uefi vm.UEFI) hypervisor.Plan {
	t.Helper()
	d := testDriver(t)
	if code, _ := d.ovmf(uefi.SecureBoot); code == "" {
		need.Missing(t, "OVMF is missing; run `make setup`")
	}
	return hypervisor.Plan{
		ID: vm.NewID(), Name: "test", CPUs: 1, Memory: 192 << 20, Dir: deepDir(t), FirmwareDir: secretDir(t),
		Boot: vm.Boot{Firmware: vm.FirmwareUEFI}, Disks: []vm.Disk{disk}, UEFI: uefi,
	}
}

// A firmware with Secure Boot refuses the boot loader that one without it starts.
func TestSecureBoot(t *testing.T) {
	d := testDriver(t)
	disk := unsigned(t)
	i := start(t, d, uefiPlan(t, disk, vm.UEFI{}))
	if log := logged(t, i, "BdsDxe: starting Boot"); strings.Contains(log, "Access Denied") {
		t.Errorf("without Secure Boot: %s", log)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	logged(t, start(t, d, uefiPlan(t, disk, vm.UEFI{SecureBoot: true})), "Access Denied")
}

// The variables of UEFI are new at each start unless they are kept. Those of another firmware are refused.
func TestKeptVariables(t *testing.T) {
	d := testDriver(t)
	disk := unsigned(t)
	for _, keep := range []bool{false, true} {
		p := uefiPlan(t, disk, vm.UEFI{Persistent: keep})
		path := filepath.Join(map[bool]string{false: p.Dir, true: p.FirmwareDir}[keep], varsFile)
		boot := func() os.FileInfo {
			i := start(t, d, p)
			logged(t, i, "BdsDxe: starting Boot")
			if err := i.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			st, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			return st
		}
		if same := os.SameFile(boot(), boot()); same != keep {
			t.Errorf("kept: %v, want %v", same, keep)
		}
		if !keep {
			continue
		}
		if err := os.Truncate(path, 1<<20); err != nil {
			t.Fatal(err)
		}
		if i, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("variables of another firmware: %v", err)
			_ = i.Kill(t.Context())
		}
	}
}
