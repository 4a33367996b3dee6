//go:build vm

package qemu

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// A firmware boots a kernel that is a file of the node, without a disk or beside disks that nobody boots, with the given command line alone,
// and again after each reset.
func TestFirmwareBootsKernel(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	empty := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(empty, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		disks []vm.Disk
		want  string
	}{
		"no disk": {nil, "disks: macs"},
		"a disk":  {[]vm.Disk{{Path: empty, Format: vm.DiskRaw, Serial: "data", Role: vm.RoleVolume}}, "disks: data 0 macs"},
	} {
		t.Run(what, func(t *testing.T) {
			p := a.plan(t)
			p.Disks, p.Memory = c.disks, 192<<20
			p.Boot = vm.Boot{Firmware: vm.FirmwareBIOS, Kernel: a.Kernel, Initrd: a.Initrd, Cmdline: "console=ttyS0 rdinit=/testinit only.this=1"}
			i := start(t, d, p)
			logged(t, i, "GUEST-READY "+c.want)
			say(t, i, "sh cat /proc/cmdline")
			if got := line(t, i, "HEARD sh\r\n"); !strings.HasPrefix(got, "console=ttyS0 rdinit=/testinit only.this=1") {
				t.Errorf("the guest has the command line %q", got)
			}
			resetter, ok := hypervisor.As[hypervisor.Resetter](i)
			if !ok {
				t.Fatal("the guest cannot be reset")
			}
			if err := resetter.Reset(t.Context()); err != nil {
				t.Fatal(err)
			}
			await(t, "the guest is up again", func() bool { return strings.Count(consoleOf(t, i), "GUEST-READY "+c.want) == 2 })
		})
	}
}

// stub returns the kernel of the demo disk, which is a program of UEFI, too.
func (a assets) stub(t *testing.T) string {
	t.Helper()
	disk, err := os.ReadFile(filepath.Join(filepath.Dir(a.Kernel), "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	const magic, sectors, size = 0x202, 0x1f1, 0x1f4 // of the header of a bzImage
	at := bytes.Index(disk, []byte("HdrS")) - magic
	if at < 0 || !bytes.HasPrefix(disk[at:], []byte("MZ")) {
		t.Fatal("the demo disk has no kernel for UEFI")
	}
	image := disk[at:]
	length := (int(image[sectors])+1)*512 + int(binary.LittleEndian.Uint32(image[size:]))*16
	path := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(path, image[:length], 0o444); err != nil {
		t.Fatal(err)
	}
	return path
}

// UEFI boots a kernel that is one of its programs.
func TestUEFIBootsKernel(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := uefiPlan(t, vm.Disk{}, vm.UEFI{})
	p.Disks, p.Memory = nil, 256<<20
	p.Boot.Kernel, p.Boot.Initrd, p.Boot.Cmdline = a.stub(t), a.Initrd, "console=ttyS0 rdinit=/testinit"
	log := logged(t, start(t, d, p), "GUEST-READY")
	if !strings.Contains(log, "EFI stub") && !strings.Contains(log, "efi: EFI v") {
		t.Errorf("the kernel does not know UEFI: %s", log)
	}
}
