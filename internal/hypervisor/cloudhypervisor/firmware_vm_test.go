//go:build vm

package cloudhypervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestFirmware boots the demo disk by each firmware. Its system obeys the power button.
func TestFirmware(t *testing.T) {
	a := needGuest(t)
	for _, firmware := range []string{testFirmware, edk2Firmware} {
		t.Run(firmware, func(t *testing.T) {
			d := driverWith(t, need.Hypervisor(t, firmware))
			p := a.Firmware(t)
			i, err := d.Launch(t.Context(), p)
			if err != nil {
				text, _ := os.ReadFile(filepath.Join(p.Dir, programLog))
				t.Fatalf("%v\n%s", err, text)
			}
			defer func() { _ = i.Kill(t.Context()) }()
			testguest.Booted()(t, i)
			if err := i.Shutdown(t.Context()); err != nil {
				t.Fatal(err)
			}
			if e, err := i.Wait(t.Context()); err != nil || !e.GuestShutdown {
				t.Errorf("%+v, %v", e, err)
			}
		})
	}
}

// The memory of a guest is huge pages. A VM for which there are too few does not start.
func TestHugePages(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	p.Huge = vm.HugePages2M
	path := filepath.Join(p.Huge.Dir(jail.Sysfs), "nr_hugepages")
	was, err := os.ReadFile(path)
	if err != nil {
		need.Missing(t, "huge pages: "+err.Error())
	}
	if strings.TrimSpace(string(was)) != "0" {
		t.Skip("the machine has huge pages, and others may use them")
	}
	if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Fatalf("without huge pages: %v", err)
	}
	t.Cleanup(func() { _ = os.WriteFile(path, was, 0o600) })
	if err := os.WriteFile(path, fmt.Append(nil, p.Memory/int64(p.Huge)), 0o600); err != nil {
		t.Fatal(err)
	}
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	testguest.Logged(t, i, "GUEST-READY")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
	if want := fmt.Sprintf("HugetlbPages:\t%8d kB", p.Memory>>10); err != nil || !strings.Contains(string(status), want) {
		t.Errorf("its status has no %q, %v:\n%s", want, err, status)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := jail.EnoughHugePages(jail.Sysfs, hypervisor.Plan{Huge: p.Huge, Memory: p.Memory}); err != nil {
		t.Errorf("after its end: %v", err)
	}
}
