//go:build vm

package qemu

import (
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
			p.Boot = vm.Boot{Firmware: vm.FirmwareBIOS, Kernel: a.kernel, Initrd: a.initrd, Cmdline: "console=ttyS0 rdinit=/testinit only.this=1"}
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
