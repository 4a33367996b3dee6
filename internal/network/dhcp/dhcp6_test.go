package dhcp

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/radv"
)

var (
	ours6   = netip.MustParseAddr("fd00:1::ff:fe00:7")
	link6   = radv.Address(radv.LinkLocal, known)
	config6 = Config6{
		Server: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Prefix: netip.MustParsePrefix("fd00:1::/64"), LeaseTime: time.Hour,
		DNS: []netip.Addr{netip.MustParseAddr("fd00:1::1")}, Search: []string{"pods.example", "example"},
	}
	client6 = dhcpv6.WithClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr{2, 7, 7, 7, 7, 7}}) // not the MAC
	server6 = dhcpv6.WithServerID(config6.duid())
	other6  = dhcpv6.WithServerID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: known})
	wants6  = dhcpv6.WithRequestedOptions(dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList)
)

func lookup6(mac net.HardwareAddr) (Reservation, bool) {
	return Reservation{IP: ours6}, bytes.Equal(mac, known)
}

func message6(kind dhcpv6.MessageType, change ...dhcpv6.Modifier) []byte {
	m := &dhcpv6.Message{MessageType: kind, TransactionID: dhcpv6.TransactionID{1, 2, 3}}
	for _, c := range change {
		c(m)
	}
	return m.ToBytes()
}

// association returns an IA_NA with that identifier and addresses.
func association(id byte, addrs ...string) dhcpv6.Modifier {
	ia := &dhcpv6.OptIANA{IaId: [4]byte{id}}
	for _, a := range addrs {
		ia.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: net.ParseIP(a), PreferredLifetime: time.Minute, ValidLifetime: time.Minute})
	}
	return func(m dhcpv6.DHCPv6) { m.AddOption(ia) }
}

// inWords returns the relevant parts of an answer as text, in the order of its options.
func inWords(t *testing.T, packet []byte) string {
	t.Helper()
	if packet == nil {
		return "silence"
	}
	m, err := dhcpv6.MessageFromBytes(packet)
	if err != nil {
		t.Fatal(err)
	}
	if m.TransactionID != (dhcpv6.TransactionID{1, 2, 3}) || !m.Options.ServerID().Equal(config6.duid()) {
		t.Errorf("the answer is not ours, or to another message: %s", m.Summary())
	}
	words := m.MessageType.String()
	if m.GetOneOption(dhcpv6.OptionRapidCommit) != nil {
		words += " rapid"
	}
	if s := m.Options.Status(); s != nil {
		words += " " + s.StatusCode.String()
	}
	identity := func(kind string, id [4]byte, o dhcpv6.Options) {
		words += fmt.Sprintf(" %s%d", kind, id[0])
		for _, a := range (dhcpv6.IdentityOptions{Options: o}).Addresses() {
			words += fmt.Sprintf(" %s %s/%s", a.IPv6Addr, a.PreferredLifetime, a.ValidLifetime)
		}
		if s, ok := o.GetOne(dhcpv6.OptionStatusCode).(*dhcpv6.OptStatusCode); ok {
			words += " " + s.StatusCode.String()
		}
	}
	for _, ia := range m.Options.IANA() {
		identity("na", ia.IaId, ia.Options.Options)
	}
	for _, ia := range m.Options.IATA() {
		identity("ta", ia.IaId, ia.Options.Options)
	}
	for _, ia := range m.Options.IAPD() {
		identity("pd", ia.IaId, ia.Options.Options)
	}
	return words
}

func TestAnswer6(t *testing.T) {
	const (
		solicit     = dhcpv6.MessageTypeSolicit
		request     = dhcpv6.MessageTypeRequest
		confirm     = dhcpv6.MessageTypeConfirm
		renew       = dhcpv6.MessageTypeRenew
		rebind      = dhcpv6.MessageTypeRebind
		release     = dhcpv6.MessageTypeRelease
		decline     = dhcpv6.MessageTypeDecline
		information = dhcpv6.MessageTypeInformationRequest

		mine   = "fd00:1::ff:fe00:7"
		near   = "fd00:1::8"
		far    = "fd00:2::7"
		leased = " na1 " + mine + " 1h0m0s/1h0m0s"
	)
	temporary := dhcpv6.WithIATA([4]byte{2})
	prefix := dhcpv6.WithIAPD([4]byte{3})
	tests := map[string]struct {
		packet []byte
		kind   Kind
		words  string
	}{
		"solicit":                    {message6(solicit, client6, association(1)), Offer, "ADVERTISE" + leased},
		"solicit with a wish":        {message6(solicit, client6, association(1, far)), Offer, "ADVERTISE" + leased},
		"solicit in a hurry":         {message6(solicit, client6, association(1), dhcpv6.WithRapidCommit), Ack, "REPLY rapid" + leased},
		"solicit of much":            {message6(solicit, client6, association(1), association(9), temporary, prefix), Offer, "ADVERTISE" + leased + " na9 NoAddrsAvail ta2 NoAddrsAvail pd3 NoPrefixAvail"},
		"solicit of a prefix":        {message6(solicit, client6, prefix), Offer, "ADVERTISE pd3 NoPrefixAvail"},
		"solicit without a name":     {message6(solicit, association(1)), Ignored, "silence"},
		"solicit of one server":      {message6(solicit, client6, server6, association(1)), Ignored, "silence"},
		"request":                    {message6(request, client6, server6, association(1, mine)), Ack, "REPLY" + leased},
		"request of another address": {message6(request, client6, server6, association(1, near)), Ack, "REPLY" + leased},
		"request from another link":  {message6(request, client6, server6, association(1, far)), Nak, "REPLY na1 NotOnLink"},
		"request of no address":      {message6(request, client6, server6, prefix), Inform, "REPLY pd3 NoPrefixAvail"},
		"request to another server":  {message6(request, client6, other6, association(1, mine)), Ignored, "silence"},
		"request to nobody":          {message6(request, client6, association(1, mine)), Ignored, "silence"},
		"renew":                      {message6(renew, client6, server6, association(1, mine)), Ack, "REPLY" + leased},
		"renew of more":              {message6(renew, client6, server6, association(1, near, mine, far), association(9, near), prefix), Ack, "REPLY" + leased + " " + near + " 0s/0s " + far + " 0s/0s na9 NoBinding pd3 NoBinding"},
		"renew with another server":  {message6(renew, client6, other6, association(1, mine)), Ignored, "silence"},
		"rebind":                     {message6(rebind, client6, association(1, mine)), Ack, "REPLY" + leased},
		"rebind elsewhere":           {message6(rebind, client6, association(1, far)), Ack, "REPLY" + leased + " " + far + " 0s/0s"},
		"rebind with a server":       {message6(rebind, client6, server6, association(1, mine)), Ignored, "silence"},
		"confirm":                    {message6(confirm, client6, association(1, mine)), Ack, "REPLY Success"},
		"confirm of another":         {message6(confirm, client6, association(1, near)), Nak, "REPLY NotOnLink"},
		"confirm of one too many":    {message6(confirm, client6, association(1, mine, far)), Nak, "REPLY NotOnLink"},
		"confirm of nothing":         {message6(confirm, client6, association(1)), Ignored, "silence"},
		"release":                    {message6(release, client6, server6, association(1, mine)), Released, "REPLY Success"},
		"release of another":         {message6(release, client6, server6, association(1, near)), Nak, "REPLY Success na1 NoBinding"},
		"release to another server":  {message6(release, client6, other6, association(1, mine)), Ignored, "silence"},
		"decline":                    {message6(decline, client6, server6, association(1, mine)), Declined, "REPLY Success"},
		"decline of another":         {message6(decline, client6, server6, association(1, near)), Nak, "REPLY Success na1 NoBinding"},
		"information":                {message6(information), Inform, "REPLY"},
		"information with an IA":     {message6(information, client6, association(1)), Ignored, "silence"},
		"information of another":     {message6(information, other6), Ignored, "silence"},
		"too much":                   {message6(solicit, append([]dhcpv6.Modifier{client6}, slices.Repeat([]dhcpv6.Modifier{association(1)}, 80)...)...), Ignored, "silence"},
		"a server's message":         {message6(dhcpv6.MessageTypeReply, client6, server6, association(1, mine)), Ignored, "silence"},
		"relayed":                    {append([]byte{byte(dhcpv6.MessageTypeRelayForward)}, make([]byte, 33)...), Ignored, "silence"},
		"a long name":                {message6(solicit, dhcpv6.WithClientID(&dhcpv6.DUIDOpaque{Type: 9, Data: make([]byte, 129)}), association(1)), Ignored, "silence"},
		"nothing":                    {nil, Ignored, "silence"},
		"noise":                      {bytes.Repeat([]byte{1}, 400), Ignored, "silence"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			a := config6.Answer(tt.packet, link6, lookup6)
			if got := inWords(t, a.Packet); a.Kind != tt.kind || got != tt.words {
				t.Errorf("got %s, %s\nwant %s, %s", a.Kind, got, tt.kind, tt.words)
			}
			if (a.Packet != nil) != a.To.IsValid() || a.Packet != nil && a.To != link6 {
				t.Errorf("%d bytes go to %s", len(a.Packet), a.To)
			}
		})
	}
}

func TestAnswer6KnowsGuestsByTheirLink(t *testing.T) {
	packet := message6(dhcpv6.MessageTypeSolicit, client6, association(1))
	for from, kind := range map[string]Kind{
		link6.String(): Offer, "fe80::9:9ff:fe09:909": Unknown, "fe80::1": Ignored, ours6.String(): Ignored, "::": Ignored,
	} {
		if a := config6.Answer(packet, netip.MustParseAddr(from), lookup6); a.Kind != kind || (a.Packet != nil) != (kind == Offer) {
			t.Errorf("%s is answered with %s", from, a.Kind)
		}
	}
}

func TestAnswer6TellsTheNetwork(t *testing.T) {
	for kind, change := range map[dhcpv6.MessageType][]dhcpv6.Modifier{
		dhcpv6.MessageTypeSolicit: {client6, association(1)}, dhcpv6.MessageTypeInformationRequest: {client6},
		dhcpv6.MessageTypeRenew: {client6, server6, association(1)},
	} {
		m, err := dhcpv6.MessageFromBytes(config6.Answer(message6(kind, append(change, wants6)...), link6, lookup6).Packet)
		if err != nil {
			t.Fatal(err)
		}
		if dns := m.Options.DNS(); len(dns) != 1 || dns[0].String() != "fd00:1::1" {
			t.Errorf("%s: DNS %v", kind, dns)
		}
		if search := m.Options.DomainSearchList(); search == nil || fmt.Sprint(search.Labels) != "[pods.example example]" {
			t.Errorf("%s: search %v", kind, search)
		}
		if id := m.Options.ClientID(); id == nil || id.DUIDType() != dhcpv6.DUID_LL {
			t.Errorf("%s: the client identifier that comes back is %v", kind, id)
		}
		if ia := m.Options.OneIANA(); ia != nil && (ia.T1 != time.Hour/2 || ia.T2 != 48*time.Minute) {
			t.Errorf("%s: T1 %s, T2 %s", kind, ia.T1, ia.T2)
		}
		if kind == dhcpv6.MessageTypeSolicit && m.Options.Preference() != 255 {
			t.Error("guests wait for a better offer")
		}
		m, err = dhcpv6.MessageFromBytes(config6.Answer(message6(kind, change...), link6, lookup6).Packet)
		if err != nil || m.Options.DNS() != nil || m.Options.DomainSearchList() != nil {
			t.Errorf("%s: told without being asked (%v)", kind, err)
		}
	}
}

func TestCheck6(t *testing.T) {
	if err := config6.Check(); err != nil {
		t.Error(err)
	}
	c := config6
	c.DNS = make([]netip.Addr, 80)
	for i := range c.DNS {
		c.DNS[i] = ours6
	}
	if err := c.Check(); !errdefs.IsInvalid(err) {
		t.Errorf("more name servers than a message holds: %v", err)
	}
}

func FuzzAnswer6(f *testing.F) {
	f.Add(message6(dhcpv6.MessageTypeSolicit, client6, wants6, association(1), dhcpv6.WithRapidCommit))
	f.Add(message6(dhcpv6.MessageTypeRequest, client6, server6, association(1, "fd00:1::ff:fe00:7")))
	f.Add(message6(dhcpv6.MessageTypeRenew, client6, server6, association(1, "fd00:1::8"), dhcpv6.WithIATA([4]byte{2}), dhcpv6.WithIAPD([4]byte{3})))
	f.Add(message6(dhcpv6.MessageTypeConfirm, client6, association(1, "fd00:2::8")))
	f.Add(message6(dhcpv6.MessageTypeDecline, client6, server6, association(1, "fd00:1::8")))
	f.Add(message6(dhcpv6.MessageTypeInformationRequest, wants6))
	f.Fuzz(func(t *testing.T, b []byte) {
		a := config6.Answer(b, link6, lookup6)
		if a.Packet == nil {
			return
		}
		if a.To != link6 {
			t.Errorf("a guest made us send to %s", a.To)
		}
		m, err := dhcpv6.MessageFromBytes(a.Packet)
		if err != nil {
			t.Fatalf("our own answer does not parse: %v", err)
		}
		for _, ia := range m.Options.IANA() {
			for _, got := range ia.Options.Addresses() {
				if got.ValidLifetime != 0 && got.IPv6Addr.String() != ours6.String() {
					t.Errorf("leased %s", got.IPv6Addr)
				}
			}
		}
		if len(a.Packet) > maxMessage6 {
			t.Errorf("an answer of %d bytes to %d", len(a.Packet), len(b))
		}
	})
}
