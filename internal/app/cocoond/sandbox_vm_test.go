//go:build vm

package cocoond_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMSandbox: containers are added to a guest without an image, started, ended and removed one by one. Nothing of them stays,
// neither in the guest nor on the record, also across restarts of cocoond and of the guest.
func TestVMSandbox(t *testing.T) {
	n := newNode(t)
	ctx := t.Context()
	c := func(name, script string, manual bool) vm.Container {
		return vm.Container{Name: name, Kind: vm.ContainerEphemeral, Image: demo, Manual: manual, Process: vm.Process{Entrypoint: []string{"sh", "-c", script}, StopSignal: "USR1"}}
	}
	must := func(r vm.Record, err error) vm.Record {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	rec := must(n.Launch(ctx, vm.Spec{Name: "pod", Sandbox: true, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20}))
	began := time.Now()
	must(n.AddContainer(ctx, "pod", c("one", "echo up; trap 'echo asked; exit 3' USR1; while :; do sleep 0.1; done", false))) // while it boots
	n.ready("pod")
	t.Logf("ready after %s", time.Since(began))
	state := func(name string, want vm.ContainerState) vm.ContainerStatus {
		t.Helper()
		var s *vm.ContainerRecord
		n.until(name+" is "+string(want), func() bool {
			r, err := n.Inspect(ctx, "pod")
			s = r.Container(name)
			return err == nil && s != nil && s.Status.State == want
		})
		return s.Status
	}
	state("one", vm.ContainerRunning)
	must(n.AddContainer(ctx, "pod", c("two", "echo two; touch /mine; exec sleep 100000", true)))
	state("two", vm.ContainerCreated)
	if _, err := n.Exec(ctx, "pod", guest.Exec{Container: "two", Command: []string{"true"}}, guest.Streams{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a command in one that has not started: %v", err)
	}
	began = time.Now()
	if r := must(n.StartContainer(ctx, "pod", "two")); r.Container("two").Status.State != vm.ContainerRunning {
		t.Errorf("started: %+v", r.Container("two").Status)
	}
	t.Logf("started in %s", time.Since(began))
	for name, want := range map[string]string{"one": "none", "two": "mine"} {
		if got := n.shIn("pod", name, "test -e /mine && echo -n mine || echo -n none"); got != want {
			t.Errorf("%s has %q, want %q", name, got, want)
		}
	}
	if s, err := n.Stats(ctx, "pod"); err != nil || len(s.Containers) != 2 {
		t.Errorf("stats: %+v, %v", s.Containers, err)
	}
	must(n.AddContainer(ctx, "pod", c("none", "true", true)))
	bad := c("bad", "", true)
	bad.Process.Entrypoint = []string{"/no/such"}
	must(n.AddContainer(ctx, "pod", bad))
	if _, err := n.StartContainer(ctx, "pod", "bad"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("one without a program: %v", err)
	}
	if s := state("bad", vm.ContainerTerminated); s.Reason != vm.ContainerStartError || s.Exit.Code != 128 {
		t.Errorf("one without a program: %+v", s)
	}
	n.crash()
	n.ready("pod")
	if err := n.KillContainer(ctx, "pod", "one", 0, time.Minute); err != nil {
		t.Fatal(err)
	}
	if s := state("one", vm.ContainerTerminated); s.Exit.Code != 3 {
		t.Errorf("the end of one: %+v", s.Exit)
	}
	var log strings.Builder
	if err := n.Logs(ctx, "pod", guest.LogOptions{Container: "one", Tail: -1, Follow: true}, func(e guest.LogEntry) error { log.Write(e.Data); return nil }); err != nil || !strings.HasPrefix(log.String(), "up\n") || !strings.Contains(log.String(), "asked\n") { // the shell may tell of the signal in between
		t.Errorf("the log of one: %q, %v", log.String(), err)
	}
	if err := n.KillContainer(ctx, "pod", "none", 0, 0); err != nil {
		t.Fatal(err)
	}
	if s := state("none", vm.ContainerTerminated); s.Exit.Code != 137 || !s.StartedAt.IsZero() {
		t.Errorf("the end of one that never ran: %+v", s)
	}
	for _, name := range []string{"one", "bad", "none"} {
		if err := n.RemoveContainer(ctx, "pod", name); err != nil {
			t.Fatal(err)
		}
	}
	usage := func() (mounts, disks string) {
		t.Helper()
		return n.shIn("pod", "two", "for p in /proc/[0-9]*; do readlink $p/ns/mnt; done 2>/dev/null | sort -u | wc -l"), n.shIn("pod", "two", "ls /sys/block | wc -l; ls -d /sys/fs/cgroup/container-* 2>/dev/null | wc -l; wc -l </proc/1/mountinfo; ls /proc/1/fd | wc -l")
	}
	writes := "dd if=/dev/zero of=/big bs=1M count=30 2>/dev/null; exit 3" // two of these do not fit on the disk
	round := func(i int) {
		t.Helper()
		name := fmt.Sprint("r", i%3)
		must(n.AddContainer(ctx, "pod", c(name, writes, true)))
		must(n.StartContainer(ctx, "pod", name))
		if s := state(name, vm.ContainerTerminated); s.Exit.Code != 3 {
			t.Fatalf("round %d: %+v", i, s.Exit)
		}
		if err := n.RemoveContainer(ctx, "pod", name); err != nil {
			t.Fatal(err)
		}
	}
	round(0)
	mounts, disks := usage()
	before := must(n.Inspect(ctx, "pod"))
	began = time.Now()
	const rounds = 8
	for i := range rounds {
		round(i)
	}
	t.Logf("a round takes %s", time.Since(began)/rounds)
	m, d := usage()
	after := must(n.Inspect(ctx, "pod"))
	if m != mounts || d != disks || len(after.Ephemeral) != 1 || len(after.Disks) != len(before.Disks) {
		t.Errorf("after %d rounds: namespaces %q, were %q; disks, groups, mounts and files %q, were %q; record %+v", rounds, m, mounts, d, disks, after.Disks)
	}

	// The last one takes the disks with it.
	began = time.Now()
	if err := n.RemoveContainer(ctx, "pod", "two"); err != nil {
		t.Fatal(err)
	}
	t.Logf("the last one was removed in %s", time.Since(began))
	if after = must(n.Inspect(ctx, "pod")); len(after.Ephemeral) != 0 || len(after.Disks) != len(rec.Disks) {
		t.Errorf("without containers: %+v", after.Disks)
	}
	must(n.AddContainer(ctx, "pod", c("two", "test -e /mine && exit 9; exec sleep 100000", true)))
	if r := must(n.StartContainer(ctx, "pod", "two")); r.Disks[len(r.Disks)-1].Port != 1 && r.Disks[1].Port != 1 {
		t.Errorf("the port is not used again: %+v", r.Disks)
	}
	if got := n.shIn("pod", "two", "test -e /mine && echo -n mine || echo -n none"); got != "none" {
		t.Errorf("the new one has the file of the old one: %q", got)
	}

	// The containers end with the guest, whose next boot has nothing of them.
	must(n.Stop(ctx, "pod", -1))
	must(n.Start(ctx, "pod"))
	n.ready("pod")
	if s := state("two", vm.ContainerTerminated); s.Exit.Code != 143 && s.Exit.Code != 137 && s.Exit.Code != 138 {
		t.Errorf("after a reboot: %+v", s.Exit)
	}
	if err := n.RemoveContainer(ctx, "pod", "two"); err != nil {
		t.Fatal(err)
	}
	must(n.AddContainer(ctx, "pod", c("two", "exec sleep 100000", true)))
	must(n.StartContainer(ctx, "pod", "two"))
	if err := n.Remove(ctx, "pod", true); err != nil {
		t.Fatal(err)
	}
	if traces := n.unlisted(); len(traces) > 0 {
		t.Errorf("left: %v", traces)
	}
}
