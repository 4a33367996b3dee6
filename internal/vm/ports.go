package vm

import (
	"fmt"
	"net/netip"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxPorts is the number of ports of the host that one interface may have.
const maxPorts = 256

// Protocol is a transport protocol whose ports can be forwarded.
type Protocol string

// The protocols.
const (
	TCP  Protocol = "tcp"
	UDP  Protocol = "udp"
	SCTP Protocol = "sctp"
)

func (p Protocol) validate() error {
	switch p {
	case TCP, UDP, SCTP:
		return nil
	}
	return errdefs.Invalidf("the protocol %q is not one of tcp, udp and sctp", p)
}

// PortMapping forwards a port of the host to the guest. Connections to the host's loopback addresses are not forwarded.
type PortMapping struct {
	Protocol  Protocol `json:"protocol"`
	HostIP    string   `json:"host_ip,omitempty"` // an IPv4 address of the host; "": all of them
	HostPort  uint16   `json:"host_port"`
	GuestPort uint16   `json:"guest_port"`
}

func (p PortMapping) String() string {
	at := fmt.Sprint(p.HostPort)
	if p.HostIP != "" {
		at = p.HostIP + ":" + at
	}
	return at + "/" + string(p.Protocol)
}

// Clashes reports whether p and o claim the same port of the host.
func (p PortMapping) Clashes(o PortMapping) bool {
	return p.Protocol == o.Protocol && p.HostPort == o.HostPort && (p.HostIP == "" || o.HostIP == "" || p.HostIP == o.HostIP)
}

func (p PortMapping) validate() error {
	if err := p.Protocol.validate(); err != nil {
		return errdefs.Invalidf("port %d: %w", p.HostPort, err)
	}
	if p.HostPort == 0 || p.GuestPort == 0 {
		return errdefs.Invalidf("port %s to %d: a port is between 1 and 65535", p, p.GuestPort)
	}
	if p.HostIP == "" {
		return nil
	}
	if a, err := netip.ParseAddr(p.HostIP); err != nil || !a.Is4() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.String() != p.HostIP {
		return errdefs.Invalidf("port %s: %q is not an IPv4 address of the host at which ports can be forwarded; leave it out for all of them", p, p.HostIP)
	}
	return nil
}

// validatePorts validates the ports of all interfaces of one VM together.
func validatePorts(nics []NICSpec) error {
	var all []PortMapping
	for _, n := range nics {
		if len(n.Ports) > maxPorts {
			return errdefs.Invalidf("an interface has %d ports of the host; at most %d are allowed", len(n.Ports), maxPorts)
		}
		for _, p := range n.Ports {
			if err := p.validate(); err != nil {
				return err
			}
			for _, o := range all {
				if p.Clashes(o) {
					return errdefs.Invalidf("port %s of the host is requested twice", p)
				}
			}
			all = append(all, p)
		}
	}
	return nil
}
