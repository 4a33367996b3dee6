//go:build vm

package lvm_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

const (
	guestTime = 20 * time.Minute // on a busy machine; a minute or two on others
	guestDisk = 1 << 30          // bytes, sparse
)

// quickTests are the tests of the guest that are quick enough for every run. `make test-lvm` runs all of them.
const quickTests = "^(TestDevices|TestFull)$"

// TestVMThinPool runs tests with the build tag lvmguest in a guest whose kernel has device-mapper, on a real thin pool. COCOON_LVM_RUN
// chooses others.
func TestVMThinPool(t *testing.T) {
	qemu := need.QEMU(t)
	kernel, initramfs := need.Built(t, "bin/lvm/vmlinux", "make lvm-guest"), need.Built(t, "bin/lvm/initramfs", "make lvm-guest")
	dir := t.TempDir()
	program := filepath.Join(dir, "test")
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "go"), "test", "-c", "-trimpath", "-vet=off", "-ldflags=-s -w", "-tags", "lvmguest", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("compile the tests of the guest: %v\n%s", err, out)
	}
	base, err := os.ReadFile(initramfs)
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	run := "#!/bin/sh\nexport TMPDIR=/tmp\n/test -test.v -test.timeout 20m -test.run '" + cmp.Or(os.Getenv("COCOON_LVM_RUN"), quickTests) + "'\necho \"exit status $?\"\n"
	archive := append(base, cpio(map[string][]byte{"test": tests, "start": []byte(run)})...)
	disk := filepath.Join(dir, "disk")
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "initramfs"), archive, 0o600), os.WriteFile(disk, nil, 0o600), os.Truncate(disk, guestDisk)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), guestTime)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(
		ctx, qemu, "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot",
		"-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-machine", "q35", "-smp", "1", "-m", "768",
		"-kernel", kernel, "-initrd", filepath.Join(dir, "initramfs"),
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check cryptomgr.notests audit=0",
		"-drive", "if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file="+disk, "-device", "virtio-blk-pci,drive=disk",
		"-device", "virtio-rng-pci", "-serial", "stdio",
	)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stdout = &out
	if path := os.Getenv("COCOON_LVM_OUTPUT"); path != "" { // what the guest says, as it runs
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		cmd.Stdout = io.MultiWriter(&out, f)
	}
	cmd.Stderr = cmd.Stdout
	err = cmd.Run()
	said := strings.ReplaceAll(out.String(), "\r\n", "\n")
	for _, line := range regexp.MustCompile(`(?m)^\s*--- .*$`).FindAllString(said, -1) {
		t.Log(line)
	}
	if err != nil || !strings.Contains(said, "\nPASS\nexit status 0\n") {
		t.Errorf("the guest: %v, %v\n%s", err, ctx.Err(), said)
	}
}

// cpio returns an archive of programs, which the kernel unpacks after the one before it (newc).
func cpio(files map[string][]byte) []byte {
	var out bytes.Buffer
	pad := func() { out.Write(make([]byte, (4-out.Len()%4)%4)) }
	add := func(name string, mode int, data []byte) {
		fmt.Fprintf(&out, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", 0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
		out.WriteString(name + "\x00")
		pad()
		out.Write(data)
		pad()
	}
	for name, data := range files {
		add(name, 0o100755, data)
	}
	add("TRAILER!!!", 0, nil)
	return out.Bytes()
}
