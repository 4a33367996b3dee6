package dhcp

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/radv"
)

// Config6 is what every guest of a network is told by DHCPv6. Router advertisements tell the router and the MTU.
type Config6 struct {
	Server    net.HardwareAddr // makes our DUID (DUID-LL), by which guests recognize us
	Prefix    netip.Prefix     // prefix of the link
	DNS       []netip.Addr     // IPv6
	Search    []string         // DNS search domains
	LeaseTime time.Duration
}

const (
	// maxMessage6 is the packet size that every link supports (RFC 8200, section 5), minus the headers of IP and UDP. Longer
	// answers are not sent; only a message with many identity associations would need one.
	maxMessage6 = 1280 - 40 - 8
	maxDUID     = 2 + 128 // bytes, RFC 8415 section 11.1
	preferred   = 255     // guests need not wait for other servers, because there are none
)

// Check returns an InvalidArgument error if c does not fit into one message to guests.
func (c Config6) Check() error {
	req := &dhcpv6.Message{MessageType: dhcpv6.MessageTypeRequest, Options: dhcpv6.MessageOptions{Options: dhcpv6.Options{
		dhcpv6.OptClientID(&dhcpv6.DUIDOpaque{Data: make([]byte, maxDUID-2)}), &dhcpv6.OptIANA{},
		dhcpv6.OptRequestedOption(dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList),
	}}}
	resp := c.response(dhcpv6.MessageTypeReply, req)
	c.identities(resp, req, netip.IPv6Unspecified())
	c.tell(resp, req)
	if n := len(resp.ToBytes()); n > maxMessage6 {
		return errdefs.Invalidf("name servers and search domains make DHCPv6 messages of %d bytes, but links carry at most %d; configure fewer", n, maxMessage6)
	}
	return nil
}

// Answer decides on one UDP payload that a guest sent from its link-local address, which is made from its MAC (modified
// EUI-64). A guest is identified by that MAC alone, whatever DUID it has chosen: an installer and the system that it installs
// get the same address, and the checks of senders at the taps need not read the payload. The messages are those of RFC 8415,
// section 18.3. It never fails: invalid requests are ignored.
func (c Config6) Answer(payload []byte, from netip.Addr, lookup func(net.HardwareAddr) (Reservation, bool)) Answer {
	req, err := dhcpv6.MessageFromBytes(payload)
	mac, ok := radv.MAC(from)
	if err != nil || !ok || !c.wellFormed(req) {
		return Answer{Kind: Ignored}
	}
	a := Answer{MAC: mac}
	res, ok := lookup(mac)
	if !ok {
		a.Kind = Unknown
		return a
	}
	if !res.IP.IsValid() { // it makes its own
		a.Kind = Ignored
		return a
	}
	a.IP, a.To = res.IP, from
	var resp *dhcpv6.Message
	if a.Kind, resp = c.decide(req, res.IP); resp != nil {
		a.Packet = resp.ToBytes()
	}
	if len(a.Packet) > maxMessage6 {
		a.Kind, a.Packet = Ignored, nil
	}
	if a.Packet == nil {
		a.To = netip.Addr{}
	}
	return a
}

// wellFormed applies RFC 8415 section 16: which messages must name us, which must name no server, and which must identify the
// client. It refuses messages of servers and relays.
func (c Config6) wellFormed(req *dhcpv6.Message) bool {
	client, server := req.Options.ClientID(), req.Options.ServerID()
	ours := server != nil && server.Equal(c.duid())
	if client != nil && len(client.ToBytes()) > maxDUID {
		return false
	}
	switch req.MessageType {
	case dhcpv6.MessageTypeSolicit, dhcpv6.MessageTypeConfirm, dhcpv6.MessageTypeRebind:
		return client != nil && server == nil
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRelease, dhcpv6.MessageTypeDecline:
		return client != nil && ours
	case dhcpv6.MessageTypeInformationRequest:
		return (server == nil || ours) && len(req.Options.IANA())+len(req.Options.IATA())+len(req.Options.IAPD()) == 0
	default:
		return false
	}
}

// decide answers a guest whose address is own.
func (c Config6) decide(req *dhcpv6.Message, own netip.Addr) (Kind, *dhcpv6.Message) {
	resp := c.response(dhcpv6.MessageTypeReply, req)
	switch req.MessageType {
	case dhcpv6.MessageTypeConfirm:
		return confirm(resp, req, own)
	case dhcpv6.MessageTypeRelease:
		return giveBack(Released, resp, req, own)
	case dhcpv6.MessageTypeDecline:
		return giveBack(Declined, resp, req, own)
	case dhcpv6.MessageTypeInformationRequest:
		c.tell(resp, req)
		return Inform, resp
	default: // solicit, request, renew, rebind: wellFormed refuses all others
		return c.lease(resp, req, own)
	}
}

// lease gives a guest its address, or offers it.
func (c Config6) lease(resp, req *dhcpv6.Message, own netip.Addr) (Kind, *dhcpv6.Message) {
	kind := c.identities(resp, req, own)
	c.tell(resp, req)
	if req.MessageType != dhcpv6.MessageTypeSolicit {
		return kind, resp
	}
	if req.GetOneOption(dhcpv6.OptionRapidCommit) != nil {
		dhcpv6.WithRapidCommit(resp)
		return kind, resp
	}
	resp.MessageType = dhcpv6.MessageTypeAdvertise
	dhcpv6.WithPreference(preferred)(resp)
	return Offer, resp
}

// identities answers each identity association of a guest that asks for addresses: the first one gets the guest's own address,
// the others get none. Other addresses that a renewing guest names get lifetime zero.
func (c Config6) identities(resp, req *dhcpv6.Message, own netip.Addr) Kind {
	extends := req.MessageType == dhcpv6.MessageTypeRenew || req.MessageType == dhcpv6.MessageTypeRebind
	nothing, noPrefix := status(iana.StatusNoAddrsAvail), status(iana.StatusNoPrefixAvail)
	if extends {
		nothing, noPrefix = status(iana.StatusNoBinding), status(iana.StatusNoBinding)
	}
	kind := Inform
	for i, asked := range req.Options.IANA() {
		ia := &dhcpv6.OptIANA{IaId: asked.IaId}
		resp.AddOption(ia)
		others := slices.DeleteFunc(addresses(asked), func(a netip.Addr) bool { return a == own })
		switch {
		case i > 0:
			ia.Options.Add(nothing)
		case req.MessageType == dhcpv6.MessageTypeRequest && slices.ContainsFunc(others, func(a netip.Addr) bool { return !c.Prefix.Contains(a) }):
			ia.Options.Add(status(iana.StatusNotOnLink))
			kind = Nak
		default:
			ia.T1, ia.T2 = c.LeaseTime/2, c.LeaseTime/5*4
			ia.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: own.AsSlice(), PreferredLifetime: c.LeaseTime, ValidLifetime: c.LeaseTime})
			for _, a := range others {
				if extends {
					ia.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: a.AsSlice()})
				}
			}
			kind = Ack
		}
	}
	for _, asked := range req.Options.IATA() {
		resp.AddOption(&dhcpv6.OptIATA{IaId: asked.IaId, Options: dhcpv6.IdentityOptions{Options: dhcpv6.Options{nothing}}})
	}
	for _, asked := range req.Options.IAPD() {
		resp.AddOption(&dhcpv6.OptIAPD{IaId: asked.IaId, Options: dhcpv6.PDOptions{Options: dhcpv6.Options{noPrefix}}})
	}
	return kind
}

// confirm tells a guest that returns to the link whether its address is still its own.
func confirm(resp, req *dhcpv6.Message, own netip.Addr) (Kind, *dhcpv6.Message) {
	var claimed []netip.Addr
	for _, ia := range req.Options.IANA() {
		claimed = append(claimed, addresses(ia)...)
	}
	switch {
	case len(claimed) == 0:
		return Ignored, nil // RFC 8415 section 18.3.3
	case slices.ContainsFunc(claimed, func(a netip.Addr) bool { return a != own }):
		resp.AddOption(status(iana.StatusNotOnLink))
		return Nak, resp
	}
	resp.AddOption(status(iana.StatusSuccess))
	return Ack, resp
}

// giveBack acknowledges that a guest no longer uses its address, and says which identity associations never had it. kind is the
// kind of answer if the address was the guest's.
func giveBack(kind Kind, resp, req *dhcpv6.Message, own netip.Addr) (Kind, *dhcpv6.Message) {
	resp.AddOption(status(iana.StatusSuccess))
	had := Nak
	for _, ia := range req.Options.IANA() {
		if slices.Contains(addresses(ia), own) {
			had = kind
			continue
		}
		resp.AddOption(&dhcpv6.OptIANA{IaId: ia.IaId, Options: dhcpv6.IdentityOptions{Options: dhcpv6.Options{status(iana.StatusNoBinding)}}})
	}
	return had, resp
}

// tell adds the options that describe the network, if the guest asked for them.
func (c Config6) tell(resp, req *dhcpv6.Message) {
	if len(c.DNS) > 0 && req.IsOptionRequested(dhcpv6.OptionDNSRecursiveNameServer) {
		ips := make([]net.IP, 0, len(c.DNS))
		for _, a := range c.DNS {
			ips = append(ips, a.AsSlice())
		}
		resp.AddOption(dhcpv6.OptDNS(ips...))
	}
	if len(c.Search) > 0 && req.IsOptionRequested(dhcpv6.OptionDomainSearchList) {
		resp.AddOption(dhcpv6.OptDomainSearchList(&rfc1035label.Labels{Labels: c.Search}))
	}
}

// response returns a message from us to the guest that sent req.
func (c Config6) response(kind dhcpv6.MessageType, req *dhcpv6.Message) *dhcpv6.Message {
	resp := &dhcpv6.Message{MessageType: kind, TransactionID: req.TransactionID}
	if id := req.Options.ClientID(); id != nil {
		resp.AddOption(dhcpv6.OptClientID(id))
	}
	resp.AddOption(dhcpv6.OptServerID(c.duid()))
	return resp
}

func (c Config6) duid() dhcpv6.DUID {
	return &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: c.Server}
}

func status(code iana.StatusCode) *dhcpv6.OptStatusCode {
	return &dhcpv6.OptStatusCode{StatusCode: code}
}

// addresses returns the addresses that a guest names in an identity association.
func addresses(ia *dhcpv6.OptIANA) (out []netip.Addr) {
	for _, o := range ia.Options.Addresses() {
		if a, ok := netip.AddrFromSlice(o.IPv6Addr); ok {
			out = append(out, a)
		}
	}
	return out
}
