//go:build host

// Package host installs Cocoon on a whole machine and breaks the machine: a Debian host that QEMU emulates, with KVM, cgroup v2
// and systemd, whose power can be cut. `make test-host` runs it; docs/host.md describes it.
package host

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/port"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

const (
	bootTimeout    = 15 * time.Minute // until sshd answers, on a busy machine
	commandTimeout = 15 * time.Minute
	handshake      = 30 * time.Second
	cpus, memory   = "2", "4096" // of the machine; MiB

	// The file system may lose what is not synced: metadata is not written early, and a rename does not write its file.
	rootFlags = "commit=60,noauto_da_alloc"
)

// machine is an emulated host. Its disk is an overlay: the changes of a test are discarded with it.
type machine struct {
	t    *testing.T
	dir  string
	addr string // of its sshd, forwarded
	key  ssh.Signer

	process *exec.Cmd
	ended   chan struct{} // closed when process has ended
	conn    *ssh.Client
	boot    string // boot id of the kernel that conn is connected to
	panics  int    // how often the machine's kernel had panicked when conn was made
	clients []io.Closer
}

// newMachine prepares a machine that has the files of payload, by name, below /payload. Its disk starts as the image, or as a disk
// that store has kept. The machine is off.
func newMachine(t *testing.T, payload map[string]string, stored string) *machine {
	t.Helper()
	need.QEMU(t)
	need.Tool(t, "qemu-img")
	need.Tool(t, "mke2fs")
	disk := need.Built(t, "bin/host/disk.img", "make test-host")
	m := &machine{t: t, dir: t.TempDir()}
	var err error
	if m.addr, err = port.Free(); err != nil {
		t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if m.key, err = ssh.NewSignerFromKey(private); err != nil {
		t.Fatal(err)
	}
	authorized, err := ssh.NewPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	m.keep(private)
	files := m.path("payload")
	m.write(filepath.Join(files, "authorized_keys"), ssh.MarshalAuthorizedKey(authorized))
	for name, from := range payload {
		data, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		m.write(filepath.Join(files, name), data)
	}
	m.host("mke2fs", "-q", "-t", "ext4", "-L", "payload", "-E", "root_owner=0:0", "-d", files, m.path("payload.img"), "512m")
	format := "raw"
	if stored != "" {
		disk, format = stored, "qcow2"
	} else if disk, err = filepath.EvalSymlinks(disk); err != nil {
		t.Fatal(err)
	}
	m.host("qemu-img", "create", "-q", "-f", "qcow2", "-b", disk, "-F", format, m.path("disk.qcow2"))
	t.Cleanup(m.off)
	return m
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

func (m *machine) write(path string, data []byte) {
	m.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil { //nolint:gosec // the public key, and what is in the package
		m.t.Fatal(err)
	}
}

// keep writes the private key beside the machine, so that a person can log in while the test runs.
func (m *machine) keep(private ed25519.PrivateKey) {
	m.t.Helper()
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(m.path("key"), pem.EncodeToMemory(block), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) host(name string, args ...string) {
	m.t.Helper()
	if out, err := exec.CommandContext(m.t.Context(), name, args...).CombinedOutput(); err != nil {
		m.t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
}

// on starts the machine and waits for its sshd. Its QEMU ends with this process.
func (m *machine) on() {
	m.t.Helper()
	bin := filepath.Dir(need.Built(m.t, "bin/host/vmlinuz", "make test-host"))
	m.process = exec.Command("qemu-system-x86_64", //nolint:noctx // it ends with off
		"-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none",
		"-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-machine", "q35", "-smp", cpus, "-m", memory,
		"-kernel", filepath.Join(bin, "vmlinuz"), "-initrd", filepath.Join(bin, "initrd.img"),
		"-append", "root=/dev/vda rw rootflags="+rootFlags+" console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off"+testguest.ClockArgs()+
			" no_timer_check cryptomgr.notests audit=0",
		"-drive", "if=none,id=root,format=qcow2,file="+m.path("disk.qcow2"), "-device", "virtio-blk-pci,drive=root",
		"-drive", "if=none,id=payload,format=raw,read-only=on,file="+m.path("payload.img"), "-device", "virtio-blk-pci,drive=payload",
		"-netdev", "user,id=net,restrict=on,hostfwd=tcp:"+m.addr+"-:22", "-device", "virtio-net-pci,netdev=net",
		"-device", "virtio-rng-pci", "-chardev", "file,id=serial,append=on,path="+m.path("serial.log"), "-serial", "chardev:serial")
	m.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	m.process.Stderr = os.Stderr
	started, ended := make(chan error), make(chan struct{})
	go func(p *exec.Cmd) {
		defer close(ended)
		runtime.LockOSThread() // Pdeathsig is sent when the thread ends
		defer runtime.UnlockOSThread()
		err := p.Start()
		started <- err
		if err == nil {
			_ = p.Wait()
		}
	}(m.process)
	if err := <-started; err != nil {
		m.t.Fatal(err)
	}
	m.ended = ended
	m.connect()
}

// off cuts the power: kill -9 of its QEMU. Data that its kernel had not written, and QEMU's caches of overlay tables, are lost.
func (m *machine) off() {
	m.leave()
	if m.process != nil {
		_ = m.process.Process.Kill()
		<-m.ended
		m.process = nil
	}
}

// store copies the current disk to a file, from which other machines can start, and continues.
func (m *machine) store(file string) {
	m.t.Helper()
	m.must("systemctl stop cocoond && sync")
	m.off()
	m.host("cp", m.path("disk.qcow2"), file+".new")
	m.host("mv", file+".new", file)
	m.on()
}

// reset tells the machine's own kernel to reset it at once, without writing anything, and waits until it is up again.
func (m *machine) reset() {
	m.t.Helper()
	m.orderReset()
	m.connect()
}

func (m *machine) orderReset() {
	session, err := m.conn.NewSession()
	if err != nil {
		m.t.Fatalf("reset the machine: %v", err)
	}
	if err := session.Start("echo b >/proc/sysrq-trigger"); err != nil && !errors.Is(err, io.EOF) {
		m.t.Fatalf("reset the machine: %v", err)
	}
	done := make(chan struct{})
	go func() { _ = session.Wait(); close(done) }()
	select { // the command never answers
	case <-done:
	case <-time.After(time.Second):
	}
	m.leave()
}

// leave closes the connections to the machine.
func (m *machine) leave() {
	for _, c := range m.clients {
		_ = c.Close()
	}
	m.clients = nil
	if m.conn != nil {
		_ = m.conn.Close()
		m.conn = nil
	}
}

// connect waits until the machine's sshd answers after a new boot.
func (m *machine) connect() {
	m.t.Helper()
	config := &ssh.ClientConfig{
		User: "root", Auth: []ssh.AuthMethod{ssh.PublicKeys(m.key)},
		HostKeyCallback: ssh.InsecureIgnoreHostKey(), //nolint:gosec // over loopback, to the machine that was just made
	}
	began, last := time.Now(), errors.New("not tried")
	for time.Since(began) < bootTimeout {
		var conn *ssh.Client
		if conn, last = dial(m.addr, config); last == nil {
			m.conn = conn
			m.panics = m.panicCount()
			if id, err := m.run("cat /proc/sys/kernel/random/boot_id"); err == nil && id != m.boot {
				m.boot = id
				m.t.Logf("up after %s", time.Since(began).Round(time.Second))
				return
			}
			_ = conn.Close()
		}
		select {
		case <-m.ended:
			m.t.Fatalf("the machine's QEMU ended\n%s", m.serial())
		case <-m.t.Context().Done():
			m.t.Fatal(m.t.Context().Err())
		case <-time.After(time.Second):
		}
	}
	m.t.Fatalf("the machine is not up after %s: %v\n%s", bootTimeout, last, m.serial())
}

func dial(addr string, config *ssh.ClientConfig) (*ssh.Client, error) {
	conn, err := net.DialTimeout("tcp", addr, handshake)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(handshake))
	c, channels, requests, err := ssh.NewClientConn(conn, addr, config)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	_ = conn.SetDeadline(time.Time{})
	return ssh.NewClient(c, channels, requests), nil
}

// serial returns the last output of the machine's kernel and systemd.
func (m *machine) serial() string {
	out, _ := os.ReadFile(m.path("serial.log"))
	return string(out[max(0, len(out)-4000):])
}

// run runs a script on the machine and returns the output of both streams, without spaces around it.
func (m *machine) run(script string) (string, error) {
	session, err := m.conn.NewSession()
	if err != nil {
		return "", err
	}
	defer session.Close()
	var out buffer
	session.Stdout, session.Stderr = &out, &out
	done := make(chan error, 1)
	go func() { done <- session.Run(script) }()
	limit, look := time.After(commandTimeout), time.NewTicker(5*time.Second)
	defer look.Stop()
	for {
		select {
		case err = <-done:
		case <-limit:
			err = fmt.Errorf("no end after %s", commandTimeout)
		case <-look.C:
			if m.panicCount() == m.panics {
				continue
			}
			_ = m.conn.Close() // otherwise the next command waits as well
			err = fmt.Errorf("the machine's kernel panicked; if its serial log names the thread of a virtual CPU (CPU 0/KVM), "+
				"QEMU emulated SVM wrongly: run the test again\n%s", m.serial())
		}
		return strings.TrimSpace(out.String()), err
	}
}

// panicCount returns how often the machine's kernel has panicked.
func (m *machine) panicCount() int {
	out, _ := os.ReadFile(m.path("serial.log"))
	return strings.Count(string(out), "Kernel panic - not syncing")
}

// buffer can be read while it is written, so that the output of a command that does not end can be shown.
type buffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// must runs a script that must succeed.
func (m *machine) must(script string) string {
	m.t.Helper()
	began := time.Now()
	out, err := m.run(script)
	if err != nil {
		journal, _ := m.run("journalctl --no-pager -q -u cocoond -n 60")
		m.t.Fatalf("%s: %v\n%s\n%s", script, err, out, journal)
	}
	m.t.Logf("%6.1fs %s", time.Since(began).Seconds(), firstLine(script))
	return out
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s[:min(len(s), 150)]
}

func (m *machine) want(script, want string) {
	m.t.Helper()
	if got := m.must(script); got != want {
		m.t.Errorf("%s\n got %s\nwant %s", script, got, want)
	}
}

// eventually runs a script until it succeeds.
func (m *machine) eventually(script string) {
	m.t.Helper()
	var out string
	var err error
	for began := time.Now(); time.Since(began) < commandTimeout; {
		if out, err = m.run(script); err == nil {
			m.t.Logf("%6.1fs until %s", time.Since(began).Seconds(), firstLine(script))
			return
		}
		<-time.After(500 * time.Millisecond)
	}
	journal, _ := m.run("journalctl --no-pager -q -u cocoond -n 60")
	m.t.Fatalf("never: %s: %v\n%s\n%s", script, err, out, journal)
}

// node waits for the node API of the machine's cocoond, and returns it. It is valid until the machine goes down.
func (m *machine) node() *nodeclient.Client {
	m.t.Helper()
	client, err := nodeclient.Dial(m.socket("node", "/run/cocoon/cocoond.sock"))
	if err != nil {
		m.t.Fatal(err)
	}
	m.clients = append(m.clients, client)
	for began := time.Now(); ; {
		ctx, cancel := context.WithTimeout(m.t.Context(), handshake)
		_, err = client.Info(ctx)
		cancel()
		if err == nil {
			return client
		}
		if time.Since(began) > bootTimeout {
			journal, _ := m.run("journalctl --no-pager -q -u cocoond -n 60")
			m.t.Fatalf("cocoond does not answer: %v\n%s", err, journal)
		}
		<-time.After(500 * time.Millisecond)
	}
}

// socket returns the path of a socket here that leads to one of the machine. It is valid until the machine goes down.
func (m *machine) socket(name, there string) string {
	m.t.Helper()
	path := filepath.Join(m.dir, fmt.Sprintf("%s-%.8s.sock", name, m.boot))
	_ = os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		m.t.Fatal(err)
	}
	m.clients = append(m.clients, l)
	go forward(l, m.conn, there)
	return path
}

// forward carries connections to a socket of the machine.
func forward(l net.Listener, to *ssh.Client, path string) {
	for {
		here, err := l.Accept()
		if err != nil {
			return
		}
		there, err := to.Dial("unix", path)
		if err != nil {
			_ = here.Close()
			continue
		}
		go func() { _, _ = io.Copy(there, here); _ = there.Close() }()
		go func() { _, _ = io.Copy(here, there); _ = here.Close() }()
	}
}
