//go:build vm

package firecracker

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

func run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

func pings(t testing.TB, ns, address string) bool {
	t.Helper()
	return exec.CommandContext(t.Context(), "ip", "netns", "exec", ns, "ping", "-c", "1", "-W", "1", address).Run() == nil
}

// TestNICs: a guest has its interfaces in their places and reaches a bridge in another namespace. A clone whose links are down is silent until OpenLink, also after
// a restart of the daemon. The taps are where they were, with all that they had.
func TestNICs(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 3)
	p := a.Plan(t)
	nic := func(n int) vm.NIC {
		return vm.NIC{Tap: fmt.Sprintf("tap%d", n), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", 0x40+n), MTU: 1400}
	}
	p.NICs = []vm.NIC{nic(0), nic(1)}
	before := run(t, "ip", "-n", ns, "-o", "link")
	i := start(t, d, p)
	testguest.Logged(t, i, "macs: 02:00:00:00:00:40 02:00:00:00:00:41")
	if after := run(t, "ip", "-n", ns, "-o", "link"); strings.Count(after, "master br0") != 3 || strings.Count(after, "\n") != strings.Count(before, "\n") {
		t.Errorf("the links were:\n%sand are:\n%s", before, after)
	}
	testguest.Say(t, i, "up 10.9.8.2/24")
	testguest.Logged(t, i, "UP")
	testguest.Await(t, "the guest answers", func() bool { return pings(t, ns, "10.9.8.2") })
	testguest.Say(t, i, "chatter 10.9.8.1")
	s := saved(t)
	s.Hold = true
	doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := from(t, a, p, s)
	q.NICs[0].Tap = "tap2"
	q.Incoming.LinksDown = true
	j := start(t, d, q)
	testguest.Say(t, j, "mac")
	testguest.Logged(t, j, "02:00:00:00:00:40")
	if pings(t, ns, "10.9.8.2") {
		t.Error("the clone answers before OpenLink")
	}
	if n := strings.TrimSpace(run(t, "ip", "netns", "exec", ns, "cat", "/sys/class/net/tap2/statistics/rx_packets")); n != "0" {
		t.Errorf("%s packets came out of a guest before OpenLink", n)
	}
	_ = j.Close()
	j, err := testDriver(t).Adopt(t.Context(), j.Handle())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	opener, _ := hypervisor.As[hypervisor.LinkOpener](j)
	if err := opener.OpenLink(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	testguest.Await(t, "the clone answers", func() bool { return pings(t, ns, "10.9.8.2") })
	if _, ok := hypervisor.As[hypervisor.Linker](j); ok {
		t.Error("it takes no carrier")
	}
	if err := opener.OpenLink(t.Context(), 7); !errdefs.IsNotFound(err) {
		t.Errorf("an interface that is not there: %v", err)
	}
	if err := j.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := opener.OpenLink(t.Context(), 0); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v", err)
	}
	if after := run(t, "ip", "-n", ns, "-o", "link"); strings.Count(after, "\n") != strings.Count(before, "\n") {
		t.Errorf("the taps went with the process:\n%s", after)
	}
	busy := p
	busy.ID, busy.Dir, busy.NICs = vm.NewID(), testguest.Dir(t), []vm.NIC{nic(0)}
	k := start(t, d, busy)
	again := busy
	again.ID, again.Dir = vm.NewID(), testguest.Dir(t)
	if _, err := d.Launch(t.Context(), again); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a tap that another VM has: %v", err)
	}
	if s, err := k.State(t.Context()); err != nil || s != hypervisor.Running {
		t.Errorf("the other VM: %s, %v", s, err)
	}
}

// TestReapLoan: a daemon that dies while a tap is on loan loses the tap with the process, and the network makes another one.
func TestReapLoan(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 1)
	p := a.Plan(t)
	p.NICs = []vm.NIC{{Tap: "tap0", NetNS: "/run/netns/" + ns, MAC: "02:00:00:00:00:40"}}
	l := &launch{Rooted: jail.Rooted{Launch: jail.Launch{Jail: d.jail, Plan: p}}, d: d}
	for _, step := range []func(context.Context) error{l.compose, l.TakeUser, l.makeCgroup, l.openFiles, l.openLogs, l.start} {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	there, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", l.Proc.PID()))
	if err != nil {
		t.Fatal(err)
	}
	loan, err := lendTap(p.NICs[0], there)
	if err != nil {
		t.Fatal(err)
	}
	_, _, _ = loan.home.Close(), there.Close(), l.Proc.Close() // the daemon dies
	l.release()
	if err := testDriver(t).Reap(t.Context(), p.ID, p.Dir); err != nil {
		t.Fatal(err)
	}
	if left := jailtest.Left(t, d.jail, p); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if text := run(t, "ip", "-n", ns, "-o", "link"); strings.Contains(text, "tap0") {
		t.Errorf("the tap came back by itself:\n%s", text)
	}
	run(t, "ip", "-n", ns, "tuntap", "add", "tap0", "mode", "tap", "vnet_hdr")
	i := start(t, d, p)
	testguest.Logged(t, i, "macs: 02:00:00:00:00:40")
}
