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

// daemon is a cocoond for the benchmark, with the demo image.
type daemon struct {
	*nodeclient.Client
	*program
	dir, socket string
}

// start runs cocoond with additional settings in YAML until the test ends.
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
	t.Cleanup(func() {
		if out, err := exec.Command(bin("cocoond"), append([]string{"shutdown"}, flags...)...).CombinedOutput(); err != nil {
			t.Errorf("cocoond shutdown: %v\n%s", err, out)
		}
	})
	d.program = background(t, "cocoond", os.Environ(), append([]string{bin("cocoond")}, flags...)...)
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

// program is a process that runs until the test ends.
type program struct {
	argv, env []string
	log       string // path
	cmd       *exec.Cmd
	pid       int
}

// background starts a program.
func background(t *testing.T, what string, env []string, argv ...string) *program {
	t.Helper()
	p := &program{argv: argv, env: env, log: filepath.Join(t.TempDir(), "log")}
	if err := p.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		_ = p.cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(p.log)
			t.Logf("%s:\n%s", what, text[max(0, len(text)-4000):])
		}
	})
	return p
}

// start starts it. It can be called again after kill.
func (p *program) start() error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.cmd = exec.Command(p.argv[0], p.argv[1:]...)
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = p.env, log, log
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.pid = p.cmd.Process.Pid
	return nil
}

// kill ends it with SIGKILL, like a crash.
func (p *program) kill() error {
	err := p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	return err
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

// readiness records from the node's events when guests were set up.
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

// stopped returns when the VM of that name last stopped.
func (r *readiness) stopped(name string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.end[name]
}

// wait returns when the guest of that name was set up, and its record at that time.
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
