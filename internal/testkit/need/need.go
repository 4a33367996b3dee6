// Package need gates tests on what the machine offers: need.Root(t), need.QEMU(t), need.GuestKernel(t).
//
// A gate skips the test with the reason on a laptop, and fails it where the environment says COCOON_TEST_REQUIRE=1 (CI):
// a test that silently never ran is worse than a red one. The package installs nothing and starts nothing.
package need

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// RequireEnv is the variable that turns skips into failures when it is 1.
const RequireEnv = "COCOON_TEST_REQUIRE"

// Root needs the privileges to make links, namespaces and mounts.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, "root is needed: run the tests with sudo -E")
	}
}

// Tun needs root and a /dev/net/tun that opens.
func Tun(t testing.TB) {
	t.Helper()
	Root(t)
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		Missing(t, "tap devices are needed: "+err.Error()+"; modprobe tun")
		return
	}
	f.Close()
}

// IPv6 needs a loopback with an IPv6 address.
func IPv6(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		Missing(t, "IPv6 is needed: "+err.Error())
		return
	}
	l.Close()
}

// KVM needs /dev/kvm and a CPU that reports virtualisation, as accel auto does.
func KVM(t testing.TB) {
	t.Helper()
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		Missing(t, "KVM is needed: "+err.Error())
		return
	}
	f.Close()
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !strings.Contains(string(info), " vmx") && !strings.Contains(string(info), " svm") {
		Missing(t, "KVM is needed: the CPU shows neither vmx nor svm")
	}
}

// QEMU needs the system emulator of this architecture and returns its path.
func QEMU(t testing.TB) string {
	t.Helper()
	name := map[string]string{"amd64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}[runtime.GOARCH]
	if name == "" {
		Missing(t, "no QEMU is known for "+runtime.GOARCH)
		return ""
	}
	return Tool(t, name)
}

// Hypervisor finds a program of `make hypervisors` (see FindHypervisor) and returns its path. Where it is nowhere the test is skipped, even if
// nothing may be missing: its build needs Rust.
func Hypervisor(t testing.TB, name string) string {
	t.Helper()
	path := FindHypervisor(name)
	if path == "" {
		t.Skip(name + " is needed: run make hypervisors, put it into PATH or ../shared/bin, or name its folder by COCOON_TEST_BIN")
	}
	return path
}

// HypervisorDirs are the folders beside those of PATH in which programs of `make hypervisors` may be: COCOON_TEST_BIN, bin/hypervisors, and
// shared/bin beside the checkout.
func HypervisorDirs() []string {
	var dirs []string
	if dir := os.Getenv("COCOON_TEST_BIN"); dir != "" {
		dirs = append(dirs, dir)
	}
	if root, err := moduleRoot(); err == nil {
		dirs = append(dirs, filepath.Join(root, "bin/hypervisors"), filepath.Join(root, "../shared/bin"))
	}
	return dirs
}

// FindHypervisor finds a program of `make hypervisors` in PATH or in HypervisorDirs, and returns its path, "" if it is in none of them.
func FindHypervisor(name string) string {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), HypervisorDirs()...) {
		if dir == "" {
			continue
		}
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			if path, err = filepath.EvalSymlinks(path); err == nil { // processes see it by its own name
				return path
			}
		}
	}
	return ""
}

// Tool needs a program in PATH and returns its path.
func Tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, name+" is needed: install it (make setup does)")
	}
	return path
}

// GuestKernel needs what `make guest` builds and returns the paths of the kernel and the initramfs.
func GuestKernel(t testing.TB) (kernel, initramfs string) {
	t.Helper()
	return Built(t, "bin/guest/vmlinux", "make guest"), Built(t, "bin/guest/initramfs", "make guest")
}

// Built needs a file that a make target puts in the checkout, and returns its absolute path.
func Built(t testing.TB, path, command string) string {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		Missing(t, "the checkout is needed: "+err.Error())
		return ""
	}
	full := filepath.Join(root, path)
	if _, err := os.Stat(full); err != nil {
		Missing(t, path+" is needed: run "+command)
	}
	return full
}

// Required reports whether a missing prerequisite is a failure here.
func Required() bool { return os.Getenv(RequireEnv) == "1" }

// Missing skips the test with the reason why, or fails it where nothing may be missing.
func Missing(t testing.TB, why string) {
	t.Helper()
	if Required() {
		t.Fatal(why)
		return
	}
	t.Skip(why)
}

// moduleRoot climbs from the working folder, a test's own package, to the go.mod of this module.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(b), "module cocoonstack.io/cocoon\n") {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", os.ErrNotExist
		}
		dir = up
	}
}
