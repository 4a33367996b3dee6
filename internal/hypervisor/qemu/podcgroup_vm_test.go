//go:build vm

package qemu

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestInPodCgroup runs a VM with a shared folder in the cgroup of a pod, and adopts it there. Its memory counts there, too.
func TestInPodCgroup(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	var dirs []string
	p.CgroupParent, dirs = jailtest.PodCgroup(t, d.jail.Cgroups, d.cfg.Cgroup)
	_, p.Shares = shared(t)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	logged(t, i, "GUEST-READY")
	jailtest.WantInPod(t, d.jail.Cgroups, i.PID(), p.CgroupParent, p.ID)
	servers := serversOf(t, p)
	if len(servers) != 4 {
		t.Errorf("%d processes of servers", len(servers))
	}
	for _, s := range servers {
		jailtest.WantInPod(t, d.jail.Cgroups, s.PID(), p.CgroupParent, p.ID)
	}
	counted := int64(0)
	for _, dir := range dirs {
		for _, name := range []string{"memory.usage_in_bytes", "memory.current"} {
			if text, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
				counted, _ = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			}
		}
		if procs, err := os.ReadFile(filepath.Join(dir, vm.CgroupPrefix+string(p.ID), "cgroup.procs")); err != nil || strings.Contains("\n"+string(procs), "\n"+strconv.Itoa(os.Getpid())+"\n") {
			t.Errorf("%s has %q, %v", dir, procs, err)
		}
	}
	if least := int64(32 << 20); counted < least {
		t.Errorf("of the memory of the VM, the pod has %d bytes", counted)
	}
	t.Logf("memory of the pod: %d bytes", counted)
	handle := i.Handle()
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	if i, err = testDriver(t).Adopt(t.Context(), handle); err != nil {
		t.Fatal(err)
	}
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}

	// All processes end at once, and what was in /run is lost.
	kill := append(serversOf(t, p), i.(*instance).Proc)
	for _, k := range kill {
		_ = unix.Kill(k.PID(), unix.SIGKILL)
	}
	if err := errors.Join(os.RemoveAll(p.Dir), os.Mkdir(p.Dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	await(t, "the VM is gone", func() bool {
		_, err = testDriver(t).Adopt(t.Context(), handle)
		return errdefs.IsNotFound(err)
	})
	nothingLeft(t, p)
}

// TestPodCgroupIsFull: the VM ends when its pod may have no more memory, and says why.
func TestPodCgroupIsFull(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	var dirs []string
	p.CgroupParent, dirs = jailtest.PodCgroup(t, d.jail.Cgroups, d.cfg.Cgroup)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	logged(t, i, "GUEST-READY")
	limited := false
	for _, dir := range dirs {
		for usage, most := range map[string]string{"memory.usage_in_bytes": "memory.limit_in_bytes", "memory.current": "memory.max"} {
			text, err := os.ReadFile(filepath.Join(dir, usage))
			if err != nil {
				continue
			}
			used, _ := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			if err := os.WriteFile(filepath.Join(dir, most), []byte(strconv.FormatInt(used+4<<20, 10)), 0); err != nil {
				t.Fatal(err)
			}
			limited = true
		}
	}
	if !limited {
		need.Missing(t, "a cgroup tree that limits memory")
	}
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	c, err := console.OpenConsole(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	if _, err := io.WriteString(c, "sh mount -t tmpfs none /mnt; dd if=/dev/zero of=/mnt/x bs=1M count=60\n"); err != nil {
		t.Fatal(err)
	}
	x, err := i.Wait(t.Context())
	if err != nil || !strings.Contains(x.Cause, "limit of memory") {
		t.Errorf("it ended so: %+v, %v", x, err)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, p)
}
