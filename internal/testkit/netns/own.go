package netns

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Own gives the test's namespace addresses besides loopback: 10.77.0.1, 10.77.0.2 and fd77::1 on the link own0, and the
// whole local network 10.78.0.0/24.
func Own(t testing.TB) {
	t.Helper()
	Require(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "own0"
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "own1"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	for _, a := range []string{"10.77.0.1/24", "10.77.0.2/24", "fd77::1/64"} {
		p := netip.MustParsePrefix(a)
		ipnet := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipnet, Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	_, local, _ := net.ParseCIDR("10.78.0.0/24")
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: local, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST}
	if err := netlink.RouteAdd(route); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.RouteDel(route) })
}
