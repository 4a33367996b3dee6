package radv

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/ndp"
)

func TestAddressIsModifiedEUI64(t *testing.T) {
	for mac, want := range map[string]string{
		"34:56:78:9a:bc:de": "fd00:1::3656:78ff:fe9a:bcde", // RFC 4291, appendix A
		"52:54:00:00:00:01": "fd00:1::5054:ff:fe00:1",
		"02:00:00:00:00:00": "fd00:1::ff:fe00:0",
	} {
		m, err := net.ParseMAC(mac)
		if err != nil {
			t.Fatal(err)
		}
		if got := Address(netip.MustParsePrefix("fd00:1::9/64"), m); got != netip.MustParseAddr(want) {
			t.Errorf("%s has %s, want %s", mac, got, want)
		}
	}
	for _, mac := range []string{"34:56:78:9a:bc:de", "02:00:00:00:00:00"} {
		m, err := net.ParseMAC(mac)
		if err != nil {
			t.Fatal(err)
		}
		if back, ok := MAC(Address(LinkLocal, m)); !ok || back.String() != mac {
			t.Errorf("%s came back as %s (%v)", mac, back, ok)
		}
	}
	for _, other := range []string{"fe80::1", "fd00:1::3656:78ff:fe9a:bcde", "fe80:0:0:1:3656:78ff:fe9a:bcde", "10.0.0.1"} {
		if m, ok := MAC(netip.MustParseAddr(other)); ok {
			t.Errorf("%s is said to be made of %s", other, m)
		}
	}
	if !LinkLocal.Addr().IsLinkLocalUnicast() {
		t.Errorf("%s is not link-local", LinkLocal)
	}
}

func TestMessage(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	c := Config{
		Router: netip.MustParseAddr("fe80::1"), Prefix: netip.MustParsePrefix("fd00:1::/64"), MTU: 1400, Search: []string{"pods.example"},
		DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("fd00:1::1")},
	}
	raw, err := ndp.MarshalMessage(c.message(mac))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := ndp.ParseMessage(raw)
	if err != nil {
		t.Fatal(err)
	}
	m, ok := parsed.(*ndp.RouterAdvertisement)
	if !ok || m.RouterLifetime != lifetime || m.ManagedConfiguration || m.OtherConfiguration {
		t.Fatalf("%+v", parsed)
	}
	c.Managed = true
	managed := c.message(mac)
	for _, o := range managed.Options {
		if p, ok := o.(*ndp.PrefixInformation); ok && (p.AutonomousAddressConfiguration || !p.OnLink) || !managed.ManagedConfiguration || !managed.OtherConfiguration {
			t.Errorf("managed guests are told %+v", managed)
		}
	}
	seen := map[string]bool{}
	for _, o := range m.Options {
		switch o := o.(type) {
		case *ndp.PrefixInformation:
			seen["prefix"] = o.Prefix == c.Prefix.Addr() && o.PrefixLength == 64 && o.OnLink && o.AutonomousAddressConfiguration && o.ValidLifetime == ndp.Infinity
		case *ndp.MTU:
			seen["mtu"] = o.MTU == 1400
		case *ndp.LinkLayerAddress:
			seen["mac"] = o.Addr.String() == mac.String()
		case *ndp.RecursiveDNSServer:
			seen["dns"] = len(o.Servers) == 1 && o.Servers[0] == c.DNS[1]
		case *ndp.DNSSearchList:
			seen["search"] = len(o.DomainNames) == 1 && o.DomainNames[0] == "pods.example"
		}
	}
	for _, what := range []string{"prefix", "mtu", "mac", "dns", "search"} {
		if !seen[what] {
			t.Errorf("the option %s is missing or wrong in %+v", what, m.Options)
		}
	}
}

func TestApart(t *testing.T) {
	one, two := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	a, b, other, none := Address(LinkLocal, one), Address(LinkLocal, two), netip.MustParseAddr("fe80::9"), netip.IPv6Unspecified()
	c := Config{Prefix: netip.MustParsePrefix("fd00:1::/64"), Apart: func() []net.HardwareAddr { return []net.HardwareAddr{one, two} }}
	m := c.apart(one)
	if p, ok := m.Options[2].(*ndp.PrefixInformation); !m.ManagedConfiguration || !ok || p.AutonomousAddressConfiguration {
		t.Errorf("a guest apart is told %+v", m)
	}
	for _, x := range []struct {
		from  []netip.Addr // nil: nobody has asked
		all   bool
		apart []netip.Addr
	}{
		{nil, true, []netip.Addr{a, b}},
		{[]netip.Addr{none}, true, []netip.Addr{a, b}},
		{[]netip.Addr{a}, false, []netip.Addr{a}},
		{[]netip.Addr{other}, true, nil},
		{[]netip.Addr{b, other}, true, []netip.Addr{b}},
	} {
		var from map[netip.Addr]bool
		for _, addr := range x.from {
			if from == nil {
				from = map[netip.Addr]bool{}
			}
			from[addr] = true
		}
		if all, apart := c.receivers(from); all != x.all || !slices.Equal(apart, x.apart) {
			t.Errorf("asked from %v: %v and %v", x.from, all, apart)
		}
	}
}
