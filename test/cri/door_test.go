//go:build cri

package cri

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// door is a cocoond whose CRI socket is in front of a containerd.
type door struct {
	t       *testing.T
	socket  string
	config  string
	log     string
	process *exec.Cmd
}

// openDoor starts a cocoond, which ends with the test. Its VMs have the network of containerd's pods.
func openDoor(t *testing.T, d *containerdtest.Daemon) *door {
	t.Helper()
	dir := d.Dir("cocoond")
	o := &door{t: t, socket: filepath.Join(dir, "cri.sock"), config: filepath.Join(dir, "cocoond.yaml"), log: filepath.Join(dir, "log")}
	registry := strings.TrimPrefix(d.Registry.URL, "http://")
	type object = map[string]any
	config := d.Door(o.socket, containerdtest.Pods)
	config["stateDir"], config["runDir"] = filepath.Join(dir, "state"), filepath.Join(dir, "run")
	config["guest"] = object{"kernel": need.Built(t, "bin/guest/vmlinux", "make guest"), "initramfs": need.Built(t, "bin/guest/initramfs", "make guest")}
	config["network"].(object)["closed"] = []string{}
	config["cri"].(object)["size"] = object{"memory": 192 << 20, "storage": 128 << 20}
	mirrors := object{registry: object{"insecure": true}}
	for _, host := range []string{"registry.k8s.io", "gcr.io", "k8s.gcr.io"} {
		mirrors[host] = object{"mirrors": []string{registry}}
	}
	config["images"] = object{"allow": []string{"127.0.0.0/8"}, "registries": mirrors}
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		o.stop(syscall.SIGTERM)
		if out, err := exec.Command(need.Built(t, "bin/cocoond", "make binaries"), "shutdown", "--config", o.config, "--grace", "0s").CombinedOutput(); err != nil {
			t.Errorf("VMs not ended: %v\n%s", err, out)
		}
		if t.Failed() {
			text, _ := os.ReadFile(o.log)
			t.Logf("cocoond:\n%s", text)
		}
	})
	o.start()
	return o
}

// start starts cocoond, and waits until it serves.
func (o *door) start() {
	o.t.Helper()
	log, err := os.OpenFile(o.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		o.t.Fatal(err)
	}
	defer log.Close()
	o.process = exec.Command(need.Built(o.t, "bin/cocoond", "make binaries"), "--config", o.config)
	o.process.Stdout, o.process.Stderr = log, log
	if err := o.process.Start(); err != nil {
		o.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(o.t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if c, err := (&net.Dialer{}).DialContext(ctx, "unix", o.socket); err == nil {
			c.Close()
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			text, _ := os.ReadFile(o.log)
			o.t.Fatalf("cocoond does not serve CRI:\n%s", text)
		}
	}
}

// stop ends cocoond. Its VMs go on.
func (o *door) stop(by syscall.Signal) {
	if o.process == nil {
		return
	}
	_ = o.process.Process.Signal(by)
	_ = o.process.Wait()
	o.process = nil
}

// emptyRunDir removes what a reboot of the node removes. cocoond does not run.
func (o *door) emptyRunDir() {
	o.t.Helper()
	dir := filepath.Join(filepath.Dir(o.config), "run")
	for _, path := range proc.MountsBelow(dir) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			o.t.Fatalf("unmount %s: %v", path, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		o.t.Fatal(err)
	}
}

// TestCritestVM runs critest on VM pods.
func TestCritestVM(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	score := Score(t, Run{Socket: o.socket, Handler: "cocoon", Focus: os.Getenv("CRITEST_FOCUS"), Skip: os.Getenv("CRITEST_SKIP"), Dir: d.Dir("critest-vm"), Path: d.Path(), Nodes: 2})
	t.Log(Table(score))
	for _, line := range unexcused(score, slices.Concat(excuses, cannot)) {
		t.Error(line)
	}
}
