package bridge

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// A restart of the daemon changes nothing for guests, and the next policies apply to them.
func TestPoliciesSurviveARestart(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	open, shut, fresh := policed(t, before, "open"), policed(t, before, "shut"), policed(t, before, "fresh")
	police(t, before, network.Policies{
		Guests: []network.Guest{{ID: open.id}, {ID: shut.id, Ingress: []int{0}}}, Ingress: []network.Policy{{Name: "deny"}},
	})
	openServes, _ := listen(t, open.ns, net.JoinHostPort(open.nic.IP, "0"))
	shutServes, _ := listen(t, shut.ns, net.JoinHostPort(shut.nic.IP, "0"))
	freshServes, _ := listen(t, fresh.ns, net.JoinHostPort(fresh.nic.IP, "0"))
	same := func(t *testing.T) {
		t.Helper()
		shut.want("as before", openServes, true)
		open.want("as before", shutServes, false)
		open.want("as before", freshServes, false)
	}
	same(t)
	n := start(t, cfg)
	for _, g := range []guest{open, shut, fresh} { // as the engine may do for a VM that runs
		if nic, err := n.Attach(t.Context(), g.id, "open", 0, vm.NICSpec{Policed: true}); err != nil || nic.IP != g.nic.IP {
			t.Fatalf("%+v, %v", nic, err)
		}
	}
	same(t)
	police(t, n, network.Policies{Guests: []network.Guest{{ID: open.id}, {ID: shut.id}, {ID: fresh.id}}})
	open.want("the new policies", shutServes, true)
	open.want("the new policies", freshServes, true)

	// Somebody removes all rules: nobody is open who was policed.
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "nft"), "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	last := build(t, cfg)
	if err := last.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	open.want("its policies are lost", shutServes, false)
	police(t, last, network.Policies{Guests: []network.Guest{{ID: open.id}, {ID: shut.id}}})
	open.want("its policies are back", shutServes, true)
}

// After a restart of the daemon, the first virtual node that sets its policies leaves those of the others as they were.
func TestPoliciesOfSeveralNodesSurviveARestart(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	a, b := policed(t, before, "a"), policed(t, before, "b")
	ofA := network.Policies{Node: "first", Guests: []network.Guest{{ID: a.id}}}
	police(t, before, ofA)
	police(t, before, network.Policies{
		Node: "second", Guests: []network.Guest{{ID: b.id, Ingress: []int{0}}},
		Ingress: []network.Policy{{Name: "from-a", Rules: []network.Rule{{Peers: only(a.nic.IP), AllPorts: true}}}},
	})
	serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	a.want("before the restart", serves, true)
	n := start(t, cfg)
	police(t, n, ofA)
	a.want("its own node has set nothing since the restart", serves, true)
	police(t, n, network.Policies{Node: "second", Guests: []network.Guest{{ID: b.id, Ingress: []int{0}}}, Ingress: []network.Policy{{Name: "deny"}}})
	a.want("the new policies of its node", serves, false)

	// A damaged file closes guests and stops nothing.
	if err := os.WriteFile(n.police.saved.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	last := build(t, cfg)
	if err := last.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	police(t, last, ofA)
	a.want("its policies are unknown", serves, false)
}

// What a file says that could not be written never takes the place of newer policies, which are in force without it.
func TestPoliciesNotSaved(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: dir}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	a, b := policed(t, before, "a"), policed(t, before, "b")
	serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	ofA := network.Policies{Node: "first", Guests: []network.Guest{{ID: a.id}}}
	allow := network.Policies{Node: "second", Guests: []network.Guest{{ID: b.id}}}
	deny := network.Policies{Node: "second", Guests: []network.Guest{{ID: b.id, Ingress: []int{0}}}, Ingress: []network.Policy{{Name: "deny"}}}
	police(t, before, ofA)
	police(t, before, allow)
	a.want("allowed", serves, true)

	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if err := before.Police(t.Context(), deny); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("not saved: %v", err)
	}
	a.want("in force, but not saved", serves, false)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	n := start(t, cfg)
	police(t, n, ofA)
	a.want("after a restart of the daemon", serves, false)
	police(t, n, allow)
	a.want("its own node allows", serves, true)

	// The kernel refuses: what was saved before is saved again, and nothing is forgotten.
	saved, err := os.ReadFile(n.police.saved.path)
	if err != nil {
		t.Fatal(err)
	}
	again := build(t, cfg)
	if err := again.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	space := again.police.socket.space
	again.police.socket.space.Path = filepath.Join(dir, "none")
	if err := errors.Join(again.police.socket.close(), again.Police(t.Context(), deny)); err == nil {
		t.Error("set without a kernel")
	}
	again.police.socket.space = space
	if now, err := os.ReadFile(n.police.saved.path); err != nil || string(now) != string(saved) {
		t.Errorf("saved %s (%v), before %s", now, err, saved)
	}
	police(t, again, ofA)
	a.want("the policies before", serves, true)
}

// An address that changes its guest takes no policies with it.
func TestPoliciesOfAnEarlierGuest(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a := configured(t, n, "a")
	id := vm.NewID()
	nic, err := n.Attach(t.Context(), id, "b", 0, vm.NICSpec{Policed: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.Detach(t.Context(), nic), n.Release(t.Context(), nic)); err != nil {
		t.Fatal(err)
	}
	b := configured(t, n, "b")
	if b.nic.IP != nic.IP {
		t.Fatalf("it has %s, not %s", b.nic.IP, nic.IP)
	}
	serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	a.want("not policed", serves, true)
	if c := policed(t, n, "c"); c.dials(serves, impatience) {
		t.Error("a policed guest is open")
	}
}

// A guest keeps its policies and ports when an earlier one that had its address is detached again, as the engine may do.
func TestDetachedAgain(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start6(t, Config{NAT: true})
	other := configured(t, n, "other").joined()
	early, err := n.Attach(t.Context(), vm.NewID(), "a", 0, policedSpec)
	if err := errors.Join(err, n.Detach(t.Context(), early), n.Release(t.Context(), early)); err != nil {
		t.Fatal(err)
	}
	spec := vm.NICSpec{Policed: true, Ports: []vm.PortMapping{{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80}}}
	late := newGuestOf(t, n, vm.NewID(), "a", spec).joined()
	late.configure(late.nic.IP)
	if late.nic.IP != early.IP || late.nic.IPv6 != early.IPv6 {
		t.Fatalf("it has %s and %s, not %s and %s", late.nic.IP, late.nic.IPv6, early.IP, early.IPv6)
	}
	serves, _ := listen(t, late.ns, net.JoinHostPort(late.nic.IP, "80"))
	serves6, _ := listen(t, late.ns, net.JoinHostPort(late.nic.IPv6, "80"))
	if err := errors.Join(n.Detach(t.Context(), early), n.Release(t.Context(), early)); err != nil {
		t.Fatal(err)
	}
	other.want("closed", serves, false)
	other.want("closed", serves6, false)
	if !dial(t, "10.88.7.1:8080", patience) {
		t.Error("the port of the guest is closed")
	}
}
