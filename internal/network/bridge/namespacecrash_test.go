package bridge

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// What the kernel has after each step of AttachNamespace, when the daemon is killed there: the next one removes it or takes it over, and the
// container gets the same interface.
func TestNamespaceAfterEachStep(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	ports := []vm.PortMapping{{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80}}
	for _, step := range []string{"admitted", "made", "marked", "plugged", "configured", "complete"} {
		t.Run(step, func(t *testing.T) {
			cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
			before := build(t, cfg)
			if err := before.Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			g := guest{t: t, ns: netns.New(t), id: vm.NewID()}
			untilStep(t, before, g, step, ports)

			after := start(t, cfg)
			unmarked := slices.ContainsFunc(links(t), after.unmarked)
			if unmarked {
				t.Error("a link without a mark is left after the start")
			}
			g.attach(after, "web", vm.NICSpec{Ports: ports})
			_, peers := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "80"))
			if !dial(t, "10.88.7.1:8080", patience) {
				t.Fatal("the port is closed")
			}
			<-peers
			if err := after.Detach(t.Context(), g.nic); err != nil {
				t.Fatal(err)
			}
			for _, l := range links(t) {
				if l.Type() == typeVeth {
					t.Errorf("link %s is left", l.Attrs().Name)
				}
			}
			untilStep(t, after, g, step, ports)
			if err := after.Detach(t.Context(), g.nic); err != nil { // with nothing but the record of the interface
				t.Fatal(err)
			}
			if left := links(t); slices.ContainsFunc(left, func(l netlink.Link) bool { return l.Type() == typeVeth }) {
				t.Errorf("links %v are left after the crash and Detach", left)
			}
		})
	}
}

// untilStep does what AttachNamespace does up to a step.
func untilStep(t *testing.T, n *Network, g guest, step string, ports []vm.PortMapping) {
	t.Helper()
	room, err := host.Space{Path: g.ns}.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	k, lv := vethKind{room}, n.live
	l, _, err := lv.pool.Reserve(ipam.Request{ID: g.id, Name: "web"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	l.Tap = tapName(n.cfg.owner(), g.id, 0, 0)
	br, err := netlink.LinkByName(n.Bridge())
	if err != nil {
		t.Fatal(err)
	}
	var back undo.Stack
	mac, _ := net.ParseMAC(l.MAC)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = l.Tap, unmarkedMAC(n.cfg.owner(), l.Tap)
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerHardwareAddr, pair.PeerNamespace = "eth0", mac, netlink.NsFd(int(room.Fd()))
	for _, s := range []struct {
		name string
		do   func() error
	}{
		{"admitted", func() error { return lv.gate.admit(l) }},
		{"made", func() error { return netlink.LinkAdd(pair) }},
		{"marked", func() error { return n.plugTap(l.Tap, l, br.Attrs().Index, lv.mtu) }},
		{"plugged", func() error { return setPort(l.Tap, lv.rules.meeting) }},
		{"configured", func() error {
			if err := n.ensureLink(lv, &l, vm.Masquerade{}, k, &back); err != nil {
				return err
			}
			return k.finish(n, lv, l)
		}},
		{"complete", func() error { return n.ports.forward(t.Context(), l.IP, ports) }},
	} {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if s.name == step {
			return
		}
	}
}

// victim names the namespaces of a process that attaches and detaches until it is killed.
const victim = "COCOON_TEST_VETH_VICTIM"

// A daemon that is killed at any moment, again and again, leaves nothing that the next one does not find.
func TestNamespacesSurviveKills(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true}
	if spaces := os.Getenv(victim); spaces != "" { // it is killed, and so makes no folder of its own
		var id vm.ID
		var ns string
		if _, err := fmt.Sscan(spaces, &id, &ns, &cfg.StateDir); err != nil {
			t.Fatal(err)
		}
		attachOn(t, cfg, id, ns)
		return
	}
	dir := t.TempDir()
	cfg.StateDir = dir
	ns, id := netns.New(t), vm.NewID()
	first := vm.NIC{}
	for round := range 12 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestNamespacesSurviveKills$", "-test.v=false")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s", victim, id, ns, dir))
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range round%4 + 1 { // the kill comes while it does what follows
			lines.Scan()
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()

		n := build(t, cfg)
		if err := n.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		g := guest{t: t, ns: ns, id: id}
		g.attach(n, "web", vm.NICSpec{})
		if first.IP == "" {
			first = g.nic
		}
		if g.nic.IP != first.IP || g.nic.MAC != first.MAC || g.nic.Tap != first.Tap {
			t.Errorf("round %d: it has %+v, before %+v", round, g.nic, first)
		}
		if !g.pings("10.88.7.1", patience) {
			t.Fatalf("round %d: it does not reach its gateway", round)
		}
		removed, strays, err := n.Sweep(t.Context(), []string{g.nic.Tap}, func(vm.ID) bool { return true })
		if err != nil || len(removed)+len(strays) > 0 {
			t.Errorf("round %d: links %v, strays %v, %v", round, removed, strays, err)
		}
	}
	n := build(t, cfg)
	if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	assertClean(t)
}

// attachOn attaches and detaches an interface for ever, and says so.
func attachOn(t *testing.T, cfg Config, id vm.ID, ns string) {
	n := build(t, cfg)
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	for t.Context().Err() == nil {
		fmt.Println("attaches")
		nic, err := n.AttachNamespace(t.Context(), id, "web", 0, vm.NICSpec{}, ns)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("detaches")
		if err := n.Detach(t.Context(), nic); err != nil {
			t.Fatal(err)
		}
	}
}

// Sweep and Setup touch only links with our mark.
func TestNamespacesOfOthersStay(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
	n := start(t, cfg)
	owner := n.cfg.owner()
	other := func(name, alias string, mac net.HardwareAddr) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr = name, mac
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(int(opened(t, netns.New(t)).Fd()))
		if err := netlink.LinkAdd(pair); err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetAlias(pair, alias); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.LinkDel(pair) })
	}
	mine, theirs := tapPrefix(owner)+"aaaaaaaaaa", tapPrefix("other/default")+"bbbbbbbbbb"
	other(mine, "", net.HardwareAddr{2, 0, 0, 0, 0, 1})                          // our form of a name, but made by another program
	other(theirs, "", unmarkedMAC("other/default", theirs))                      // of another daemon
	other("veth0", "cocoon:other/default tap vm=x", unmarkedMAC(owner, "veth0")) // with its mark
	c := contained(t, n, vm.NewID(), "c", vm.NICSpec{})
	removed, strays, err := n.Sweep(t.Context(), nil, func(id vm.ID) bool { return id == c.id })
	if err != nil || len(strays) > 0 || !slices.Equal(removed, []string{c.nic.Tap}) {
		t.Errorf("removed %v, strays %v, %v", removed, strays, err)
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{mine, theirs, "veth0"} {
		l, err := host.FindLink(name)
		if err != nil || l == nil {
			t.Errorf("link %s is gone (%v)", name, err)
		} else if err := netlink.LinkDel(l); err != nil {
			t.Error(err)
		}
	}
}

func opened(t *testing.T, ns string) *os.File {
	t.Helper()
	f, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
