//go:build os

// Package appliance starts the image of Cocoon OS in QEMU, as a machine with UEFI firmware and as one with a shell of the test beside it, and looks at
// what it does. It builds nothing: `make os-image` does.
package appliance

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/console"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const patience = 10 * time.Minute // for anything, on a busy host

// machine is a running machine.
type machine struct {
	t      *testing.T
	serial *console.Console
	shell  *console.Console
	input  io.Writer // of the shell
	ended  chan struct{}
	begin  time.Time
	marks  int
	from   int // what the serial console has said before is not waited for
}

// now returns how much the serial console has said.
func (m *machine) now() int {
	text, _ := m.serial.Said()
	return len(text)
}

// since returns what a console has said as far as it counts.
func (m *machine) since(c *console.Console) (string, <-chan struct{}) {
	text, more := c.Said()
	if c == m.serial {
		text = text[m.from:]
	}
	return text, more
}

// wait waits until the console has each of the words after one another, and returns what it said.
func (m *machine) wait(c *console.Console, words ...string) string {
	m.t.Helper()
	limit := time.After(patience)
	for {
		text, more := m.since(c)
		if inOrder(text, words) {
			return text
		}
		select {
		case <-more:
		case <-m.ended:
			if text, _ := m.since(c); inOrder(text, words) {
				return text
			}
			m.t.Fatalf("the machine ended before it said %q:\n%s", words, tail(text))
		case <-limit:
			m.t.Fatalf("the machine did not say %q:\n%s", words, tail(text))
		}
	}
}

// waitEach is wait with patience for each of the words that the serial console has.
func (m *machine) waitEach(words ...string) {
	m.t.Helper()
	for i := range words {
		m.wait(m.serial, words[:i+1]...)
	}
}

func inOrder(text string, words []string) bool {
	for _, w := range words {
		i := strings.Index(text, w)
		if i < 0 {
			return false
		}
		text = text[i+len(w):]
	}
	return true
}

func tail(s string) string { return s[max(0, len(s)-4000):] }

// run runs a command in the shell and returns what it wrote.
func (m *machine) run(command string) string {
	m.t.Helper()
	m.marks++
	// The shell shows no input. The mark is put together by it, so that it is no part of the command.
	begin, end := fmt.Sprintf("<%d<", m.marks), fmt.Sprintf(">%d>", m.marks)
	if _, err := fmt.Fprintf(m.input, "echo '<'%d'<'; %s; echo '>'%d'>'\n", m.marks, command, m.marks); err != nil {
		m.t.Fatal(err)
	}
	text := m.wait(m.shell, begin, end)
	text = text[strings.LastIndex(text, begin)+len(begin):]
	return strings.TrimSpace(text[:strings.Index(text, end)])
}

// off cuts the power.
func (m *machine) off(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	<-m.ended
}

func start(t *testing.T, options ...string) (*machine, *exec.Cmd) {
	t.Helper()
	return startAt(t, userNet(), options...)
}

// userNet is QEMU's own network, with ports of this machine that lead to the other.
func userNet(forwards ...string) string {
	return strings.Join(append([]string{"user"}, forwards...), ",")
}

// startAt is start on a network, as QEMU has them.
func startAt(t *testing.T, network string, options ...string) (*machine, *exec.Cmd) {
	t.Helper()
	m := &machine{t: t, serial: console.New(), shell: console.New(), ended: make(chan struct{}), begin: time.Now()}
	args := append([]string{
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp", "2", "-m", "2048", "-nodefaults", "-no-user-config", "-display", "none",
		"-netdev", network + ",id=net", "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci",
		"-device", "i6300esb", "-action", "watchdog=reset", "-serial", "stdio",
	}, options...)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), need.QEMU(t), args...)
	cmd.Stdout, cmd.Stderr = m.serial, m.serial
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait(); close(m.ended) }()
	t.Cleanup(func() {
		m.off(cmd)
		if file := os.Getenv("COCOON_OS_OUTPUT"); file != "" {
			text, _ := m.serial.Said()
			f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err == nil {
				_, _ = f.WriteString(text)
				_ = f.Close()
			}
		}
	})
	return m, cmd
}

// disk copies the image: a machine writes to it.
func disk(t *testing.T) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "disk.raw")
	do(t, "cp", "--sparse=always", need.Built(t, "bin/os/disk.raw", "make os-image"), to)
	return to
}

func do(t *testing.T, program string, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), need.Tool(t, program), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
}

// firmware starts a disk as a machine does: firmware, loader, slot. It may restart, or ends then. forwards are ports of this machine that lead to it.
func firmware(t *testing.T, disk string, restarts bool, forwards ...string) (*machine, *exec.Cmd) {
	t.Helper()
	return firmwareWith(t, disk, restarts, userNet(forwards...))
}

// firmwareWith is firmware on a network, with options of QEMU.
func firmwareWith(t *testing.T, disk string, restarts bool, network string, options ...string) (*machine, *exec.Cmd) {
	t.Helper()
	const dir = "/usr/share/OVMF"
	if _, err := os.Stat(dir + "/OVMF_CODE_4M.fd"); err != nil {
		need.Missing(t, "UEFI firmware is needed: install ovmf")
	}
	vars := disk + ".vars"
	do(t, "cp", "--no-preserve=mode", dir+"/OVMF_VARS_4M.fd", vars)
	action := "shutdown"
	if restarts {
		action = "reset"
	}
	return startAt(t, network, append([]string{
		"-action", "reboot=" + action, "-drive", "if=pflash,format=raw,unit=0,readonly=on,file=" + dir + "/OVMF_CODE_4M.fd", "-drive", "if=pflash,format=raw,unit=1,file=" + vars,
		"-drive", "if=none,id=d0,format=raw,file=" + disk, "-device", "virtio-blk-pci,drive=d0,bootindex=0",
	}, options...)...)
}

// Lines of the initramfs' script by which tests change it.
const (
	rootFound = `say "root is $device"`
	moveDev   = "mount --move /dev /sysroot/dev"
)

// inRoot returns lines of the script that run a command in the new root, beside the system, with a terminal. It is there before that becomes the root.
func inRoot(command, terminal string) string {
	return "chroot /sysroot /usr/bin/sh -c ': >/shell; " + command + "' <" + terminal + " >" + terminal + " 2>&1 &\nuntil [ -e /sysroot/shell ]; do usleep 10000; done\n"
}

// initramfs returns the initramfs of the image with another script, in which a line is replaced.
func initramfs(t *testing.T, line, by string) []byte {
	t.Helper()
	dir := t.TempDir()
	tree, extra := filepath.Join(dir, "tree"), filepath.Join(dir, "extra")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	script := string(must(os.ReadFile(need.Built(t, "os/initramfs/init", "git checkout"))))
	changed := strings.Replace(script, "\n"+line+"\n", "\n"+by+"\n", 1)
	if changed == script {
		t.Fatalf("the script of the initramfs has no line %q", line)
	}
	if err := os.WriteFile(filepath.Join(tree, "init"), []byte(changed), 0o700); err != nil {
		t.Fatal(err)
	}
	do(t, need.Built(t, "bin/os/cache/pack", "make os-image"), "initramfs", tree, extra)
	var whole []byte
	for _, part := range []string{need.Built(t, "bin/os/initramfs", "make os-image"), extra} {
		whole = append(whole, must(os.ReadFile(part))...)
		whole = append(whole, make([]byte, (4-len(whole)%4)%4)...)
	}
	return whole
}

// slotA is the command line of slot a.
func slotA(id string) string {
	return "root=PARTUUID=b1a570ff-02 rootfstype=squashfs ro random.trust_cpu=on capsule.slot=a capsule.files=" + id + " console=ttyS0,115200n8 panic=1"
}

// withShell starts slot a of a disk with an initramfs of the test, in which a shell goes over into the system, on the second serial port. The image has no such thing.
func withShell(t *testing.T, disk, words string) *machine {
	t.Helper()
	dir := t.TempDir()
	whole := filepath.Join(dir, "initramfs")
	if err := os.WriteFile(whole, initramfs(t, moveDev, inRoot("exec sh", "/dev/ttyS1")+moveDev), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "shell")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	id := strings.TrimSpace(string(must(os.ReadFile(need.Built(t, "bin/os/id", "make os-image")))))
	m, _ := start(
		t, "-action", "reboot=shutdown", "-serial", "unix:"+socket, "-kernel", need.Built(t, "bin/os/vmlinuz", "make os-image"), "-initrd", whole,
		"-append", slotA(id)+" "+words,
		"-drive", "if=none,id=d0,format=raw,file="+disk, "-device", "virtio-blk-pci,drive=d0",
	)
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	m.input = conn
	go func() { _, _ = io.Copy(m.shell, conn) }()
	return m
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
