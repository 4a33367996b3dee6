package bridge

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/radv"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// datagram is a UDP message in a frame that a guest's own kernel may never send.
type datagram struct {
	name     string // also its content
	to       net.HardwareAddr
	tag      []byte // of a virtual LAN, between the hardware addresses and the protocol
	src, dst netip.Addr
}

// sum is the internet checksum.
func sum(parts ...[]byte) uint16 {
	var s uint32
	for _, b := range parts {
		for ; len(b) > 1; b = b[2:] {
			s += uint32(binary.BigEndian.Uint16(b))
		}
		if len(b) == 1 {
			s += uint32(b[0]) << 8
		}
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

func (d datagram) frame(from net.HardwareAddr, port uint16) []byte {
	be := binary.BigEndian
	udp := be.AppendUint16(nil, 4000)
	udp = be.AppendUint16(udp, port)
	udp = be.AppendUint16(udp, uint16(8+len(d.name)))
	udp = append(append(udp, 0, 0), d.name...)
	check := sum(d.src.AsSlice(), d.dst.AsSlice(), []byte{0, unix.IPPROTO_UDP}, udp[4:6], udp)
	be.PutUint16(udp[6:], check)
	out := append(slices.Concat(d.to, from), d.tag...)
	if d.src.Is4() {
		ip := []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
		ip = append(append(ip, d.src.AsSlice()...), d.dst.AsSlice()...)
		be.PutUint16(ip[10:], sum(ip))
		return slices.Concat(out, []byte{0x08, 0x00}, ip, udp)
	}
	ip := []byte{0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64}
	return slices.Concat(out, []byte{0x86, 0xdd}, ip, d.src.AsSlice(), d.dst.AsSlice(), udp)
}

// emits sends frames as they are.
func (g guest) emits(frames ...[]byte) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for _, f := range frames {
			if err := unix.Sendto(fd, f, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Attrs().Index}); err != nil {
				return err
			}
		}
		return nil
	})
}

// hears opens a UDP port of a guest, for udp4 or udp6.
func (g guest) hears(kind string, port uint16) (c *net.UDPConn) {
	g.t.Helper()
	g.do(func() (err error) {
		c, err = net.ListenUDP(kind, &net.UDPAddr{Port: int(port)})
		return err
	})
	g.t.Cleanup(func() { c.Close() })
	return c
}

const lastWord = "end"

// until returns what arrives at c before the last word, which send sends until it has arrived.
func until(t *testing.T, c *net.UDPConn, send func()) (before []string) {
	t.Helper()
	buf := make([]byte, 1500)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		send()
		_ = c.SetReadDeadline(time.Now().Add(impatience))
		for {
			n, err := c.Read(buf)
			if err != nil {
				break
			}
			if string(buf[:n]) == lastWord {
				return before
			}
			before = append(before, string(buf[:n]))
		}
	}
	t.Fatal("the last word never arrived")
	return nil
}

// tells sends the last word to a UDP port with the guest's own means.
func (g guest) tells(to netip.AddrPort) {
	g.t.Helper()
	g.do(func() error {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(lastWord))
		return err
	})
}

// oddly are messages from a guest to another one that do not look like those between their own addresses.
func oddly(t *testing.T, from, to guest) []datagram {
	t.Helper()
	mac := macOf(t, to.nic)
	all, mapped := net.HardwareAddr{255, 255, 255, 255, 255, 255}, net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}
	all6 := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
	own, its := netip.MustParseAddr(from.nic.IP), netip.MustParseAddr(to.nic.IP)
	own6, its6 := netip.MustParseAddr(from.nic.IPv6), netip.MustParseAddr(to.nic.IPv6)
	local, itsLocal := radv.Address(radv.LinkLocal, macOf(t, from.nic)), radv.Address(radv.LinkLocal, mac)
	parse := netip.MustParseAddr
	return []datagram{
		{"tag 0", mac, []byte{0x81, 0, 0, 0}, own, its},
		{"tag 0 of a provider", mac, []byte{0x88, 0xa8, 0, 0}, own, its},
		{"tag 0 with IPv6", mac, []byte{0x81, 0, 0, 0}, own6, its6},
		{"broadcast", all, nil, own, parse("255.255.255.255")},
		{"broadcast to one", mac, nil, own, parse("255.255.255.255")},
		{"broadcast of the subnet", all, nil, own, parse("10.88.7.255")},
		{"broadcast of the subnet to one", mac, nil, own, parse("10.88.7.255")},
		{"multicast", mapped, nil, own, parse("224.0.0.1")},
		{"multicast to one", mac, nil, own, parse("224.0.0.1")},
		{"its address to all", all, nil, own, its},
		{"another address that it has", mac, nil, own, parse(secondAddr)},
		{"link-local", mac, nil, local, itsLocal},
		{"from a link-local address", mac, nil, local, its6},
		{"to a link-local address", mac, nil, own6, itsLocal},
		{"multicast of IPv6", all6, nil, own6, parse("ff02::1")},
		{"link-local multicast", all6, nil, local, parse("ff02::1")},
		{"multicast of IPv6 to one", mac, nil, local, parse("ff02::1")},
	}
}

const secondAddr = "172.31.9.9" // of each guest in this file, as of a guest that runs containers

// arrived returns which of the odd messages from one guest arrive at another one. Messages to the port marked are allowed.
func arrived(t *testing.T, from, to guest, odd []datagram) []string {
	t.Helper()
	const marked, port = 5000, 6000
	end := to.hears("udp4", marked)
	heard, heard6 := to.hears("udp4", port), to.hears("udp6", port)
	for _, d := range odd {
		from.emits(d.frame(macOf(t, from.nic), port))
	}
	until(t, end, func() { from.tells(netip.AddrPortFrom(netip.MustParseAddr(to.nic.IP), marked)) })
	return append(
		until(t, heard, func() { to.tells(netip.MustParseAddrPort("127.0.0.1:6000")) }),
		until(t, heard6, func() { to.tells(netip.MustParseAddrPort("[::1]:6000")) })...)
}

// What passes between guests passes the policies, whatever it looks like.
func TestPoliciesSeeAll(t *testing.T) {
	guests := func(t *testing.T, cfg Config) (n *Network, a, b, other guest) {
		n = start6(t, cfg)
		all := []guest{newGuestOf(t, n, "a", "a", policedSpec), newGuestOf(t, n, "b", "b", policedSpec), newGuest(t, n, "other")}
		for _, g := range all {
			g.joined().settled().configure(g.nic.IP)
			g.do(func() error {
				lo, err := netlink.LinkByName("lo")
				if err != nil {
					return err
				}
				return netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(secondAddr), Mask: net.CIDRMask(32, 32)}})
			})
		}
		return n, all[0], all[1], all[2]
	}
	netns.Require(t)
	need.Tun(t)
	// Without policies all of them arrive, otherwise the test proves nothing, except that no guest belongs to a virtual LAN.
	open := func(cfg Config) func(t *testing.T) {
		return func(t *testing.T) {
			_, a, b, _ := guests(t, cfg)
			odd := oddly(t, a, b)
			got := arrived(t, a, b, odd)
			for _, d := range odd {
				if want := d.tag == nil || cfg.Unguarded; slices.Contains(got, d.name) != want {
					t.Errorf("%s arrives: %v", d.name, !want)
				}
			}
		}
	}
	t.Run("unguarded", open(Config{Unguarded: true}))
	t.Run("switched", open(Config{NAT: true, Switched: true}))
	t.Run("filtered without policies", func(t *testing.T) {
		showBridged(t)
		if err := host.SetSysctl(filtered6Key, "0"); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = host.SetSysctl(filtered6Key, "1") }()
		open(Config{NAT: true})(t)
	})
	policed := func(t *testing.T) {
		n, a, b, other := guests(t, Config{NAT: true})
		some := []network.Policy{{Name: "some", Rules: []network.Rule{{Anyone: true, Ports: []network.Port{{Protocol: network.UDP, First: 5000, Last: 5000}}}}}}
		police(t, n, network.Policies{
			Guests: []network.Guest{{ID: a.id, Egress: []int{0}}, {ID: b.id, Ingress: []int{0}}}, Ingress: some, Egress: some,
		})
		for _, got := range arrived(t, other, b, oddly(t, other, b)) {
			t.Errorf("past a policy for ingress: %s", got)
		}
		for _, got := range arrived(t, a, other, oddly(t, a, other)) {
			t.Errorf("past a policy for egress: %s", got)
		}
	}
	t.Run("routed", policed)
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		policed(t)
	})
}
