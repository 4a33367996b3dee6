package machine

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

//go:embed start.sh
var start string

// Program runs on the machine of `make kvm-guest`, as root. It sees all files of this host; what it writes goes with the machine.
type Program struct {
	Checkout string   // has bin/kvm
	Args     []string // the program, by its path, and its arguments
	Dir      string   // its working folder
	Env      []string
	CPUs     int
	Memory   int // MiB; new files are in it too
	Output   io.Writer
}

// Exec boots the machine, runs the program there and returns its exit code. If the machine ends before the program does, the error has the
// end of its console.
func Exec(ctx context.Context, qemu string, p Program) (code int, err error) {
	kernel, initramfs := filepath.Join(p.Checkout, "bin/kvm/vmlinux"), filepath.Join(p.Checkout, "bin/kvm/initramfs")
	if _, err := os.Stat(initramfs); err != nil {
		return 0, fmt.Errorf("the machine with KVM is missing, run make kvm-guest: %w", err)
	}
	dir, err := os.MkdirTemp("", "kvm")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	own, console, status := filepath.Join(dir, "initramfs"), filepath.Join(dir, "console"), filepath.Join(dir, "status")
	if err := add(own, initramfs, map[string][]byte{"start": []byte(start), "program": []byte(p.script())}); err != nil {
		return 0, err
	}
	cmd := command(
		ctx, qemu, kernel, own, p.CPUs, p.Memory,
		"-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap", "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		"-device", "virtio-serial-pci", "-serial", "file:"+console,
		// Not stdio: the port would be closed when standard input ends.
		"-chardev", "file,id=output,path=/proc/self/fd/3", "-device", "virtserialport,chardev=output,name=output",
		"-chardev", "file,id=status,path="+status, "-device", "virtserialport,chardev=status,name=status",
	)
	var complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &complaint, &complaint
	err = runWithOutput(cmd, p.Output)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	text, readErr := os.ReadFile(status)
	code, parseErr := strconv.Atoi(strings.TrimSpace(string(text)))
	if err := errors.Join(err, readErr, parseErr); err != nil {
		said, _ := os.ReadFile(console) // there may be none
		return 0, fmt.Errorf("the machine ended before the program: %w\n%s%s", err, complaint.Bytes(), said[max(0, len(said)-4096):])
	}
	return code, nil
}

// runWithOutput gives the command a pipe as descriptor 3.
func runWithOutput(cmd *exec.Cmd, output io.Writer) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return err
	}
	_, copyErr := io.Copy(output, r)
	return errors.Join(cmd.Wait(), copyErr)
}

// script starts the program in the machine, when it has this host's files.
func (p Program) script() string {
	var s strings.Builder
	for _, one := range slices.Sorted(slices.Values(p.Env)) {
		if name, value, _ := strings.Cut(one, "="); identifier(name) {
			fmt.Fprintf(&s, "export %s=%s\n", name, quote(value))
		}
	}
	s.WriteString("export TMPDIR=/run/tmp\n")
	fmt.Fprintf(&s, "cd %s\nexec", quote(p.Dir))
	for _, arg := range p.Args {
		s.WriteString(" " + quote(arg))
	}
	return s.String() + "\n"
}

// identifier reports whether a shell can have a variable of this name.
func identifier(name string) bool {
	for i, c := range name {
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
