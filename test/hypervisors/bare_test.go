//go:build kvm

package hypervisors

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/cloudhypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/firecracker"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// program is what somebody does with a hypervisor by hand: nothing is confined, and nothing is prepared for the next VM.
type program struct {
	boot  func(t *testing.T, p hypervisor.Plan, sock string) *exec.Cmd      // boots the guest of p; sock is for orders
	save  func(t *testing.T, sock, dir string)                              // saves the guest that runs into the folder dir, and stops it
	clone func(t *testing.T, p hypervisor.Plan, sock, dir string) *exec.Cmd // resumes it
	load  func(t *testing.T, sock, dir string)                              // what the clone is told then; nil: nothing
}

func arguments(p hypervisor.Plan) string {
	return "console=ttyS0 quiet panic=-1 oops=panic no_timer_check noreplace-smp swiotlb=noforce cryptomgr.notests " + p.Boot.Cmdline
}

func mib(p hypervisor.Plan) string { return strconv.FormatInt(p.Memory>>20, 10) }

func state(dir string) string  { return filepath.Join(dir, "bare-state") }
func memory(dir string) string { return filepath.Join(dir, "bare-memory") }

// qemuProgram is QEMU with a kind of machine and its firmware.
func qemuProgram(machine ...string) program {
	boot := func(t *testing.T, p hypervisor.Plan, sock string) *exec.Cmd {
		t.Helper()
		return exec.Command(need.QEMU(t), append([]string{
			"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-accel", "kvm", "-cpu", "host", "-m", mib(p),
			"-kernel", p.Boot.Kernel, "-initrd", p.Boot.Initrd, "-append", arguments(p), "-serial", "stdio", "-monitor", "unix:" + sock + ",server=on,wait=off",
		}, machine...)...)
	}
	return program{
		boot: boot,
		save: func(t *testing.T, sock, dir string) {
			t.Helper()
			conn, err := net.Dial("unix", sock)
			if err == nil {
				defer conn.Close()
				// A guest that is stopped before would be stopped in its clones too.
				_, err = fmt.Fprintf(conn, "migrate_set_parameter max-bandwidth 100G\nmigrate \"exec:cat >%s\"\nquit\n", state(dir))
			}
			if err == nil {
				_, err = io.Copy(io.Discard, conn) // until it has ended
			}
			if st, serr := os.Stat(state(dir)); err != nil || serr != nil || st.Size() == 0 {
				t.Fatalf("save: %v, %v", err, serr)
			}
		},
		clone: func(t *testing.T, p hypervisor.Plan, sock, dir string) *exec.Cmd {
			t.Helper()
			cmd := boot(t, p, sock)
			cmd.Args = append(cmd.Args, "-incoming", "exec:cat "+state(dir))
			return cmd
		},
	}
}

func cloudHypervisorProgram() program {
	return program{
		boot: func(t *testing.T, p hypervisor.Plan, sock string) *exec.Cmd {
			t.Helper()
			return exec.Command(need.Hypervisor(t, cloudhypervisor.DefaultBinary), "--api-socket", "path="+sock, "--cpus", "boot=1", "--memory", "size="+mib(p)+"M",
				"--kernel", p.Boot.Kernel, "--initramfs", p.Boot.Initrd, "--cmdline", arguments(p), "--console", "off", "--serial", "tty")
		},
		save: func(t *testing.T, sock, dir string) {
			t.Helper()
			order(t, sock, "PUT", "/api/v1/vm.pause", nil)
			order(t, sock, "PUT", "/api/v1/vm.snapshot", map[string]any{"destination_url": "file://" + dir})
		},
		clone: func(t *testing.T, _ hypervisor.Plan, sock, dir string) *exec.Cmd {
			t.Helper()
			return exec.Command(need.Hypervisor(t, cloudhypervisor.DefaultBinary), "--api-socket", "path="+sock, "--restore", "source_url=file://"+dir+",resume=true")
		},
	}
}

func firecrackerProgram() program {
	command := func(t *testing.T, sock string, args ...string) *exec.Cmd {
		t.Helper()
		return exec.Command(need.Hypervisor(t, firecracker.DefaultBinary), append([]string{"--api-sock", sock}, args...)...)
	}
	return program{
		boot: func(t *testing.T, p hypervisor.Plan, sock string) *exec.Cmd {
			t.Helper()
			file := filepath.Join(t.TempDir(), "config.json")
			size, _ := strconv.Atoi(mib(p))
			text, err := json.Marshal(map[string]any{
				"boot-source":    map[string]any{"kernel_image_path": p.Boot.Kernel, "initrd_path": p.Boot.Initrd, "boot_args": arguments(p) + " reboot=k"},
				"machine-config": map[string]any{"vcpu_count": 1, "mem_size_mib": size}, "drives": []any{},
			})
			if err := errors.Join(err, os.WriteFile(file, text, 0o600)); err != nil {
				t.Fatal(err)
			}
			return command(t, sock, "--config-file", file)
		},
		save: func(t *testing.T, sock, dir string) {
			t.Helper()
			order(t, sock, "PATCH", "/vm", map[string]any{"state": "Paused"})
			order(t, sock, "PUT", "/snapshot/create", map[string]any{"snapshot_type": "Full", "snapshot_path": state(dir), "mem_file_path": memory(dir)})
		},
		clone: func(t *testing.T, _ hypervisor.Plan, sock, _ string) *exec.Cmd { t.Helper(); return command(t, sock) },
		load: func(t *testing.T, sock, dir string) {
			t.Helper()
			order(t, sock, "PUT", "/snapshot/load", map[string]any{
				"snapshot_path": state(dir), "mem_backend": map[string]any{"backend_type": "File", "backend_path": memory(dir)}, "resume_vm": true,
			})
		},
	}
}

// order makes one request over a socket that may not be there yet.
func order(t *testing.T, sock, method, path string, body any) {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		for {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", sock)
			if err == nil || ctx.Err() != nil {
				return conn, err
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
		}
	}}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost"+path, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if body == nil {
		req.Body, req.ContentLength = nil, 0
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	defer res.Body.Close()
	if answer, _ := io.ReadAll(res.Body); res.StatusCode/100 != 2 {
		t.Fatalf("%s: %s: %s", path, res.Status, answer)
	}
}

// patience is for a guest that says nothing.
const patience = 2 * time.Minute

// running is a process whose console is its standard input and output.
type running struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	out   *bufio.Reader
	pipe  *os.File
}

func begin(t *testing.T, cmd *exec.Cmd) *running {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	dir, err := jail.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	console, err := jail.NewConsole(dir, "unused") // Cloud Hypervisor listens to a terminal only
	if err != nil {
		t.Fatal(err)
	}
	defer console.In.Close()
	defer console.Out.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = console.In, w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return &running{cmd, console.End, bufio.NewReader(r), r}
}

// hears waits for a word on the console.
func (r *running) hears(t *testing.T, word string) {
	t.Helper()
	if err := r.pipe.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var said []byte
	for !bytes.Contains(said, []byte(word)) {
		b, err := r.out.ReadByte()
		if err != nil {
			t.Fatalf("%s does not say %q: %v\n%s", r.cmd.Path, word, err, said)
		}
		said = append(said, b)
	}
}

// say repeats a word until the guest answers. QEMU loses what it reads before it has loaded the guest.
func (r *running) say(t *testing.T, word string) {
	t.Helper()
	heard, silent := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(silent)
		again := time.NewTicker(50 * time.Millisecond)
		defer again.Stop()
		for {
			if _, err := io.WriteString(r.stdin, word+"\n"); err != nil {
				return // it has ended, and whoever listens says so
			}
			select {
			case <-again.C:
			case <-heard:
				return
			}
		}
	}()
	defer func() { close(heard); <-silent }()
	r.hears(t, "HEARD "+word)
}

func (r *running) end() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
	_ = r.stdin.Close()
	_ = r.pipe.Close()
}
