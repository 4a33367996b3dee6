package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestLend lends a tap to another network namespace, opens it there as the program does, and brings it back open. All that it has is as before.
func TestLend(t *testing.T) {
	netns.Require(t)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	filtering := true
	bridge.VlanFiltering = &filtering
	err := netlink.LinkAdd(bridge)
	if errors.Is(err, unix.EOPNOTSUPP) { // the kernel has no VLANs
		bridge.VlanFiltering, filtering = nil, false
		err = netlink.LinkAdd(bridge)
	}
	if err != nil {
		need.Missing(t, "bridges: "+err.Error())
	}
	peer := addTap(t, "peer0")
	tap := addTap(t, "tap0")
	for what, err := range map[string]error{
		"alias": netlink.LinkSetAlias(tap, "cocoon:one tap"), "mtu": netlink.LinkSetMTU(tap, 1400), "master": netlink.LinkSetMaster(tap, bridge),
		"isolated": netlink.LinkSetIsolated(tap, true), "learning": netlink.LinkSetLearning(tap, false), "hairpin": netlink.LinkSetHairpin(tap, true),
		"up": netlink.LinkSetUp(tap), "peer up": netlink.LinkSetUp(peer), "vlan": vlan(tap, filtering),
		"queue": netlink.LinkSetTxQLen(tap, 123), "to peer": redirect(tap, peer), "from peer": redirect(peer, tap),
		"ipv6": os.WriteFile(ipv6Setting("tap0", "disable_ipv6"), []byte("1"), 0),
	} {
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	before := describe(t, "tap0") + describe(t, "peer0")
	away, err := os.Open(netns.New(t))
	if err != nil {
		t.Fatal(err)
	}
	defer away.Close()
	nic := vm.NIC{Tap: "tap0"}
	loan, err := lendTap(nic, away)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := netlink.LinkByName("tap0"); err == nil {
		t.Fatal("the tap is still at home")
	}
	var opened []*os.File
	err = within(away, func() (err error) {
		opened, err = jail.OpenTaps(t.Context(), []vm.NIC{nic})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { jail.CloseAll(opened) }()
	if err := loan.back(); err != nil {
		t.Fatal(err)
	}
	if after := describe(t, "tap0") + describe(t, "peer0"); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := jail.OpenTaps(soon, []vm.NIC{nic}); err == nil {
		t.Error("the tap that came back is not open any more")
	}
	if !carrier(t, "tap0") {
		t.Error("the tap has no carrier")
	}
	passes(t, opened[0], "tap0")
}

// TestLendDies: a process that ends while it has the tap takes it along.
func TestLendDies(t *testing.T) {
	netns.Require(t)
	addTap(t, "gone0")
	before, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	away, err := os.Open(netns.New(t))
	if err != nil {
		t.Fatal(err)
	}
	loan, err := lendTap(vm.NIC{Tap: "gone0"}, away)
	if err != nil {
		t.Fatal(err)
	}
	if err := within(away, func() error {
		l, err := netlink.LinkByName("gone0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}); err != nil {
		t.Fatal(err)
	}
	if err := loan.back(); err == nil {
		t.Error("a tap that is gone came back")
	}
	away.Close()
	if after, err := os.ReadDir("/proc/self/fd"); err != nil || len(after) > len(before) {
		t.Errorf("descriptors: %d, then %d, %v", len(before), len(after), err)
	}
}

// TestLendRefuses: what cannot be put back is not taken away.
func TestLendRefuses(t *testing.T) {
	netns.Require(t)
	tap := addTap(t, "odd0")
	if err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: tap.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}); err != nil {
		t.Skip(err)
	}
	away, err := os.Open(netns.New(t))
	if err != nil {
		t.Fatal(err)
	}
	defer away.Close()
	if _, err := lendTap(vm.NIC{Tap: "odd0"}, away); err == nil {
		t.Error("lent")
	}
	if _, err := netlink.LinkByName("odd0"); err != nil {
		t.Error(err)
	}
}

func addTap(t *testing.T, name string) netlink.Link {
	t.Helper()
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_ONE_QUEUE | netlink.TUNTAP_VNET_HDR}
	if err := netlink.LinkAdd(tap); err != nil {
		t.Fatal(err)
	}
	jail.CloseAll(tap.Fds)
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(l) })
	return l
}

func redirect(from, to netlink.Link) error {
	ingress := netlink.MakeHandle(0xffff, 0)
	if err := netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: from.Attrs().Index, Handle: ingress, Parent: netlink.HANDLE_INGRESS}}); err != nil {
		return err
	}
	return netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: from.Attrs().Index, Parent: ingress, Priority: 9, Protocol: unix.ETH_P_ALL},
		Actions:     []netlink.Action{netlink.NewMirredAction(to.Attrs().Index)},
	})
}

func vlan(tap netlink.Link, filtering bool) error {
	if !filtering {
		return nil
	}
	return netlink.BridgeVlanAdd(tap, 7, true, true, false, true)
}

// describe says all of a link that the driver has to keep.
func describe(t *testing.T, name string) string {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	a := l.Attrs()
	line := func(format string, args ...any) { b.WriteString(name + " " + fmt.Sprintf(format, args...) + "\n") }
	line("index %d, alias %q, mtu %d, master %d, queue %d, up %v, address %s, group %d", a.Index, a.Alias, a.MTU, a.MasterIndex, a.TxQLen, a.Flags&unix.IFF_UP != 0, a.HardwareAddr, a.Group)
	if a.MasterIndex != 0 {
		p, err := netlink.LinkGetProtinfo(l)
		line("%v, %v", p.String(), err)
		all, err := netlink.BridgeVlanList()
		for _, v := range all[int32(a.Index)] {
			line("vlan %v, %v", *v, err)
		}
	}
	for _, key := range []string{"disable_ipv6", "addr_gen_mode", "accept_ra"} {
		text, err := os.ReadFile(filepath.Join("/proc/sys/net/ipv6/conf", name, key))
		line("%s %s %v", key, strings.TrimSpace(string(text)), err)
	}
	filters, err := netlink.FilterList(l, netlink.MakeHandle(0xffff, 0))
	for _, f := range filters {
		u, ok := f.(*netlink.U32)
		if !ok || u.Sel == nil {
			continue
		}
		for _, action := range u.Actions {
			m := action.(*netlink.MirredAction)
			line("filter %d %d %v: %v to %d, %v", u.Priority, u.Protocol, u.Sel.Keys, m.MirredAction, m.Ifindex, err)
		}
	}
	addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	line("addresses %v %v", len(addrs), err)
	lines := slices.Sorted(strings.Lines(b.String()))
	return strings.Join(lines, "")
}

// carrier reports whether somebody has the tap open.
func carrier(t *testing.T, name string) bool {
	t.Helper()
	text, err := os.ReadFile("/sys/class/net/" + name + "/carrier")
	if err == nil {
		return strings.TrimSpace(string(text)) == "1"
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
}

// passes writes a frame to the open tap and sees that the link gets it.
func passes(t *testing.T, open *os.File, name string) {
	t.Helper()
	received := func() uint64 {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return l.Attrs().Statistics.RxPackets
	}
	before := received()
	frame := make([]byte, 10+60) // with the header of a virtio network device
	copy(frame[10:], "\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x08\x06")
	if _, err := open.Write(frame); err != nil {
		t.Fatal(err)
	}
	if after := received(); after != before+1 {
		t.Errorf("the link has received %d frames, then %d", before, after)
	}
}
