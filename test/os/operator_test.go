//go:build os

package appliance

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// operator uses capsulectl with an appliance.
type operator struct {
	t    *testing.T
	m    *machine
	dir  string
	addr string
	port int // of this machine that leads to port 8080 of the other
}

// do runs capsulectl, and returns what it prints.
func (o *operator) do(args ...string) string {
	o.t.Helper()
	out, err := o.try(args...)
	if err != nil {
		o.t.Fatalf("capsulectl %q: %v\n%s", args, err, out)
	}
	return out
}

func (o *operator) try(args ...string) (string, error) {
	cmd := exec.CommandContext(o.t.Context(), need.Built(o.t, "bin/capsulectl", "make binaries"), args...)
	cmd.Env = append(os.Environ(), "CAPSULE_CONFIG_DIR="+o.dir, "CAPSULE_HOST=")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// until runs capsulectl until what it prints has the words.
func (o *operator) until(words string, args ...string) string {
	o.t.Helper()
	var last string
	o.wait(fmt.Sprintf("capsulectl %q says %q", args, words), func() bool {
		out, err := o.try(args...)
		last = fmt.Sprint(out, err)
		return err == nil && strings.Contains(out, words)
	})
	return last
}

// wait waits until something holds.
func (o *operator) wait(what string, holds func() bool) {
	o.t.Helper()
	limit := time.NewTimer(10 * time.Minute)
	defer limit.Stop()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-limit.C:
			o.t.Fatalf("waited in vain until %s", what)
		}
	}
}

func (o *operator) file(name, text string) string {
	o.t.Helper()
	path := filepath.Join(o.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		o.t.Fatal(err)
	}
	return path
}

// newer writes a bundle of the system of the image, with another version, to path. change may damage its parts.
func newer(t *testing.T, path, version string, change func(files map[string]string)) {
	t.Helper()
	files := map[string]string{bundle.Version: version + "\n"}
	for _, name := range []string{bundle.Kernel, bundle.Initramfs, bundle.Root} {
		files[name] = string(must(os.ReadFile(need.Built(t, "bin/os/"+name, "make os-image"))))
	}
	change(files)
	block, _ := pem.Decode(must(os.ReadFile(need.Built(t, "bin/os/signing-key.pem", "make os-image"))))
	if block == nil {
		t.Fatal("the signing key is no PEM")
	}
	key, ok := must(x509.ParsePKCS8PrivateKey(block.Bytes)).(ed25519.PrivateKey)
	if !ok {
		t.Fatal("the signing key is not of Ed25519")
	}
	f := must(os.Create(path))
	var sources []bundle.Source
	for _, name := range []string{bundle.Version, bundle.Kernel, bundle.Initramfs, bundle.Root} {
		sources = append(sources, bundle.Source{Name: name, Content: strings.NewReader(files[name])})
	}
	if err := errors.Join(bundle.Write(f, bundle.Manifest{Version: version, Architecture: "amd64"}, sources, key), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// freePort returns a port of this machine on which nobody listens.
func freePort(t *testing.T) int {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0")) //nolint:noctx // local
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// adopted starts the image as a machine does, and adopts it.
func adopted(t *testing.T) (*operator, *exec.Cmd) {
	t.Helper()
	return adoptedDisk(t, disk(t))
}

// adoptedDisk starts the system of a disk as a machine does, and adopts it.
func adoptedDisk(t *testing.T, image string) (*operator, *exec.Cmd) {
	t.Helper()
	o := &operator{t: t, dir: t.TempDir(), port: freePort(t)}
	o.addr = fmt.Sprintf("127.0.0.1:%d", freePort(t))
	m, cmd := firmware(t, image, true, o.forwards()...)
	o.m = m
	m.wait(m.serial, "10.0.2.15:50000")
	o.until("box is adopted", "adopt", "--capsule", o.addr, "--name", "box", "--yes")
	t.Logf("%s from power on to adopted", time.Since(m.begin).Round(time.Second))
	return o, cmd
}

// forwards are the ports that lead to the machine.
func (o *operator) forwards() []string {
	return []string{"hostfwd=tcp:" + o.addr + "-:50000", fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:8080", o.port)}
}

// serve runs a web server with a volume, whose content differs from machine to machine.
func (o *operator) serve() {
	o.t.Helper()
	o.do("image", "push", need.Built(o.t, "bin/demo.tar", "make demo-image"))
	o.do("apply", "--wait", "-f", o.file("web.yaml", `name: data
kind: Volume
size: 64MiB
---
name: web
kind: Container
container:
  image: cocoon/demo:latest
  command: [sh, -c]
  args: ["[ -e /data/blob ] || dd if=/dev/urandom of=/data/blob bs=65536 count=64; date >>/data/starts; exec /usr/bin/server"]
  ports: [{containerPort: 8080, hostPort: 8080}]
  mounts: [{volumeName: data, mountPath: /data}]
livenessProbe: {tcp: {port: 8080}}
`))
	o.wait("the port of the container answers from outside", func() bool { return answers(o.port) })
}

// An operator adopts a machine that has just started, runs a container with a volume and a port there, gives the volume to a micro-VM and back, restarts
// the machine, and updates the system twice: the first update is confirmed, and the second, whose root is broken, is rolled back by the machine
// itself. The volume keeps what it had.
func TestOperator(t *testing.T) {
	o, cmd := adopted(t)
	m := o.m
	o.serve()
	if out := o.do("volume", "list"); !strings.Contains(out, "data") || !strings.Contains(out, "web") {
		t.Errorf("volumes:\n%s", out)
	}
	if out := o.do("capsule", "info"); !strings.Contains(out, "micro-VMs        kvm\n") {
		t.Errorf("with a CPU that can do so, the machine does not run micro-VMs with KVM:\n%s", out)
	}
	begin := time.Now()
	o.passOn()
	t.Logf("%s for a volume that goes to a micro-VM and back", time.Since(begin).Round(time.Second))
	begin = time.Now()
	o.restart()
	t.Logf("%s for a restart, until the workload answers", time.Since(begin).Round(time.Second))

	next := filepath.Join(o.dir, "next.tar")
	newer(t, next, "v999.1", func(map[string]string) {})
	for what, bad := range map[string]func(string) string{"a bundle that is cut off": func(s string) string { return s[:len(s)/2] }, "a bundle with another byte": func(s string) string {
		return s[:len(s)-1<<20] + "x" + s[len(s)-1<<20+1:]
	}} {
		if out, err := o.try("capsule", "update", "push", o.file("bad.tar", bad(string(must(os.ReadFile(next)))))); err == nil {
			t.Errorf("%s is taken: %s", what, out)
		}
	}
	begin = time.Now()
	if out := o.do("capsule", "update", "push", next, "--auto-confirm=5"); !strings.Contains(out, "slot_b") {
		t.Errorf("the update: %s", out)
	}
	t.Logf("%s for an update, from push to confirmed", time.Since(begin).Round(time.Second))
	o.until("active slot      slot_b", "capsule", "info") // the root, and so what the system calls itself, is the same
	o.until("running   yes", "workload", "list")

	broken := filepath.Join(o.dir, "broken.tar")
	newer(t, broken, "v999.2", func(files map[string]string) { files[bundle.Root] = strings.Repeat("x", 8<<20) })
	begin = time.Now()
	o.do("capsule", "update", "push", broken)
	m.wait(m.serial, "slot a, files", "capsule.trial=1", "this is a trial: restarting", "this is a trial: restarting", "slot b, files", "10.0.2.15:50000")
	out := o.until("rolled back", "capsule", "info")
	t.Logf("%s for an update that does not start, from push to rolled back", time.Since(begin).Round(time.Second))
	if !strings.Contains(out, "active slot      slot_b") || !strings.Contains(out, "version v999.2 did not start") {
		t.Errorf("after the rollback:\n%s", out)
	}
	o.until("running   yes", "workload", "list")
	if starts := strings.Count(o.do("workload", "exec", "web", "--", "cat", "/data/starts"), "\n"); starts < 3 {
		t.Errorf("the volume knows of %d starts", starts)
	}
	m.off(cmd)
}

// answers reports whether an HTTP server answers at a port of this machine.
func answers(port int) bool {
	c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), 5*time.Second) //nolint:noctx // a few seconds
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
	b := make([]byte, 5)
	n, _ := c.Read(b)
	return strings.HasPrefix(string(b[:n]), "HTTP/")
}
