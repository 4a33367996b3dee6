//go:build os

package appliance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// installerMachine starts the installer by firmware, with disks besides its own. What it writes to its own is not kept.
func installerMachine(t *testing.T, port int, disks ...string) (*machine, *exec.Cmd) {
	t.Helper()
	const dir = "/usr/share/OVMF"
	vars := filepath.Join(t.TempDir(), "vars")
	do(t, "cp", "--no-preserve=mode", dir+"/OVMF_VARS_4M.fd", vars)
	options := []string{
		"-action", "reboot=shutdown", "-drive", "if=pflash,format=raw,unit=0,readonly=on,file=" + dir + "/OVMF_CODE_4M.fd", "-drive", "if=pflash,format=raw,unit=1,file=" + vars,
		"-drive", "if=none,id=usb,format=raw,snapshot=on,file=" + need.Built(t, "bin/os/installer.raw", "make os-installer"), "-device", "virtio-blk-pci,drive=usb,bootindex=0",
	}
	for i, path := range disks {
		options = append(options, "-drive", fmt.Sprintf("if=none,id=t%d,format=raw,file=%s", i, path), "-device", fmt.Sprintf("virtio-blk-pci,drive=t%d,serial=DISK%d", i, i))
	}
	return startAt(t, userNet(fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:50000", port)), options...)
}

func sparse(t *testing.T, path string, size int64) string {
	t.Helper()
	f := must(os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600))
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

var shownCode = regexp.MustCompile(`code, to overwrite data: (\S+)`)

// A machine is installed over the network on a disk that is blank, and comes up adopted, with the certificate that the installer had, at the same address. Its disk grows
// later, and is used when the operator says so; a power cut does not take that back. A disk with data is overwritten only with the code of the console.
func TestInstallation(t *testing.T) {
	dir := t.TempDir()
	target := sparse(t, filepath.Join(dir, "target.raw"), 16<<30)
	other := sparse(t, filepath.Join(dir, "other.raw"), 17<<30)
	if err := os.WriteFile(other+".head", []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, "dd", "if="+other+".head", "of="+other, "conv=notrunc", "status=none")
	port, web := freePort(t), freePort(t)
	m, cmd := installerMachine(t, port, target, other)
	o := &operator{t: t, m: m, dir: t.TempDir(), addr: fmt.Sprintf("127.0.0.1:%d", port)}
	text := m.wait(m.serial, "code, to overwrite data", "pid1: ")
	t.Logf("%s from power on to the installer", time.Since(m.begin).Round(time.Second))
	code := shownCode.FindStringSubmatch(text)
	if code == nil {
		t.Fatalf("no code:\n%s", tail(text))
	}

	install := []string{"install", "--addr", o.addr, "--yes", "--name", "box"}
	for what, args := range map[string][]string{
		"choose the disk":            install,
		"holds data of an unknown":   append(install, "--target", "/dev/vdc"),
		"give the code":              append(install, "--target", "/dev/vdc", "--reinstall"),
		"not the one that the":       append(install, "--target", "/dev/vdc", "--reinstall", "--code-file", o.file("wrong", "AAAAA-AAAAA")),
		"choose the disk with --tar": append(install, "--target", "/dev/vda"), // its own
	} {
		if out, err := o.try(args...); err == nil || !strings.Contains(out, what) {
			t.Errorf("capsulectl %q: %v, %s; want %q", args, err, out, what)
		}
	}
	if out, err := o.try("--capsule", o.addr, "adopt", "--yes", "--name", "x"); err == nil {
		t.Errorf("an installer is adopted: %s", out)
	}
	begin := time.Now()
	out := o.do(append(install, "--target", "/dev/vdb")...)
	t.Logf("%s for the installation:\n%s", time.Since(begin).Round(time.Second), out)
	if again := o.do("install", "--addr", o.addr, "--yes", "--name", "again", "--target", "/dev/vdb", "-o", "json"); !strings.Contains(again, `"capsuleId"`) {
		t.Errorf("the lost answer: %s", again)
	}
	o.do("context", "rm", "again")
	o.do("context", "use", "box")
	if out, err := o.try(append(install, "--name", "y", "--target", "/dev/vdc", "--reinstall", "--code-file", o.file("code", code[1]))...); err == nil || !strings.Contains(out, "take the installer out") {
		t.Errorf("a second installation: %v, %s", err, out)
	}
	if head := string(must(os.ReadFile(other + ".head"))); head != "precious" || !strings.HasPrefix(headOf(t, other, 8), "precious") {
		t.Errorf("the other disk changed")
	}
	m.off(cmd)

	forwards := []string{fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:50000", port), fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:8080", web)}
	m, cmd = firmware(t, target, true, forwards...)
	text = m.wait(m.serial, "slot a, files", "Cocoon OS", "10.0.2.15:50000")
	healthy(t, text)
	if strings.Contains(text, "first start") {
		t.Error("the first start made volumes again")
	}
	o.until("admin", "whoami") // without an adoption
	t.Logf("%s from power on to the operator's first answer", time.Since(m.begin).Round(time.Second))
	if out, err := o.try("--capsule", o.addr, "adopt", "--yes", "--name", "z"); err != nil && !strings.Contains(out, "already") {
		t.Errorf("adopt again: %v, %s", err, out)
	}
	o.do("image", "push", need.Built(t, "bin/demo.tar", "make demo-image"))
	o.do("apply", "--wait", "-f", o.file("web.yaml", `name: data
kind: Volume
size: 64MiB
---
name: web
kind: Container
container:
  image: cocoon/demo:latest
  command: [sh, -c]
  args: ["date >>/data/starts; sync; exec /usr/bin/server"]
  ports: [{containerPort: 8080, hostPort: 8080}]
  mounts: [{volumeName: data, mountPath: /data}]
`))
	o.wait("the port of the container answers from outside", func() bool { return answers(web) })
	if info := o.do("capsule", "info"); !strings.Contains(info, "16G /dev/vda\n") {
		t.Errorf("the disk:\n%s", info)
	}
	m.off(cmd)

	sparse(t, target, 24<<30)
	m, cmd = firmware(t, target, true, forwards...)
	o.until("24G /dev/vda, of which 8G are not used", "capsule", "info")
	before := o.do("capsule", "info")
	begin = time.Now()
	out = o.do("capsule", "grow-disk", "--yes")
	t.Logf("%s to grow: %s", time.Since(begin).Round(time.Second), out)
	if !strings.Contains(out, "8G more; the state has 4.9") {
		t.Errorf("it has grown to %s", out)
	}
	after := o.do("capsule", "info")
	if strings.Contains(after, "not used") {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	o.wait("the port of the container answers", func() bool { return answers(web) })
	m.off(cmd) // a power cut
	m, _ = firmware(t, target, true, forwards...)
	healthy(t, m.wait(m.serial, "Cocoon OS", "10.0.2.15:50000"))
	o.wait("the port of the container answers", func() bool { return answers(web) })
	if again := o.do("capsule", "grow-disk", "--yes", "-o", "json"); strings.Contains(again, "grownBytes") {
		t.Errorf("it grows again: %s", again)
	}
	if starts := strings.Count(o.do("workload", "exec", "web", "--", "cat", "/data/starts"), "\n"); starts < 3 {
		t.Errorf("the volume knows of %d starts", starts)
	}
}

func headOf(t *testing.T, path string, n int) string {
	t.Helper()
	f := must(os.Open(path))
	defer f.Close()
	b := make([]byte, n)
	_ = must(f.Read(b))
	return string(b)
}
