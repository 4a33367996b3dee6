package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestMasquerade(t *testing.T) {
	good := Masquerade{CIDR: MasqueradeCIDR, CIDR6: MasqueradeCIDR6, Ports: []PortRange{{TCP, 80, 80}, {UDP, 1, 65535}}}
	if err := (Spec{NICs: []NICSpec{{Masquerade: good}, {}}}).ValidateMasquerade(); err != nil {
		t.Error(err)
	}
	if err := (Spec{NICs: []NICSpec{{}, {Masquerade: good}}}).ValidateMasquerade(); !errdefs.Is(err, errdefs.InvalidArgument) {
		t.Errorf("a second interface: %v", err)
	}
	for name, change := range map[string]func(*Masquerade){
		"no IPv4":         func(m *Masquerade) { m.CIDR = "" },
		"no IPv6":         func(m *Masquerade) { m.CIDR6 = "" },
		"families":        func(m *Masquerade) { m.CIDR, m.CIDR6 = m.CIDR6, m.CIDR },
		"bits set":        func(m *Masquerade) { m.CIDR = "10.0.2.2/24" },
		"no room":         func(m *Masquerade) { m.CIDR = "10.0.2.0/31" },
		"loopback":        func(m *Masquerade) { m.CIDR = "127.0.0.0/24" },
		"multicast":       func(m *Masquerade) { m.CIDR = "224.0.0.0/24" },
		"everything":      func(m *Masquerade) { m.CIDR = "0.0.0.0/8" },
		"reserved":        func(m *Masquerade) { m.CIDR = "240.0.0.0/24" },
		"link-local":      func(m *Masquerade) { m.CIDR6 = "fe80::/64" },
		"protocol":        func(m *Masquerade) { m.Ports = []PortRange{{"icmp", 1, 1}} },
		"port 0":          func(m *Masquerade) { m.Ports = []PortRange{{TCP, 0, 1}} },
		"range backwards": func(m *Masquerade) { m.Ports = []PortRange{{TCP, 2, 1}} },
		"many ports":      func(m *Masquerade) { m.Ports = make([]PortRange, maxPorts+1) },
	} {
		m := good
		change(&m)
		if err := (Spec{NICs: []NICSpec{{Masquerade: m}}}).ValidateMasquerade(); !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGuestNIC(t *testing.T) {
	outer := NIC{Tap: "tap", MAC: "02:00:00:00:00:01", IP: "10.88.0.5", Prefix: 24, Gateway: "10.88.0.1", IPv6: "fd00::5", DNS: []string{"9.9.9.9"}, DHCP: true}
	if d := diff.Of(outer, outer.Guest()); d != "" {
		t.Error(d)
	}
	masked := outer
	masked.Inside = Masquerade{CIDR: MasqueradeCIDR, CIDR6: MasqueradeCIDR6}.Inside()
	want := outer
	want.IP, want.Gateway, want.IPv6, want.Addresses = "10.0.2.2", "10.0.2.1", "fd10:0:2::2", []string{"fd10:0:2::2/120"}
	if d := diff.Of([]NIC{want, outer}, GuestNICs([]NIC{masked, outer})); d != "" {
		t.Error(d)
	}
	masked.IPv6, want.IPv6, want.Addresses = "", "", nil
	if d := diff.Of(want, masked.Guest()); d != "" {
		t.Error(d)
	}
}
