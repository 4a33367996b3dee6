package dhcp

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"cocoonstack.io/cocoon/internal/errdefs"
)

var (
	known  = net.HardwareAddr{2, 0, 0, 0, 0, 7}
	ours   = netip.MustParseAddr("10.88.0.7")
	server = netip.MustParseAddr("10.88.0.1")
	config = Config{
		Server: server, Router: server, Prefix: netip.MustParsePrefix("10.88.0.0/24"),
		DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}, MTU: 1450, LeaseTime: time.Hour,
	}
)

func lookup(mac net.HardwareAddr) (Reservation, bool) {
	return Reservation{IP: ours, Hostname: "web"}, bytes.Equal(mac, known)
}

func packet(t testing.TB, kind dhcpv4.MessageType, change ...dhcpv4.Modifier) []byte {
	t.Helper()
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithHwAddr(known), dhcpv4.WithMessageType(kind)}, change...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m.ToBytes()
}

func asks(ip string) dhcpv4.Modifier {
	return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(ip)))
}

func chose(ip string) dhcpv4.Modifier {
	return dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(ip)))
}

func TestAnswer(t *testing.T) {
	const (
		discover = dhcpv4.MessageTypeDiscover
		request  = dhcpv4.MessageTypeRequest
		inform   = dhcpv4.MessageTypeInform
	)
	has := func(ip string) dhcpv4.Modifier { return dhcpv4.WithClientIP(net.ParseIP(ip)) }
	stranger := dhcpv4.WithHwAddr(net.HardwareAddr{2, 9, 9, 9, 9, 9})
	tests := map[string]struct {
		packet []byte
		kind   Kind
		to     netip.Addr
	}{
		"discover":                     {packet(t, discover), Offer, ours},
		"discover asking to broadcast": {packet(t, discover, dhcpv4.WithBroadcast(true)), Offer, broadcast},
		"discover of a stranger":       {packet(t, discover, stranger), Unknown, netip.Addr{}},
		"selecting":                    {packet(t, request, asks("10.88.0.7"), chose("10.88.0.1")), Ack, ours},
		"selecting another address":    {packet(t, request, asks("10.88.0.8"), chose("10.88.0.1")), Nak, broadcast},
		"selecting another server":     {packet(t, request, asks("10.88.0.7"), chose("10.88.0.9")), Ignored, netip.Addr{}},
		"init-reboot":                  {packet(t, request, asks("10.88.0.7")), Ack, ours},
		"init-reboot elsewhere":        {packet(t, request, asks("192.168.0.7")), Nak, broadcast},
		"renewing":                     {packet(t, request, has("10.88.0.7")), Ack, ours},
		"renewing with broadcast flag": {packet(t, request, has("10.88.0.7"), dhcpv4.WithBroadcast(true)), Ack, ours},
		"renewing another":             {packet(t, request, has("10.88.0.8")), Nak, broadcast},
		"request of nothing":           {packet(t, request), Nak, broadcast},
		"inform":                       {packet(t, inform, has("10.88.0.7")), Inform, ours},
		"inform for another":           {packet(t, inform, has("10.88.0.8")), Ignored, netip.Addr{}},
		"rebinding":                    {packet(t, request, has("10.88.0.7"), dhcpv4.WithBroadcast(true)), Ack, ours},
		"request of a stranger":        {packet(t, request, asks("10.88.0.7"), stranger), Unknown, netip.Addr{}},
		"release":                      {packet(t, dhcpv4.MessageTypeRelease, has("10.88.0.7"), chose("10.88.0.1")), Released, netip.Addr{}},
		"release of another":           {packet(t, dhcpv4.MessageTypeRelease, has("10.88.0.8"), chose("10.88.0.1")), Ignored, netip.Addr{}},
		"release to another server":    {packet(t, dhcpv4.MessageTypeRelease, has("10.88.0.7"), chose("10.88.0.9")), Ignored, netip.Addr{}},
		"decline":                      {packet(t, dhcpv4.MessageTypeDecline, asks("10.88.0.7"), chose("10.88.0.1")), Declined, netip.Addr{}},
		"decline of another":           {packet(t, dhcpv4.MessageTypeDecline, asks("10.88.0.8"), chose("10.88.0.1")), Ignored, netip.Addr{}},
		"decline to another server":    {packet(t, dhcpv4.MessageTypeDecline, asks("10.88.0.7"), chose("10.88.0.9")), Ignored, netip.Addr{}},
		"decline of a stranger":        {packet(t, dhcpv4.MessageTypeDecline, asks("10.88.0.7"), stranger), Unknown, netip.Addr{}},
		"a server's message":           {packet(t, dhcpv4.MessageTypeOffer), Ignored, netip.Addr{}},
		"relayed":                      {packet(t, discover, dhcpv4.WithRelay(net.IPv4(1, 2, 3, 4))), Ignored, netip.Addr{}},
		"nothing":                      {nil, Ignored, netip.Addr{}},
		"noise":                        {bytes.Repeat([]byte{0xff}, 400), Ignored, netip.Addr{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			a := config.Answer(tt.packet, lookup)
			if a.Kind != tt.kind || a.To != tt.to || (a.Packet != nil) != tt.to.IsValid() {
				t.Errorf("got %s to %s with %d bytes, want %s to %s", a.Kind, a.To, len(a.Packet), tt.kind, tt.to)
			}
		})
	}
}

func TestAckTellsTheNetwork(t *testing.T) {
	a := config.Answer(packet(t, dhcpv4.MessageTypeRequest, asks("10.88.0.7")), lookup)
	m, err := dhcpv4.FromBytes(a.Packet)
	if err != nil {
		t.Fatal(err)
	}
	ones, _ := m.SubnetMask().Size()
	mtu := m.Options.Get(dhcpv4.OptionInterfaceMTU)
	if addr(m.YourIPAddr) != ours || ones != 24 || addr(m.Router()[0]) != server || addr(m.DNS()[0]).String() != "9.9.9.9" ||
		m.HostName() != "web" || m.IPAddressLeaseTime(0) != time.Hour || addr(m.ServerIdentifier()) != server ||
		!bytes.Equal(mtu, []byte{5, 0xaa}) || addr(m.BroadcastAddress()).String() != "10.88.0.255" {
		t.Error(m.Summary())
	}
	if len(a.Packet) < 300 {
		t.Errorf("%d bytes are less than BOOTP clients accept", len(a.Packet))
	}
	a = config.Answer(packet(t, dhcpv4.MessageTypeInform, dhcpv4.WithClientIP(ours.AsSlice())), lookup)
	if m, err = dhcpv4.FromBytes(a.Packet); err != nil || !m.YourIPAddr.IsUnspecified() || m.IPAddressLeaseTime(0) != 0 {
		t.Errorf("inform: %v, %s", err, m.Summary())
	}
}

// An answer of each kind has the fields that table 3 of RFC 2131 requires, and no others.
func TestFields(t *testing.T) {
	c := config
	c.Search = []string{"pods.example", "example"}
	c.Routes = []Route{{To: netip.MustParsePrefix("192.168.0.0/16"), Via: netip.MustParseAddr("10.88.0.9")}, {To: netip.MustParsePrefix("10.99.0.0/20")}}
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
	id := dhcpv4.WithOption(dhcpv4.OptClientIdentifier([]byte{0xff, 1, 2, 3}))
	relay := dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRelayAgentInformation, []byte{1, 1, 9}))
	renewing := dhcpv4.WithClientIP(ours.AsSlice())
	tests := map[string]struct {
		packet     []byte
		ciaddr     bool
		addressed  bool // yiaddr and the three times
		configured bool // all settings of the network
	}{
		"offer":  {packet(t, dhcpv4.MessageTypeDiscover, renewing, id, relay), false, true, true},
		"ack":    {packet(t, dhcpv4.MessageTypeRequest, asks("10.88.0.7"), id, relay), false, true, true},
		"renew":  {packet(t, dhcpv4.MessageTypeRequest, renewing, id), true, true, true},
		"inform": {packet(t, dhcpv4.MessageTypeInform, renewing, id), true, false, true},
		"nak":    {packet(t, dhcpv4.MessageTypeRequest, asks("10.88.0.8"), id), false, false, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m, err := dhcpv4.FromBytes(c.Answer(tt.packet, lookup).Packet)
			if err != nil {
				t.Fatal(err)
			}
			times := m.IPAddressLeaseTime(0) == time.Hour && m.IPAddressRenewalTime(0) == time.Hour/2 && m.IPAddressRebindingTime(0) == time.Hour/8*7
			if got := !m.ClientIPAddr.IsUnspecified(); got != tt.ciaddr {
				t.Errorf("ciaddr %s", m.ClientIPAddr)
			}
			if got := addr(m.YourIPAddr) == ours; got != tt.addressed || times != tt.addressed {
				t.Errorf("yiaddr %s, times %v", m.YourIPAddr, times)
			}
			var routes []string
			for _, r := range m.ClasslessStaticRoute() {
				routes = append(routes, r.String())
			}
			want := "[route to 0.0.0.0/0 via 10.88.0.1 route to 192.168.0.0/16 via 10.88.0.9 route to 10.99.0.0/20 via 0.0.0.0]"
			told := fmt.Sprint(routes) == want && m.DomainName() == "pods.example" && m.DomainSearch() != nil && fmt.Sprint(m.DomainSearch().Labels) == "[pods.example example]"
			if told != tt.configured || (m.SubnetMask() != nil) != tt.configured {
				t.Errorf("the network is told: %v, routes %v, %s", told, routes, m.Summary())
			}
			if addr(m.ServerIdentifier()) != server || !bytes.Equal(m.Options.Get(dhcpv4.OptionClientIdentifier), []byte{0xff, 1, 2, 3}) || m.RelayAgentInfo() != nil {
				t.Error(m.Summary())
			}
		})
	}
}

func TestCheck(t *testing.T) {
	c := config
	for i := range 60 {
		c.Routes = append(c.Routes, Route{To: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24), Via: server})
	}
	if err := c.Check(); !errdefs.IsInvalid(err) {
		t.Errorf("more routes than a message holds: %v", err)
	}
}

func TestDatagramChecksums(t *testing.T) {
	b := datagram(server, ours, []byte("odd"))
	if checksum(b[:20]) != 0 {
		t.Error("IP header checksum")
	}
	pseudo := append(append(append([]byte{}, b[12:20]...), 0, 17), b[24:26]...)
	if checksum(append(pseudo, b[20:]...)) != 0 {
		t.Error("UDP checksum")
	}
}

func TestLimiter(t *testing.T) {
	l := limiter{every: time.Minute}
	at := time.Unix(1000, 0)
	if _, ok := l.allow(at); !ok {
		t.Error("the first is held back")
	}
	for range 5 {
		if _, ok := l.allow(at.Add(time.Second)); ok {
			t.Error("a second within the minute")
		}
	}
	if n, ok := l.allow(at.Add(time.Minute)); !ok || n != 5 {
		t.Errorf("after a minute: %d, %v", n, ok)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(packet(f, dhcpv4.MessageTypeDiscover))
	f.Add(packet(f, dhcpv4.MessageTypeRequest, asks("10.88.0.7"), chose("10.88.0.1")))
	f.Add(packet(f, dhcpv4.MessageTypeRequest, dhcpv4.WithClientIP(net.IPv4(10, 88, 0, 8))))
	f.Add(packet(f, dhcpv4.MessageTypeInform, dhcpv4.WithClientIP(net.IPv4(10, 88, 0, 7))))
	f.Add(packet(f, dhcpv4.MessageTypeDecline, dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionRelayAgentInformation, []byte{1, 9}))))
	f.Fuzz(func(t *testing.T, b []byte) {
		a := config.Answer(b, lookup)
		if a.Packet == nil {
			return
		}
		if a.To != broadcast && a.To != ours {
			t.Errorf("a guest made us send to %s", a.To)
		}
		m, err := dhcpv4.FromBytes(a.Packet)
		if err != nil {
			t.Fatalf("our own answer does not parse: %v", err)
		}
		if a.Kind != Nak && a.Kind != Inform && addr(m.YourIPAddr) != ours {
			t.Errorf("told %s", m.YourIPAddr)
		}
		if len(a.Packet) > 1400 {
			t.Errorf("an answer of %d bytes to %d", len(a.Packet), len(b))
		}
	})
}
