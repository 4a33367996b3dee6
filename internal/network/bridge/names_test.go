package bridge

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// named are guests by their names.
type named map[string]string

func (n named) Addresses(label string) ([]netip.Addr, bool) {
	ip, ok := n[label]
	if !ok {
		return nil, false
	}
	return []netip.Addr{netip.MustParseAddr(ip)}, true
}

func (n named) Name(a netip.Addr) string {
	for name, ip := range n {
		if ip == a.String() {
			return name
		}
	}
	return ""
}

// ask asks a resolver from a namespace, and returns the code of its answer; -1 without one.
func ask(t *testing.T, ns, network, server, name string, within time.Duration) (rcode int, answer string) {
	t.Helper()
	rcode = -1
	netns.Do(t, ns, func() error {
		c := dns.Client{Net: network, Timeout: within}
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), server)
		if err != nil {
			return nil //nolint:nilerr // no answer is what the caller may want
		}
		if rcode = m.Rcode; len(m.Answer) > 0 {
			answer = m.Answer[0].(*dns.A).A.String()
		}
		return nil
	})
	return rcode, answer
}

// Guests resolve each other's names, and the world's, by the host. From beyond the uplink nobody is answered, at whatever address.
func TestNames(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true, Domain: "capsule.internal", Search: []string{"example.com"}, DNS: []string{"198.51.100.2"}})
	far := outside(t)
	a, b := contained(t, n, vm.NewID(), "a", vm.NICSpec{}), contained(t, n, vm.NewID(), "b", vm.NICSpec{})
	gateway := "10.88.7.1"
	if !slices.Equal(a.nic.DNS, []string{gateway}) {
		t.Errorf("guests are told to ask %v", a.nic.DNS)
	}
	waitFor(t, "the host answers", func() bool { // the zone is not known yet
		rcode, _ := ask(t, a.ns, "udp", gateway+":53", "b.capsule.internal.", patience)
		return rcode == dns.RcodeServerFailure
	})
	n.SetZone(named{"b": b.nic.IP})
	netns.Do(t, far, func() error { // a stranger who knows where the bridge is
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 88, 7, 0), Mask: net.CIDRMask(24, 32)}, Gw: net.IPv4(198, 51, 100, 1)})
	})
	for _, network := range []string{"udp", "tcp"} {
		if rcode, got := ask(t, a.ns, network, gateway+":53", "b.capsule.internal.", patience); rcode != dns.RcodeSuccess || got != b.nic.IP {
			t.Errorf("%s: b is %q (%d), want %s", network, got, rcode, b.nic.IP)
		}
		if rcode, _ := ask(t, a.ns, network, gateway+":53", "a.capsule.internal.", patience); rcode != dns.RcodeNameError {
			t.Errorf("%s: a name that nobody has: %d", network, rcode)
		}
		for _, at := range []string{gateway + ":53", "198.51.100.1:53"} {
			if rcode, got := ask(t, far, network, at, "b.capsule.internal.", impatience); rcode != -1 {
				t.Errorf("%s: from beyond the uplink %s answers %d %q", network, at, rcode, got)
			}
		}
	}

	// The world's names are those of its resolver.
	var c net.PacketConn
	netns.Do(t, far, func() (err error) {
		c, err = net.ListenPacket("udp", "198.51.100.2:53")
		return err
	})
	defer c.Close()
	server := &dns.Server{PacketConn: c, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: []byte{192, 0, 2, 1}}}
		_ = w.WriteMsg(m)
	})}
	go func() { _ = server.ActivateAndServe() }()
	if rcode, got := ask(t, a.ns, "udp", gateway+":53", "www.example.com.", patience); rcode != dns.RcodeSuccess || got != "192.0.2.1" {
		t.Errorf("a name of the world is %q (%d)", got, rcode)
	}
	if q := n.Questions(); q["own"] == 0 || q["forwarded"] != 1 {
		t.Errorf("questions %v", q)
	}
}

func TestServers(t *testing.T) {
	for what, tc := range map[string]struct {
		dns  []string
		want []netip.AddrPort
	}{
		"those that are set":    {[]string{"9.9.9.9", "10.88.7.1"}, []netip.AddrPort{netip.MustParseAddrPort("9.9.9.9:53")}},
		"none, as somebody set": {[]string{}, nil},
	} {
		n := build(t, Config{Subnet: testSubnet, Domain: "capsule.internal", DNS: tc.dns, StateDir: t.TempDir()})
		if got := n.servers(&live{gateway: netip.MustParseAddr("10.88.7.1")}); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", what, got, tc.want)
		}
	}
}
