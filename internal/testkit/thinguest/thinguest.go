// Package thinguest boots the machine that `make lvm-guest` builds, whose kernel has device-mapper, for tests that need thin pools of LVM.
//
// It knows nothing of what a test does there: a script of the test runs in the machine.
package thinguest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

const diskSize = 1 << 30 // bytes, sparse

// Machine says what runs in the machine.
type Machine struct {
	Start  string            // script that runs as root when the machine has booted; the machine is switched off when it ends
	Files  map[string][]byte // programs and other files, by path without a slash at the front
	CPUs   int               // 0: 1
	Memory int               // MiB; all files are in it
	Limit  time.Duration     // for all of it
}

// Run boots the machine and returns what it has said on its console. /dev/vda there is an empty disk of 1 GiB. The test fails if the
// machine does not end in time. COCOON_LVM_OUTPUT names a file that gets the output as it comes.
func Run(t testing.TB, m Machine) string {
	t.Helper()
	qemu := need.QEMU(t)
	kernel, initramfs := need.Built(t, "bin/lvm/vmlinux", "make lvm-guest"), need.Built(t, "bin/lvm/initramfs", "make lvm-guest")
	dir := t.TempDir()
	base, err := os.ReadFile(initramfs)
	if err != nil {
		t.Fatal(err)
	}
	files := maps.Clone(m.Files)
	files["start"] = []byte(m.Start)
	disk := filepath.Join(dir, "disk")
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "initramfs"), append(base, cpio(files)...), 0o600), os.WriteFile(disk, nil, 0o600), os.Truncate(disk, diskSize)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), m.Limit)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(
		ctx, qemu, "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot",
		"-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-machine", "q35", "-smp", strconv.Itoa(max(1, m.CPUs)), "-m", strconv.Itoa(m.Memory),
		"-kernel", kernel, "-initrd", filepath.Join(dir, "initramfs"),
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check cryptomgr.notests audit=0",
		"-drive", "if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file="+disk, "-device", "virtio-blk-pci,drive=disk",
		"-device", "virtio-rng-pci", "-serial", "stdio",
	)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stdout = &out
	if path := os.Getenv("COCOON_LVM_OUTPUT"); path != "" {
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
	if err != nil {
		t.Fatalf("the machine: %v, %v\n%s", err, ctx.Err(), said)
	}
	return said
}

// Tests compiles the tests of the package in the working folder that have the build tag lvmguest.
func Tests(t testing.TB) []byte {
	t.Helper()
	program := filepath.Join(t.TempDir(), "test")
	cmd := exec.CommandContext(t.Context(), need.Tool(t, "go"), "test", "-c", "-trimpath", "-vet=off", "-ldflags=-s -w", "-tags", "lvmguest", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("compile the tests of the machine: %v\n%s", err, out)
	}
	text, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	return text
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
	made := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for at := range name {
			if dir := name[:at]; name[at] == '/' && !made[dir] {
				add(dir, 0o40755, nil)
				made[dir] = true
			}
		}
		add(name, 0o100755, files[name])
	}
	add("TRAILER!!!", 0, nil)
	return out.Bytes()
}
