//go:build vm || cri

package cocoond_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

const demo = "demo:latest"

// node is the test's own cocoond, as a process that can be killed.
type node struct {
	*nodeclient.Client
	t       *testing.T
	dir     string
	flags   []string
	process *exec.Cmd
}

// newNode starts cocoond with the demo image and additional settings in YAML, and removes everything when the test
// ends.
func newNode(t *testing.T, config ...string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "cocoond-vm-") // short, for sockets below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return newNodeIn(t, dir, config...)
}

// newNodeIn is newNode with its files in a folder.
func newNodeIn(t *testing.T, dir string, config ...string) *node {
	t.Helper()
	need.Tun(t)
	need.QEMU(t)
	kernel, initramfs := need.GuestKernel(t)
	if err := os.Chmod(dir, 0o755); err != nil { // hypervisors run as other users
		t.Fatal(err)
	}
	n := &node{t: t, dir: dir, flags: []string{
		"--config", filepath.Join(dir, "cocoond.yaml"), "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"),
		"--kernel", kernel, "--initramfs", initramfs,
	}}
	if err := os.WriteFile(n.flags[1], []byte(strings.Join(config, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("%s", text[max(0, len(text)-6000):])
		}
	})
	n.start()
	t.Cleanup(func() {
		_ = n.process.Process.Signal(syscall.SIGTERM)
		_ = n.process.Wait()
		if out, err := exec.Command(n.process.Path, append([]string{"shutdown"}, n.flags...)...).CombinedOutput(); err != nil {
			t.Errorf("cocoond shutdown: %v\n%s", err, out)
		}
	})
	tar, err := os.Open(need.Built(t, "bin/demo.tar", "make demo-image"))
	if err != nil {
		t.Fatal(err)
	}
	defer tar.Close()
	if _, err := n.ImportImage(t.Context(), demo, tar, nil); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *node) start() {
	n.t.Helper()
	n.begin()
	var err error
	if n.Client, err = nodeclient.Dial(filepath.Join(n.dir, "run/cocoond.sock")); err != nil {
		n.t.Fatal(err)
	}
	client := n.Client
	n.t.Cleanup(func() { client.Close() })
	n.until("cocoond answers", func() bool { _, err := n.Info(n.t.Context()); return err == nil })
}

// begin starts the process, unless it runs, and does not wait for it.
func (n *node) begin() {
	n.t.Helper()
	if n.process != nil && n.process.ProcessState == nil {
		return
	}
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	n.process = exec.Command(need.Built(n.t, "bin/cocoond", "make binaries"), n.flags...)
	n.process.Stdout, n.process.Stderr = log, log
	if err := n.process.Start(); err != nil {
		n.t.Fatal(err)
	}
}

// crash kills cocoond with kill -9 and starts it again.
func (n *node) crash() {
	n.t.Helper()
	_ = n.process.Process.Kill()
	_ = n.process.Wait()
	n.start()
}

func (n *node) until(what string, ok func() bool) {
	n.t.Helper()
	n.within(4*time.Minute, what, ok)
}

func (n *node) within(most time.Duration, what string, ok func() bool) {
	n.t.Helper()
	limit := time.NewTimer(most)
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			n.t.Fatalf("waited in vain until %s", what)
		}
	}
}

// state is the state of the VM called sleeper.
func (n *node) state() vm.State {
	r, err := n.Inspect(n.t.Context(), "sleeper")
	if err != nil {
		return ""
	}
	return r.State
}

func (n *node) ready(ref string) vm.Record {
	n.t.Helper()
	var r vm.Record
	n.until(ref+" is ready", func() bool {
		var err error
		r, err = n.Inspect(n.t.Context(), ref)
		return err == nil && r.State == vm.StateRunning && r.AgentReady
	})
	return r
}

// counting runs a VM whose main process counts in its log and in the file /n, and serves HTTP.
func (n *node) counting(name string) vm.Record {
	n.t.Helper()
	return n.countingEvery(name, "0.1")
}

// countingEvery is counting with a pause in seconds. Each step is two processes on an emulated CPU: many fast guests
// would leave no CPU time for what is tested.
func (n *node) countingEvery(name, pause string) vm.Record {
	n.t.Helper()
	_, err := n.Launch(n.t.Context(), vm.Spec{
		Name: name, Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Process: vm.Process{Entrypoint: []string{"sh", "-c", "n=0; while :; do n=$((n+1)); echo count $n; echo $n >/n; sleep " + pause + "; done & exec /usr/bin/server"}},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	r := n.ready(name)
	n.until("it counts", func() bool { return len(n.counts(name)) > 3 })
	return r
}

func (n *node) sh(ref, script string) string { return n.shIn(ref, "", script) }

func (n *node) shIn(ref, container, script string) string {
	n.t.Helper()
	var out, errs bytes.Buffer
	code, err := n.Exec(n.t.Context(), ref, guest.Exec{Container: container, Command: []string{"sh", "-c", script}}, guest.Streams{Stdout: &out, Stderr: &errs})
	if err != nil || code != 0 {
		n.t.Fatalf("%s: %s: code %d, %v, %s", ref, script, code, err, errs.String())
	}
	return strings.TrimSpace(out.String())
}

// endIn runs a script that ends the container it runs in. That may end the script as well.
func (n *node) endIn(ref, container, script string) {
	n.t.Helper()
	code, err := n.Exec(n.t.Context(), ref, guest.Exec{Container: container, Command: []string{"sh", "-c", script}}, guest.Streams{})
	if err != nil || code != 0 && code != 128+int(syscall.SIGKILL) {
		n.t.Fatalf("%s: %s: code %d, %v", ref, script, code, err)
	}
}

// counts are the numbers that ref has counted so far, from its log, which must have no gap and no repeated line.
func (n *node) counts(ref string) []int { return n.countsIn(ref, "") }

func (n *node) countsIn(ref, container string) []int {
	n.t.Helper()
	var all []int
	err := n.Logs(n.t.Context(), ref, guest.LogOptions{Tail: -1, Container: container}, func(e guest.LogEntry) error {
		if text, ok := strings.CutPrefix(strings.TrimSpace(string(e.Data)), "count "); ok {
			i, err := strconv.Atoi(text)
			if err != nil || len(all) > 0 && i != all[len(all)-1]+1 {
				n.t.Errorf("%s: %q follows %v", ref, e.Data, all[max(0, len(all)-3):])
			}
			all = append(all, i)
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// goesOn waits until ref has counted further.
func (n *node) goesOn(ref string) { n.goesOnIn(ref, "", 0) }

// goesOnIn is goesOn for a container that has counted to had at least. It returns the numbers counted by then.
func (n *node) goesOnIn(ref, container string, had int) []int {
	n.t.Helper()
	if c := n.countsIn(ref, container); len(c) > 0 {
		had = max(had, c[len(c)-1])
	}
	var c []int
	n.until(ref+" "+container+" counts on", func() bool { c = n.countsIn(ref, container); return len(c) > 0 && c[len(c)-1] > had+2 })
	return c
}

// sums are the digests of all files in a folder.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "snapshot.json" { // it records when it was used
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return err
		}
		all[path] = fmt.Sprintf("%x", h.Sum(nil))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// containersGoOn hibernates, wakes and clones a VM of two containers that count independently. One has a read-only
// root.
func containersGoOn(t *testing.T, n *node) {
	t.Helper()
	const script = "echo $$ >/dev/shm/$0; n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done"
	spec := vm.Spec{Name: "pair", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}}, Restart: vm.RestartAlways}
	names := []string{"left", "right"}
	for _, name := range names {
		c := vm.Container{Name: name, Image: demo, Kind: vm.ContainerApp, Process: vm.Process{Entrypoint: []string{"sh", "-c", script, name}, ReadOnlyRoot: name == "right"}}
		spec.Containers = append(spec.Containers, c)
	}
	if _, err := n.Launch(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	was := n.ready("pair")
	// The left container has been restarted before, and has written a machine id.
	n.goesOnIn("pair", "left", 0)
	n.endIn("pair", "left", "echo 0123456789abcdef0123456789abcdef >/etc/machine-id; kill $(cat /dev/shm/left)")
	n.until("the left one runs again", func() bool {
		r, err := n.Inspect(t.Context(), "pair")
		return err == nil && r.Container("left").Status.Restarts == 1 && r.Container("left").Status.State == vm.ContainerRunning
	})
	had := map[string]int{}
	for _, name := range names {
		c := n.goesOnIn("pair", name, 0)
		had[name] = c[len(c)-1]
	}
	boot := n.sh("pair", "cat /proc/sys/kernel/random/boot_id")
	if _, err := n.Hibernate(t.Context(), "pair", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Wake(t.Context(), "pair"); err != nil {
		t.Fatal(err)
	}
	r := n.ready("pair")
	if s := r.Container("left").Status; s.Restarts != 1 || s.Last == nil || r.NICs[0].MAC != was.NICs[0].MAC {
		t.Errorf("awake: %+v", r.Containers)
	}
	for _, name := range names {
		if c := n.goesOnIn("pair", name, had[name]); c[0] != 1 {
			t.Errorf("the log of %s begins at %d", name, c[0])
		}
	}
	if b := n.sh("pair", "cat /proc/sys/kernel/random/boot_id"); b != boot {
		t.Error("it has booted")
	}
	previous := 0
	if err := n.Logs(t.Context(), "pair", guest.LogOptions{Tail: -1, Container: "left", Previous: true}, func(guest.LogEntry) error { previous++; return nil }); err != nil || previous == 0 {
		t.Errorf("the run before has %d lines, %v", previous, err)
	}

	if _, err := n.SaveSnapshot(t.Context(), "pair", vm.SaveSpec{Name: "two"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "two", Name: "twin"}); err != nil {
		t.Fatal(err)
	}
	c := n.ready("twin")
	for _, name := range names {
		if all := n.goesOnIn("twin", name, had[name]); all[0] < had[name] {
			t.Errorf("the log of the clone's %s begins at %d, that of its source was at %d before", name, all[0], had[name])
		}
		if got := n.shIn("twin", name, "cat /etc/hostname; grep -qwF "+c.NICs[0].IP+" /etc/hosts && ! grep -wF "+r.NICs[0].IP+" /etc/hosts"); got != "twin" {
			t.Errorf("in the clone %s is %q", name, got)
		}
	}
	if id := n.shIn("twin", "left", "cat /etc/machine-id"); len(id) != 32 || id == "0123456789abcdef0123456789abcdef" {
		t.Errorf("the clone's machine id in a container: %q", id)
	}
	n.goesOnIn("pair", "right", 0)
	n.shIn("twin", "right", "! touch /x 2>/dev/null")
	n.endIn("twin", "right", "kill $(cat /dev/shm/right)")
	n.until("a container of the clone runs again", func() bool {
		r, err := n.Inspect(t.Context(), "twin")
		return err == nil && r.Container("right").Status.Restarts == 1 && r.Container("right").Status.State == vm.ContainerRunning
	})
	if all := n.goesOnIn("twin", "right", 0); all[0] != 1 {
		t.Errorf("the next run begins at %d", all[0])
	}
	for _, ref := range []string{"twin", "pair"} {
		if err := n.Remove(t.Context(), ref, true); err != nil {
			t.Error(err)
		}
	}
	if err := n.RemoveSnapshot(t.Context(), "two"); err != nil {
		t.Error(err)
	}
}
