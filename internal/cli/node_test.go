package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNodeInfo: node info prints the abilities of each driver, in lines that fit a terminal. For a driver that does not work it prints the reason.
func TestNodeInfo(t *testing.T) {
	_, out, _ := serve(t, &node{})("", "node", "info")
	for _, want := range []string{
		"Driver     cloud-hypervisor: Cloud Hypervisor is not installed\nDriver     firecracker 1.16.1, accel kvm\nDriver     qemu (default) 7.2.22, accel tcg\n",
		"           - there is no KVM\n           - can: disk-images, emulation, pause, save, plug-disks, plug-nics, grow-disks, resize,\n             links\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%s\nlacks %q", out, want)
		}
	}
}

// TestStandIn: whoever asks for a hypervisor that the node lacks is told which one runs the VM, and why.
func TestStandIn(t *testing.T) {
	cocoon := serve(t, &node{})
	const told = "Warning: VM a runs in qemu, which stands in for cloud-hypervisor: Cloud Hypervisor is not installed\n"
	spec := filepath.Join(t.TempDir(), "spec")
	if err := os.WriteFile(spec, []byte(`{"name":"a","image":"demo","driver":"cloud-hypervisor"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ line, want string }{
		{"vm run --name a --driver cloud-hypervisor --no-wait demo", told},
		{"vm create --name a --driver cloud-hypervisor demo", told},
		{"vm run --no-wait --spec " + spec, told},
		{"vm run --name a --fc --no-wait demo", ""},
		{"vm run --name a --no-wait demo", ""},
	} {
		if code, out, errOut := cocoon("", strings.Fields(c.line)...); code != 0 || errOut != c.want || strings.Contains(out, "stands in") {
			t.Errorf("%s: code %d, %q, want %q", c.line, code, errOut, c.want)
		}
	}
}
