package uplink

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// cable makes a link of the machine whose other end, far, is in another namespace.
func cable(t *testing.T, name string) (ns string) {
	t.Helper()
	netns.Require(t)
	ns = netns.New(t)
	f, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far", PeerNamespace: netlink.NsFd(int(f.Fd()))}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if l, err := netlink.LinkByName(name); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
	netns.Do(t, ns, func() error {
		l, err := netlink.LinkByName("far")
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		return err
	})
	return ns
}

// far gives the other end of a cable an address.
func far(t *testing.T, ns, link, address string) {
	t.Helper()
	netns.Do(t, ns, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		return netlink.AddrReplace(l, a)
	})
}

// serveDHCP answers on the other end of a cable: it gives .50, or what is asked for, and counts the ids of its clients.
func serveDHCP(t *testing.T, ns string) <-chan string {
	t.Helper()
	far(t, ns, "far", "192.0.2.1/24")
	ids := make(chan string, 100)
	var s *server4.Server
	netns.Do(t, ns, func() (err error) {
		s, err = server4.NewServer("far", nil, func(c net.PacketConn, peer net.Addr, m *dhcpv4.DHCPv4) {
			kind := dhcpv4.MessageTypeOffer
			if m.MessageType() == dhcpv4.MessageTypeRequest {
				kind = dhcpv4.MessageTypeAck
			}
			give := net.IPv4(192, 0, 2, 50)
			if a := m.RequestedIPAddress(); a != nil {
				give = a
			}
			r, err := dhcpv4.NewReplyFromRequest(m, dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(give), dhcpv4.WithServerIP(net.IPv4(192, 0, 2, 1)), dhcpv4.WithLeaseTime(3600),
				dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithRouter(net.IPv4(192, 0, 2, 1)), dhcpv4.WithDNS(net.IPv4(192, 0, 2, 53)),
				dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(192, 0, 2, 1))), dhcpv4.WithOption(dhcpv4.OptNTPServers(net.IPv4(192, 0, 2, 123))))
			if err == nil {
				_, _ = c.WriteTo(r.ToBytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: 68})
				select {
				case ids <- string(m.Options.Get(dhcpv4.OptionClientIdentifier)):
				default:
				}
			}
		})
		return err
	})
	go func() { _ = s.Serve() }()
	t.Cleanup(func() { s.Close() })
	return ids
}

// host is a machine whose links of hardware are those called eth….
func host(t *testing.T) *Host {
	t.Helper()
	dir := t.TempDir()
	return &Host{Dir: dir, Resolv: filepath.Join(dir, "resolv.conf"), Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Hardware: func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") }}
}

// using uses a configuration until the returned function is called, and returns how things are then.
func using(t *testing.T, h *Host, c *capsulev1.NetworkConfig) (*capsulev1.NetworkState, func()) {
	t.Helper()
	if err := Validate(c); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan *capsulev1.NetworkState, 100), make(chan error, 1)
	go func() { ended <- h.Use(ctx, c, func(s *capsulev1.NetworkState) { told <- s }) }()
	select {
	case s := <-told:
		return s, func() {
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("it ended with %v", err)
			}
		}
	case err := <-ended:
		cancel()
		t.Fatalf("%v is not used: %v", c, err)
	case <-time.After(time.Minute):
		cancel()
		t.Fatalf("%v is not in use", c)
	}
	return nil, nil
}

// has lists what a link has: its IPv4 addresses and the IPv6 ones that are not of the link alone, and its gateways.
func has(t *testing.T, name string) string {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		return "no link"
	}
	var out []string
	all, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if p, ok := prefix(a.IPNet); ok && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p.String())
		}
	}
	rs, err := netlink.RouteList(l, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		if gw, ok := netip.AddrFromSlice(r.Gw); ok {
			out = append(out, "via "+gw.Unmap().String())
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func wants(t *testing.T, what, link, want string) {
	t.Helper()
	if got := has(t, link); got != want {
		t.Errorf("%s: %s has %q, want %q", what, link, got, want)
	}
}

func pings(t *testing.T, address string) bool {
	t.Helper()
	c, err := net.DialTimeout("tcp", net.JoinHostPort(address, "9"), time.Minute) //nolint:noctx // a minute
	if err == nil {
		c.Close()
	}
	return err == nil || errors.Is(err, unix.ECONNREFUSED) // somebody is there
}

// A machine changes from DHCP to a static address and back. Nothing of the one stays with the other, and the address of DHCP is the same.
func TestAddresses(t *testing.T) {
	ns := cable(t, "eth0")
	ids := serveDHCP(t, ns)
	h := host(t)
	s, off := using(t, h, &capsulev1.NetworkConfig{Ipv6: &capsulev1.NetworkIPv6{Method: capsulev1.IPv6Method_IPV6_METHOD_OFF}})
	wants(t, "DHCP", "eth0", "192.0.2.50/24 via 192.0.2.1")
	if s.GetLink() != "eth0" || !slices.Equal(s.GetDns(), []string{"192.0.2.53"}) || !slices.Equal(s.GetNtp(), []string{"192.0.2.123"}) || !pings(t, "192.0.2.1") {
		t.Errorf("DHCP: %v", s)
	}
	if text, _ := os.ReadFile(h.Resolv); string(text) != "nameserver 192.0.2.53\n" {
		t.Errorf("resolv.conf %q", text)
	}
	off()

	// A static address in the same subnet, so that the kernel would take it away with the old one.
	c := fixedAt("192.0.2.7/24", "192.0.2.254")
	c.Dns, c.Mtu = []string{"192.0.2.2"}, 1400
	c.Ipv6 = &capsulev1.NetworkIPv6{Method: capsulev1.IPv6Method_IPV6_METHOD_STATIC, Address: "2001:db8::7/64", Gateway: "2001:db8::1"}
	s, off = using(t, h, c)
	wants(t, "static", "eth0", "192.0.2.7/24 2001:db8::7/64 via 192.0.2.254 via 2001:db8::1")
	if l, err := netlink.LinkByName("eth0"); err != nil || l.Attrs().MTU != 1400 || !slices.Equal(s.GetAddresses(), []string{"192.0.2.7/24", "2001:db8::7/64"}) {
		t.Errorf("static: %v, %v", s, err)
	}
	if !pings(t, "192.0.2.1") {
		t.Error("the static address does not work")
	}
	if text, _ := os.ReadFile(h.Resolv); string(text) != "nameserver 192.0.2.2\n" {
		t.Errorf("resolv.conf %q", text)
	}
	off()

	_, off = using(t, h, &capsulev1.NetworkConfig{Link: "eth0", Ipv6: &capsulev1.NetworkIPv6{Method: capsulev1.IPv6Method_IPV6_METHOD_OFF}})
	wants(t, "DHCP again", "eth0", "192.0.2.50/24 via 192.0.2.1")
	if l, err := netlink.LinkByName("eth0"); err != nil || l.Attrs().MTU != 1500 {
		t.Errorf("the MTU is not what it was: %v, %v", l.Attrs().MTU, err)
	}
	off()
	first := <-ids
	for len(ids) > 0 {
		if id := <-ids; id != first || len(id) != 19 {
			t.Errorf("another client id: %x and %x", id, first)
		}
	}
}

// A machine changes to another link, which is found by its hardware address. The old one has nothing any more.
func TestOtherLink(t *testing.T) {
	cable(t, "eth0")
	b := cable(t, "eth1")
	far(t, b, "far", "198.51.100.1/24")
	h := host(t)
	_, off := using(t, h, fixedAt("192.0.2.7/24", "192.0.2.1"))
	off()
	eth1, err := netlink.LinkByName("eth1")
	if err != nil {
		t.Fatal(err)
	}
	c := fixedAt("198.51.100.7/24", "198.51.100.1")
	c.Link = eth1.Attrs().HardwareAddr.String()
	_, off = using(t, h, c)
	defer off()
	wants(t, "the new link", "eth1", "198.51.100.7/24 via 198.51.100.1")
	wants(t, "the old link", "eth0", "")
	if l, err := netlink.LinkByName("eth0"); err != nil || l.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("the old link is up: %v", err)
	}
	if !pings(t, "198.51.100.1") {
		t.Error("the new link does not work")
	}
	if _, err := (&links{hardware: h.Hardware, mtu: map[string]int{}, used: map[string]bool{}}).pick("eth7"); err == nil {
		t.Error("a link that is not there is found")
	}
}

// tries reports whether the kernel can make links of a kind.
func tries(t *testing.T, l netlink.Link) {
	t.Helper()
	if err := netlink.LinkAdd(l); errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("this kernel makes no links of the kind " + l.Type()) // nothing that could be installed
	} else if err == nil {
		_ = netlink.LinkDel(l)
	}
}

// A VLAN on a bond of two links: it goes on with one of them, and is gone afterwards.
func TestBondAndVLAN(t *testing.T) {
	netns.Require(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe"
	tries(t, netlink.NewLinkBond(attrs))
	a := cable(t, "eth0")
	b := cable(t, "eth1")
	// The switch: both cables end on it.
	for _, ns := range []string{a, b} {
		netns.Do(t, ns, func() error {
			l, err := netlink.LinkByName("far")
			if err != nil {
				return err
			}
			v := netlink.NewLinkAttrs()
			v.Name, v.ParentIndex = "tagged", l.Attrs().Index
			tagged := &netlink.Vlan{LinkAttrs: v, VlanId: 7}
			if err := netlink.LinkAdd(tagged); err != nil {
				return err
			}
			return netlink.LinkSetUp(tagged)
		})
		far(t, ns, "tagged", "192.0.2.1/24")
	}
	h := host(t)
	c := fixedAt("192.0.2.7/24", "192.0.2.1")
	c.Link, c.Vlan, c.Bond = "", 7, &capsulev1.NetworkBond{Links: []string{"eth0", "eth1"}}
	_, off := using(t, h, c)
	wants(t, "the tag", "uplink.7", "192.0.2.7/24 via 192.0.2.1")
	wants(t, "the bond", "uplink", "")
	if !pings(t, "192.0.2.1") {
		t.Error("the tag does not work")
	}
	off()
	_, off = using(t, h, fixedAt("198.51.100.7/24", ""))
	defer off()
	for _, name := range []string{"uplink", "uplink.7"} {
		wants(t, "afterwards", name, "no link")
	}
	wants(t, "afterwards", "eth0", "198.51.100.7/24")
	if l, err := netlink.LinkByName("eth1"); err != nil || l.Attrs().MasterIndex != 0 || l.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("the other link is still in use: %v", err)
	}
}

// A VLAN without a bond, and another tag after it.
func TestVLAN(t *testing.T) {
	cable(t, "eth0")
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = "probe", l.Attrs().Index
	tries(t, &netlink.Vlan{LinkAttrs: attrs, VlanId: 9})
	h := host(t)
	for _, id := range []uint32{7, 8} {
		c := fixedAt("192.0.2.7/24", "")
		c.Vlan = id
		_, off := using(t, h, c)
		off()
	}
	wants(t, "the new tag", "uplink.8", "192.0.2.7/24")
	wants(t, "the old tag", "uplink.7", "no link")
	wants(t, "the link", "eth0", "")
}

// advertise sends one advertisement of a router with a prefix that is valid for ever.
func advertise(t *testing.T, ns string) {
	t.Helper()
	netns.Do(t, ns, func() error {
		l, err := net.InterfaceByName("far")
		if err != nil {
			return err
		}
		m := []byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 64, 0xc0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0x20, 1, 0x0d, 0xb8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255); err != nil {
			return err
		}
		err = unix.Sendto(fd, m, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16(), ZoneId: uint32(l.Index)})
		if errors.Is(err, unix.EADDRNOTAVAIL) { // the router's own address is not usable yet; the next one is sent
			return nil
		}
		return err
	})
}

// What routers advertise stays as long as the method is SLAAC, beside a static IPv4 address, and goes with it.
func TestSLAAC(t *testing.T) {
	ns := cable(t, "eth0")
	h := host(t)
	c := fixedAt("192.0.2.7/24", "192.0.2.1")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	told := make(chan *capsulev1.NetworkState, 100)
	go func() { ended <- h.Use(ctx, c, func(s *capsulev1.NetworkState) { told <- s }) }()
	limit := time.After(time.Minute)
	for found := false; !found; {
		select {
		case s := <-told:
			found = slices.ContainsFunc(s.GetAddresses(), func(a string) bool { return strings.HasPrefix(a, "2001:db8:7:") })
		case <-time.After(300 * time.Millisecond):
			advertise(t, ns)
		case <-limit:
			t.Fatalf("the machine makes no address of what a router advertises: %s", has(t, "eth0"))
		}
	}
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := assign(l, fixed(c), c.GetIpv6().GetMethod()); err != nil { // as it does every few seconds
		t.Fatal(err)
	}
	if got := has(t, "eth0"); !strings.Contains(got, "2001:db8:7:") || !strings.Contains(got, "192.0.2.7/24") {
		t.Errorf("it has %q", got)
	}
	cancel()
	<-ended //nolint:errcheck // the context has ended it
	c.Ipv6 = &capsulev1.NetworkIPv6{Method: capsulev1.IPv6Method_IPV6_METHOD_STATIC, Address: "2001:db8::7/64"}
	_, off := using(t, h, c)
	defer off()
	wants(t, "without SLAAC", "eth0", "192.0.2.7/24 2001:db8::7/64 via 192.0.2.1")
}
