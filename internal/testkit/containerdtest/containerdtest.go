// Package containerdtest starts a real containerd for tests: with runc, pods, a CNI network, and images from a registry of ours.
//
// All of it is private: files, sockets, and, because a test must run in network and mount namespaces of its own (hack/alone.sh,
// netns.Main), links and rules. When the test ends, nothing is left. The package judges nothing; package cri below test/ runs critest.
package containerdtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// patience limits how long containerd may take to start, to remove its pods, and to end.
const patience = time.Minute

// cniState is where CNI libraries remember networks, for whoever calls them.
const cniState = "/var/lib/cni"

// Daemon is a containerd. Its methods are for the goroutine of the test.
type Daemon struct {
	kubeletnode.Runtime
	Registry *Registry

	t       testing.TB
	dir     string // of all files; others may pass through it, because pods with users of their own do
	process *exec.Cmd
}

// Start starts a containerd and a registry, and waits until pods can be made. Both end with the test.
func Start(t testing.TB) *Daemon {
	t.Helper()
	need.Root(t)
	alone(t)
	bin := programs(t)
	d := &Daemon{t: t}
	if _, err := os.Stat(filepath.Join(plugins, "portmap")); err != nil {
		need.Missing(t, "CNI plugins are needed: install containernetworking-plugins (make setup does)")
	}
	need.Tool(t, "iptables") // for masquerading and ports of the host
	d.Registry = Serve(t)

	dir, err := os.MkdirTemp("", "cocoon-ctd-") // the name is short, as paths of sockets must be
	if err != nil {
		t.Fatal(err)
	}
	d.dir, d.Runtime = dir, runtime(dir, bin)
	conflist, err := network(dir).Conflist()
	if err != nil {
		t.Fatal(err)
	}
	watch(t, dir)
	t.Cleanup(d.clean)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"config.toml":                 d.Config(),
		"certs.d/_default/hosts.toml": hosts(d.Registry.URL),
		"cni/10-pods.conflist":        string(conflist),
		"crictl.yaml":                 fmt.Sprintf("runtime-endpoint: unix://%s\nimage-endpoint: unix://%s\ntimeout: 60\n", d.Socket(), d.Socket()),
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	Hide(t, cniState)
	d.Start()
	return d
}

// programs returns the folder of the runtime's programs, by its real path, which processes show.
func programs(t testing.TB) string {
	t.Helper()
	path, err := filepath.EvalSymlinks(need.Built(t, "bin/containerd/containerd", "make containerd"))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(path)
}

// alone refuses to touch the network and the mounts of the machine.
func alone(t testing.TB) {
	t.Helper()
	for _, kind := range []string{"net", "mnt"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if machine, err := os.Readlink("/proc/1/ns/" + kind); err == nil && ours == machine {
			t.Fatalf("containerd is started in namespaces of the test only, and this is the machine's %s namespace: run the test with -exec hack/alone.sh", kind)
		}
	}
}

// Hide puts an empty folder over a path of the machine for the time of the test, which runs in a mount namespace of its own. An empty
// folder below stays: another test may use it.
func Hide(t testing.TB, path string) {
	t.Helper()
	alone(t)
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, ""); err != nil {
		t.Fatalf("hide %s: %v", path, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Errorf("show %s again: %v", path, err)
		}
	})
}

// Start starts containerd again after Stop or Kill. Its pods are as they were.
func (d *Daemon) Start() {
	d.t.Helper()
	log, err := os.OpenFile(d.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close()
	d.process = exec.Command(d.Program("containerd"), "--config", filepath.Join(d.dir, "config.toml"))
	d.process.Env = append(os.Environ(), "PATH="+d.Path())
	d.process.Stdout, d.process.Stderr = log, log
	if err := d.process.Start(); err != nil {
		d.t.Fatal(err)
	}
	var why error
	if !eventually(func() bool { why = d.ready(); return why == nil }) {
		d.t.Fatalf("containerd is not ready for pods after %v: %v", patience, why)
	}
}

// Path is a PATH with the runtime's programs, crictl, critest and ginkgo.
func (d *Daemon) Path() string { return d.Programs + ":" + os.Getenv("PATH") }

// Dir returns a folder of the test below the one of containerd, which goes with it. Everybody may pass through and write into it.
func (d *Daemon) Dir(name string) string {
	d.t.Helper()
	path := filepath.Join(d.dir, name)
	if err := os.MkdirAll(path, 0o755); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Chmod(path, 0o1777); err != nil {
		d.t.Fatal(err)
	}
	return path
}

// ready returns nil if containerd can run pods, with a network.
func (d *Daemon) ready() error {
	out, err := d.try("info")
	if err != nil {
		return err
	}
	var info struct {
		Status struct {
			Conditions []struct {
				Type, Message string
				Status        bool
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &info); err != nil {
		return err
	}
	ready := 0
	for _, c := range info.Status.Conditions {
		if c.Type != "RuntimeReady" && c.Type != "NetworkReady" {
			continue // warnings
		}
		if !c.Status {
			return fmt.Errorf("%s is false: %s", c.Type, c.Message)
		}
		ready++
	}
	if ready != 2 {
		return fmt.Errorf("it tells of %d of two conditions", ready)
	}
	return nil
}

// Crictl runs crictl and returns what it prints. An error ends the test.
func (d *Daemon) Crictl(args ...string) string {
	d.t.Helper()
	out, err := d.try(args...)
	if err != nil {
		d.t.Fatalf("crictl %s: %v", strings.Join(args, " "), err)
	}
	return out
}

func (d *Daemon) try(args ...string) (string, error) {
	cmd := exec.Command(d.Program("crictl"), append([]string{"--config", filepath.Join(d.dir, "crictl.yaml")}, args...)...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(errOut.Bytes()))
	}
	return string(out), nil
}

// Stop lets containerd end; pods go on. It does nothing if containerd does not run.
func (d *Daemon) Stop() {
	if d.process == nil {
		return
	}
	_ = d.process.Process.Signal(syscall.SIGTERM)
	ended := make(chan struct{})
	go func() {
		_ = d.process.Wait()
		close(ended)
	}()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-ended:
	case <-limit.C:
		d.t.Errorf("containerd does not end within %v", patience)
		_ = d.process.Process.Kill()
		<-ended
	}
	d.process = nil
}

// Kill ends containerd at once; pods go on. It does nothing if containerd does not run.
func (d *Daemon) Kill() {
	if d.process == nil {
		return
	}
	_ = d.process.Process.Kill()
	_ = d.process.Wait()
	d.process = nil
}

// Freeze lets containerd stand still until Kill: it takes calls, and answers none.
func (d *Daemon) Freeze() { _ = d.process.Process.Signal(syscall.SIGSTOP) }

func (d *Daemon) logFile() string { return filepath.Join(d.dir, "log") }

// Log returns what containerd has logged.
func (d *Daemon) Log() string {
	text, _ := os.ReadFile(d.logFile())
	return string(text)
}

// eventually waits until something holds, and reports whether it does.
func eventually(holds func() bool) bool {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		}
	}
	return true
}
