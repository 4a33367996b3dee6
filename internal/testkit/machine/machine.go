// Package machine boots the small emulated machines that `make lvm-guest` and `make kvm-guest` build, for what needs another kernel than
// this host's: thin pools of LVM, or KVM, vhost and taps.
//
// Run is for tests that bring a script and all files that it needs. Exec runs one program on the machine with KVM, which sees this host's
// files; hack/in-kvm.sh is its command. The package knows nothing of what a test does there.
package machine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

const diskSize = 1 << 30 // bytes, sparse

// Machine says what runs in the machine of `make lvm-guest`.
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
	files := maps.Clone(m.Files)
	files["start"] = []byte(m.Start)
	disk, own := filepath.Join(dir, "disk"), filepath.Join(dir, "initramfs")
	if err := errors.Join(add(own, initramfs, files), os.WriteFile(disk, nil, 0o600), os.Truncate(disk, diskSize)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), m.Limit)
	defer cancel()
	var out bytes.Buffer
	cmd := command(
		ctx, qemu, kernel, own, max(1, m.CPUs), m.Memory,
		"-drive", "if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file="+disk, "-device", "virtio-blk-pci,drive=disk", "-serial", "stdio",
	)
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
	err := cmd.Run()
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

// command returns the QEMU of a machine whose CPUs have KVM. It dies with this process. memory is in MiB.
func command(ctx context.Context, qemu, kernel, initramfs string, cpus, memory int, devices ...string) *exec.Cmd {
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot",
		"-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-machine", "q35", "-smp", strconv.Itoa(cpus), "-m", strconv.Itoa(memory),
		"-kernel", kernel, "-initrd", initramfs,
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off" + testguest.ClockArgs() + " no_timer_check cryptomgr.notests audit=0",
		"-device", "virtio-rng-pci",
	}
	cmd := exec.CommandContext(ctx, qemu, append(args, devices...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// add writes an initramfs that is base with more files.
func add(path, base string, files map[string][]byte) error {
	text, err := os.ReadFile(base)
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, cpio(files)...), 0o600)
}
