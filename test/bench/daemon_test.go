//go:build bench

package bench

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

const image = "demo:latest"

// daemon is a cocoond of the benchmark's own, with the demo image.
type daemon struct {
	*nodeclient.Client
	dir, socket string
	pid         int
}

// start runs cocoond with more settings in YAML until the test ends.
func start(t *testing.T, config string) *daemon {
	t.Helper()
	dir := scratch(t)
	d := &daemon{dir: dir, socket: filepath.Join(dir, "run", "cocoond.sock")}
	file := filepath.Join(dir, "cocoond.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--config", file, "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run")}
	if k, i := os.Getenv("COCOON_TEST_KERNEL"), os.Getenv("COCOON_TEST_INITRD"); k != "" && i != "" {
		flags = append(flags, "--kernel", k, "--initramfs", i)
	}
	log := must(os.Create(filepath.Join(dir, "cocoond.log")))(t)
	defer log.Close()
	cmd := exec.Command(bin("cocoond"), flags...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d.pid = cmd.Process.Pid
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s", text[max(0, len(text)-4000):])
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if out, err := exec.Command(bin("cocoond"), append([]string{"shutdown"}, flags...)...).CombinedOutput(); err != nil {
			t.Errorf("cocoond shutdown: %v\n%s", err, out)
		}
	})
	d.Client = d.connect(t)
	until(t, 20*time.Second, "cocoond answers", func() bool { _, err := d.Info(t.Context()); return err == nil })
	demo := os.Getenv("COCOON_TEST_IMAGE")
	if demo == "" {
		demo = bin("demo.tar")
	}
	tar := must(os.Open(demo))(t)
	defer tar.Close()
	must(d.ImportImage(t.Context(), image, tar, nil))(t)
	return d
}

func (d *daemon) connect(t *testing.T) *nodeclient.Client {
	t.Helper()
	c := must(nodeclient.Dial(d.socket))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

func spec(name string) vm.Spec {
	return vm.Spec{
		Name: name, Image: image, CPUs: guestCPUs, Memory: guestMemory, Storage: guestStorage,
		NICs: []vm.NICSpec{{}},
	}
}

// readiness learns from the node's events when guests were set up.
type readiness struct {
	mu  sync.Mutex
	at  map[string]time.Time // by name of the VM
	end map[string]time.Time // when it stopped
	rec map[string]vm.Record
}

func watchReady(t *testing.T, c *nodeclient.Client) *readiness {
	t.Helper()
	r := &readiness{at: map[string]time.Time{}, end: map[string]time.Time{}, rec: map[string]vm.Record{}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Watch(ctx, -1, r.see)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *readiness) see(e vm.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := e.Record.Spec.Name
	if _, seen := r.at[name]; e.Record.AgentReady && !seen {
		r.at[name], r.rec[name] = time.Now(), e.Record
	}
	if e.Record.State == vm.StateStopped || e.Record.State == vm.StateError {
		r.end[name] = time.Now()
	}
	return nil
}

// stopped returns when the VM of that name was last seen to stop.
func (r *readiness) stopped(name string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.end[name]
}

// wait returns when the guest of that name was set up, and its record of then.
func (r *readiness) wait(t *testing.T, name string) (at time.Time, rec vm.Record) {
	t.Helper()
	until(t, time.Minute, "agent of "+name+" answers", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		at, rec = r.at[name], r.rec[name]
		return !at.IsZero()
	})
	return at, rec
}
