package bridge

import (
	"encoding/binary"
	"hash/crc32"
	"net"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// sctpInit is an SCTP packet that opens an association. No kernel module is needed to send it.
func sctpInit(port uint16) []byte {
	p := make([]byte, 32) // a header without verification tag, then the chunk INIT
	binary.BigEndian.PutUint16(p[0:], 40000)
	binary.BigEndian.PutUint16(p[2:], port)
	p[12] = 1
	binary.BigEndian.PutUint16(p[14:], 20)
	binary.BigEndian.PutUint32(p[16:], 7)       // its own tag
	binary.BigEndian.PutUint32(p[20:], 1<<16)   // window
	binary.BigEndian.PutUint32(p[24:], 1<<16|1) // streams
	binary.BigEndian.PutUint32(p[28:], 7)       // first sequence number
	binary.LittleEndian.PutUint32(p[8:], crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)))
	return p
}

// datagramReaches reports whether a packet for a port reaches another guest. The packet is repeated until it does.
func (g guest) datagramReaches(to guest, protocol network.Protocol, port uint16, within time.Duration) (ok bool) {
	g.t.Helper()
	kind, at, packet := "udp4", net.JoinHostPort(to.nic.IP, strconv.Itoa(int(port))), []byte("hello")
	if protocol == network.SCTP {
		kind, at, packet = "ip4:132", to.nic.IP, sctpInit(port)
	}
	var in net.PacketConn
	to.do(func() (err error) {
		in, err = (&net.ListenConfig{}).ListenPacket(g.t.Context(), kind, at)
		return err
	})
	defer in.Close()
	var out net.Conn
	g.do(func() (err error) {
		out, err = (&net.Dialer{}).DialContext(g.t.Context(), kind, at)
		return err
	})
	defer out.Close()
	buf := make([]byte, 1500)
	for deadline := time.Now().Add(within); time.Now().Before(deadline); {
		_, _ = out.Write(packet) // an answer that nobody listens fails the next one
		_ = in.SetReadDeadline(time.Now().Add(impatience / 4))
		if n, from, err := in.ReadFrom(buf); err == nil && n > 0 && addrOf(from) == g.nic.IP {
			return true
		}
	}
	return false
}

func addrOf(a net.Addr) string {
	if at, err := netip.ParseAddrPort(a.String()); err == nil {
		return at.Addr().String()
	}
	return a.String()
}

// TestPoliciesOfDatagrams: rules for ports of UDP and SCTP let those packets through, and no others.
func TestPoliciesOfDatagrams(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	t.Run("routed", datagrams)
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		datagrams(t)
	})
}

func datagrams(t *testing.T) {
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b, other := policed(t, n, "a"), policed(t, n, "b"), policed(t, n, "other")
	const port = 5000
	all := []network.Protocol{network.UDP, network.SCTP}
	want := func(what string, from guest, p network.Protocol, port uint16, ok bool) {
		t.Helper()
		within := impatience
		if ok {
			within = patience
		}
		if got := from.datagramReaches(b, p, port, within); got != ok {
			t.Errorf("%s: protocol %v to port %d: %v", what, p, port, got)
		}
	}
	set := func(rules ...network.Rule) {
		t.Helper()
		police(t, n, network.Policies{
			Guests:  []network.Guest{{ID: a.id}, {ID: b.id, Ingress: []int{0}}, {ID: other.id}},
			Ingress: []network.Policy{{Name: "some", Rules: rules}},
		})
	}
	for _, p := range all {
		want("closed", a, p, port, false)
	}
	police(t, n, network.Policies{Guests: []network.Guest{{ID: a.id}, {ID: b.id}, {ID: other.id}}})
	for _, p := range all {
		want("open", a, p, port, true)
	}
	for i, p := range all {
		another := all[1-i]
		set(network.Rule{Peers: only(a.nic.IP), Ports: []network.Port{{Protocol: p, First: port, Last: port}}})
		want("the port", a, p, port, true)
		want("another port", a, p, port+1, false)
		want("another peer", other, p, port, false)
		want("another protocol", a, another, port, false)
		set(network.Rule{Anyone: true, Ports: []network.Port{{Protocol: p, First: port, Last: port + 9}, {Protocol: network.TCP, First: 0, Last: 65535}}})
		want("a range of ports", other, p, port+9, true)
		want("beyond it", other, p, port+10, false)
		set(network.Rule{Peers: only(a.nic.IP), Named: []network.Endpoint{{Addr: netip.MustParseAddr(b.nic.IP), Protocol: p, Port: port}}})
		want("a named port", a, p, port, true)
		want("another port than the named one", a, p, port+1, false)
	}
	set(network.Rule{Peers: only(a.nic.IP), AllPorts: true})
	for _, p := range all {
		want("all ports", a, p, port, true)
		want("all ports of another peer", other, p, port, false)
	}
}
