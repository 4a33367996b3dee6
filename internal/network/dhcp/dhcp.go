// Package dhcp answers DHCP requests with addresses that are already decided: each known MAC gets its own address, and unknown
// MACs get nothing.
//
// Config.Answer is a pure function from packet to packet. It follows RFC 2131 exactly, with the options of RFC 2132, 3397
// (search list), 3442 (classless routes) and 6842 (client identifier). Config6.Answer does the same for DHCPv6, by RFC 8415
// with the options of RFC 3646. Serve and Serve6 are the thin loop around them. The package chooses no address, keeps no lease
// and configures no link.
package dhcp

import (
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Config is what every guest of a network is told.
type Config struct {
	Server    netip.Addr // our own address
	Prefix    netip.Prefix
	Router    netip.Addr // the zero value for none
	DNS       []netip.Addr
	Search    []string // DNS search domains; the first is the guest's own
	Routes    []Route  // in addition to the one through Router
	MTU       int      // 0 for none
	LeaseTime time.Duration
}

// Route is a route to addresses that are not reached through Router.
type Route struct {
	To  netip.Prefix
	Via netip.Addr // zero value: directly on this link
}

// maxMessage is the size that every client must accept: RFC 2131 section 2, minus the headers of IP and UDP.
const maxMessage = 576 - 28

// Check returns an InvalidArgument error if c does not fit into the message size that every guest must accept.
func (c Config) Check() error {
	req, err := dhcpv4.New(dhcpv4.WithHwAddr(make(net.HardwareAddr, 6)))
	if err != nil {
		return errdefs.New(errdefs.Internal, "make a DHCP message: %w", err)
	}
	res := Reservation{IP: c.Server, Hostname: strings.Repeat("x", 63)}
	if n := len(c.reply(Answer{}, req, res, Ack).Packet); n > maxMessage {
		return errdefs.Invalidf("search domains and routes make DHCP messages of %d bytes, but clients accept at most %d; configure fewer", n, maxMessage)
	}
	return nil
}

// Reservation is the address of one MAC.
type Reservation struct {
	IP       netip.Addr
	Hostname string // "" for none

	// Prefix and Router replace those of the configuration, whose routes are left out then. The zero value replaces nothing.
	Prefix netip.Prefix
	Router netip.Addr
}

// of returns what the guest of r is told.
func (c Config) of(r Reservation) Config {
	if r.Prefix.IsValid() {
		c.Prefix, c.Router, c.Routes = r.Prefix, r.Router, nil
	}
	return c
}

// Kind says what an Answer is, or why there is none.
type Kind string

// The kinds of answers. Offer, Ack, Inform and Nak carry a packet; in DHCPv6 Released and Declined do too.
const (
	Offer    Kind = "offer"    // in DHCPv6 an advertisement
	Ack      Kind = "ack"      // the guest now uses the address
	Inform   Kind = "inform"   // an ack that carries only options
	Nak      Kind = "nak"      // the guest asked for an address that is not its own
	Released Kind = "released" // the guest gives the address up; it stays reserved
	Declined Kind = "declined" // the guest found another machine with its address
	Unknown  Kind = "unknown"  // no reservation for this MAC
	Ignored  Kind = "ignored"  // not for us, or not DHCP
)

// Answer is the result of one packet.
type Answer struct {
	Kind   Kind
	MAC    net.HardwareAddr // MAC of the guest
	IP     netip.Addr       // its reserved address, if known
	Packet []byte           // nil: send nothing

	// To is where the packet goes: the broadcast address, or the guest's own. In the latter case the guest may not have
	// configured the address yet, so the frame must be sent to MAC without ARP. In DHCPv6 it is the link-local address from
	// which the guest asked.
	To netip.Addr
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Answer decides on one UDP payload from a guest. It never fails: invalid requests are ignored.
func (c Config) Answer(payload []byte, lookup func(net.HardwareAddr) (Reservation, bool)) Answer {
	req, err := dhcpv4.FromBytes(payload)
	if err != nil || !wellFormed(req) {
		return Answer{Kind: Ignored}
	}
	a := Answer{MAC: req.ClientHWAddr}
	res, ok := lookup(req.ClientHWAddr)
	if !ok {
		a.Kind = Unknown
		return a
	}
	a.IP = res.IP
	switch req.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		return c.reply(a, req, res, Offer)
	case dhcpv4.MessageTypeRequest:
		return c.request(a, req, res)
	case dhcpv4.MessageTypeInform:
		if addr(req.ClientIPAddr) != res.IP {
			a.Kind = Ignored
			return a
		}
		return c.reply(a, req, res, Inform)
	case dhcpv4.MessageTypeRelease:
		a.Kind = ifOurs(Released, c.meant(req) && addr(req.ClientIPAddr) == res.IP)
	case dhcpv4.MessageTypeDecline:
		a.Kind = ifOurs(Declined, c.meant(req) && addr(req.RequestedIPAddress()) == res.IP)
	default:
		a.Kind = Ignored
	}
	return a
}

func ifOurs(kind Kind, ours bool) Kind {
	if !ours {
		return Ignored
	}
	return kind
}

// meant reports whether req is for this server: it names this server or none.
func (c Config) meant(req *dhcpv4.DHCPv4) bool {
	id := req.ServerIdentifier()
	return id == nil || addr(id) == c.Server
}

// wellFormed refuses what a guest on our own link cannot validly send; a relayed message would make us send elsewhere.
func wellFormed(req *dhcpv4.DHCPv4) bool {
	return req.OpCode == dhcpv4.OpcodeBootRequest && req.HWType == iana.HWTypeEthernet && len(req.ClientHWAddr) == 6 &&
		(req.GatewayIPAddr == nil || req.GatewayIPAddr.IsUnspecified())
}

// request distinguishes the four states of RFC 2131 4.3.2.
func (c Config) request(a Answer, req *dhcpv4.DHCPv4, res Reservation) Answer {
	if !c.meant(req) {
		a.Kind = Ignored // the guest chose another server
		return a
	}
	wanted := addr(req.RequestedIPAddress()) // selecting, init-reboot
	if !wanted.IsValid() || wanted.IsUnspecified() {
		wanted = addr(req.ClientIPAddr) // renewing, rebinding
	}
	if wanted != res.IP {
		return c.reply(a, req, res, Nak)
	}
	return c.reply(a, req, res, Ack)
}

func (c Config) reply(a Answer, req *dhcpv4.DHCPv4, res Reservation, kind Kind) Answer {
	// The library's own constructor reads a random transaction id from the kernel, which an answer does not need, and it copies
	// option 82, which only relays may add.
	resp := &dhcpv4.DHCPv4{
		OpCode: dhcpv4.OpcodeBootReply, HWType: req.HWType, TransactionID: req.TransactionID, Flags: req.Flags, ClientHWAddr: req.ClientHWAddr,
		ClientIPAddr: net.IPv4zero, YourIPAddr: net.IPv4zero, ServerIPAddr: net.IPv4zero, GatewayIPAddr: net.IPv4zero,
		Options: dhcpv4.Options{},
	}
	a.Kind, a.To = kind, broadcast
	resp.UpdateOption(dhcpv4.OptServerIdentifier(c.Server.AsSlice()))
	if id := req.Options.Get(dhcpv4.OptionClientIdentifier); id != nil {
		resp.UpdateOption(dhcpv4.OptClientIdentifier(id))
	}
	if kind == Nak {
		resp.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeNak))
		resp.UpdateOption(dhcpv4.OptMessage("the address of this interface is " + res.IP.String()))
		resp.SetBroadcast()
		a.Packet = resp.ToBytes()
		return a
	}
	if kind == Offer {
		resp.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeOffer))
	} else {
		resp.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeAck))
	}
	if kind != Inform {
		resp.YourIPAddr = res.IP.AsSlice()
		resp.UpdateOption(dhcpv4.OptIPAddressLeaseTime(c.LeaseTime))
		resp.UpdateOption(dhcpv4.OptRenewTimeValue(c.LeaseTime / 2))
		resp.UpdateOption(dhcpv4.OptRebindingTimeValue(c.LeaseTime / 8 * 7))
	}
	resp.ServerIPAddr = c.Server.AsSlice()
	if kind != Offer {
		resp.ClientIPAddr = req.ClientIPAddr
	}
	c.of(res).tell(resp, res)
	if !req.IsBroadcast() || addr(req.ClientIPAddr) == res.IP {
		a.To = res.IP
	}
	a.Packet = resp.ToBytes()
	return a
}

// tell adds the options that describe the network.
func (c Config) tell(resp *dhcpv4.DHCPv4, res Reservation) {
	resp.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(c.Prefix.Bits(), 32)))
	resp.UpdateOption(dhcpv4.OptBroadcastAddress(lastOf(c.Prefix)))
	if c.Router.IsValid() {
		resp.UpdateOption(dhcpv4.OptRouter(c.Router.AsSlice()))
	}
	if len(c.DNS) > 0 {
		ips := make([]net.IP, 0, len(c.DNS))
		for _, a := range c.DNS {
			ips = append(ips, a.AsSlice())
		}
		resp.UpdateOption(dhcpv4.OptDNS(ips...))
	}
	if len(c.Search) > 0 {
		resp.UpdateOption(dhcpv4.OptDomainName(c.Search[0]))
		resp.UpdateOption(dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: c.Search}))
	}
	if len(c.Routes) > 0 {
		resp.UpdateOption(dhcpv4.OptClasslessStaticRoute(c.routes()...))
	}
	if res.Hostname != "" {
		resp.UpdateOption(dhcpv4.OptHostName(res.Hostname))
	}
	if c.MTU > 0 {
		resp.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{byte(c.MTU >> 8), byte(c.MTU)}))
	}
}

// routes returns all routes of the guest: a guest that reads them ignores the router option (RFC 3442).
func (c Config) routes() []*dhcpv4.Route {
	out := make([]*dhcpv4.Route, 0, len(c.Routes)+1)
	if c.Router.IsValid() {
		out = append(out, &dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Router: c.Router.AsSlice()})
	}
	for _, r := range c.Routes {
		via := net.IPv4zero.To4()
		if r.Via.IsValid() {
			via = r.Via.AsSlice()
		}
		out = append(out, &dhcpv4.Route{Dest: &net.IPNet{IP: r.To.Addr().AsSlice(), Mask: net.CIDRMask(r.To.Bits(), 32)}, Router: via})
	}
	return out
}

func addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// lastOf returns the broadcast address of p.
func lastOf(p netip.Prefix) net.IP {
	ip := net.IP(p.Addr().AsSlice())
	for i, m := range net.CIDRMask(p.Bits(), 32) {
		ip[i] |= ^m
	}
	return ip
}
