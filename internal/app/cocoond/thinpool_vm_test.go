//go:build vm

package cocoond_test

import (
	_ "embed"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/machine"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

//go:embed testdata/thinpool.sh
var thinPoolScript []byte

// TestVMOnThinPool: a VM uses a volume on a thin pool. The volume is snapshotted and copied while the VM runs. When the pool is full, the
// VM waits, and it goes on when the pool has grown. cocoond and the VM run in a machine whose kernel has device-mapper, with the KVM that
// QEMU emulates there.
func TestVMOnThinPool(t *testing.T) {
	if os.Getenv("COCOON_LVM_RUN") == "" {
		t.Skip("it takes minutes; `make test-lvm` runs it")
	}
	kernel, initramfs := need.GuestKernel(t)
	files := map[string][]byte{"opt/thinpool.sh": thinPoolScript}
	put := func(at, path string) {
		t.Helper()
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(at, "/")] = text
	}
	for at, path := range map[string]string{
		"opt/vmlinux": kernel, "opt/initramfs": initramfs, "opt/demo.tar": need.Built(t, "bin/demo.tar", "make demo-image"),
		"opt/cocoond": need.Built(t, "bin/cocoond", "make binaries"), "opt/cocoon": need.Built(t, "bin/cocoon", "make binaries"),
	} {
		put(at, path)
	}
	ldd := need.Tool(t, "ldd")
	for at, path := range map[string]string{"/usr/bin/qemu-system-x86_64": need.Tool(t, "qemu-system-x86_64"), "/usr/sbin/mkfs.ext4": need.Tool(t, "mkfs.ext4")} {
		put(at, path)
		out, err := exec.CommandContext(t.Context(), ldd, path).Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, library := range regexp.MustCompile(`(?m)(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
			put(library[1], library[1])
		}
	}
	for _, pattern := range []string{"/usr/share/qemu/*.bin", "/usr/share/qemu/qboot.rom", "/usr/share/seabios/*.bin", "/usr/lib/*/qemu/accel-tcg-x86_64.so"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) { // a link to what is not installed
				put(path, path)
			}
		}
	}
	said := machine.Run(t, machine.Machine{Start: "#!/bin/sh\n/opt/thinpool.sh 2>&1 | cat\n", Files: files, CPUs: 2, Memory: 2560, Limit: 20 * time.Minute})
	if !strings.Contains(said, "the VM passed\n") {
		t.Errorf("the machine:\n%s", said)
	}
	for _, line := range regexp.MustCompile(`(?m)^\[[\d.]+\] .*$`).FindAllString(said, -1) {
		t.Log(line)
	}
}
