//go:build vm

package cocoond_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMHypervisorsDisk boots a disk image by firmware in Cloud Hypervisor, which reads raw disks only. The image is a compressed qcow2.
func TestVMHypervisorsDisk(t *testing.T) {
	const driver = "cloud-hypervisor"
	n := newNode(t, fmt.Sprintf("cloudHypervisor: {binary: %s, firmware: %s}", need.Hypervisor(t, driver), need.Hypervisor(t, "hypervisor-fw")))
	info, err := n.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(info.Drivers, func(d nodewire.Driver) bool { return d.Name == driver })
	if d := info.Drivers[at]; d.Error != "" {
		t.Skip(d.Error)
	} else if !slices.Contains(d.Firmware, string(vm.FirmwareUEFI)) {
		t.Errorf("with a firmware it is %+v", d)
	}
	path := filepath.Join(t.TempDir(), "system.qcow2")
	if text, err := exec.Command(need.Tool(t, "qemu-img"), "convert", "-c", "-O", "qcow2", need.Built(t, "bin/guest/disk.img", "make guest"), path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	system, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer system.Close()
	if _, err := n.ImportImage(t.Context(), "system", system, nil); err != nil {
		t.Fatal(err)
	}
	_, err = n.Launch(t.Context(), vm.Spec{Name: "web", Driver: driver, Image: "system", CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}}})
	if err != nil {
		t.Fatal(err)
	}
	var said string
	n.within(15*time.Minute, "its system says so", func() bool { // its firmware reads the disk sector by sector
		r, err := n.Inspect(t.Context(), "web")
		if err != nil || r.State != vm.StateRunning || len(r.NICs) == 0 {
			t.Fatalf("it is %s, %v", r.State, err)
		}
		res, err := http.Get("http://" + r.NICs[0].IP + "/")
		if err != nil {
			return false
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		said = string(text)
		return err == nil
	})
	if said != "disk-demo web\n" {
		t.Errorf("it says %q", said)
	}
	raw, err := filepath.Glob(filepath.Join(n.dir, "state", "*", "*", "*", "disk.raw"))
	if err != nil || len(raw) != 2 {
		t.Errorf("raw disks: %v, %v; want that of the image and that of the VM", raw, err)
	}
	if r, err := n.Stop(t.Context(), "web", 2*time.Minute); err != nil || r.State != vm.StateStopped || r.Reason != vm.ReasonStopped {
		t.Errorf("its power button: %s, %s, %v", r.State, r.Reason, err)
	}
	if err := n.Remove(t.Context(), "web", false); err != nil {
		t.Error(err)
	}
}
