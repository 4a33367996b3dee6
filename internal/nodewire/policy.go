package nodewire

import (
	"net/netip"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// EncodePolicies returns p as a message.
func EncodePolicies(p network.Policies) *nodev1.PoliceRequest {
	return &nodev1.PoliceRequest{
		Node: p.Node, Ingress: each(p.Ingress, encodePolicy), Egress: each(p.Egress, encodePolicy),
		Guests: each(p.Guests, func(g network.Guest) *nodev1.PolicedGuest {
			return &nodev1.PolicedGuest{Id: string(g.ID), Ingress: each(g.Ingress, toInt32), Egress: each(g.Egress, toInt32)}
		}),
	}
}

// DecodePolicies returns the policies in m. What is no address, protocol or port becomes one that is not valid.
func DecodePolicies(m *nodev1.PoliceRequest) network.Policies {
	return network.Policies{
		Node: m.GetNode(), Ingress: each(m.GetIngress(), decodePolicy), Egress: each(m.GetEgress(), decodePolicy),
		Guests: each(m.GetGuests(), func(g *nodev1.PolicedGuest) network.Guest {
			return network.Guest{ID: vm.ID(g.GetId()), Ingress: each(g.GetIngress(), toInt), Egress: each(g.GetEgress(), toInt)}
		}),
	}
}

func toInt32(i int) int32 { return int32(i) }

func toInt(i int32) int { return int(i) }

func encodePolicy(p network.Policy) *nodev1.Policy {
	return &nodev1.Policy{Name: p.Name, Rules: each(p.Rules, func(r network.Rule) *nodev1.PolicyRule {
		return &nodev1.PolicyRule{
			Anyone: r.Anyone, AllPorts: r.AllPorts,
			Peers: each(r.Peers, func(x network.Range) *nodev1.AddressRange {
				return &nodev1.AddressRange{First: x.First.AsSlice(), Last: x.Last.AsSlice()}
			}),
			Ports: each(r.Ports, func(x network.Port) *nodev1.PortRange {
				return &nodev1.PortRange{Protocol: uint32(x.Protocol), First: uint32(x.First), Last: uint32(x.Last)}
			}),
			Named: each(r.Named, func(x network.Endpoint) *nodev1.NamedPort {
				return &nodev1.NamedPort{Addr: x.Addr.AsSlice(), Protocol: uint32(x.Protocol), Port: uint32(x.Port)}
			}),
		}
	})}
}

func decodePolicy(m *nodev1.Policy) network.Policy {
	return network.Policy{Name: m.GetName(), Rules: each(m.GetRules(), func(r *nodev1.PolicyRule) network.Rule {
		return network.Rule{
			Anyone: r.GetAnyone(), AllPorts: r.GetAllPorts(),
			Peers: each(r.GetPeers(), func(x *nodev1.AddressRange) network.Range {
				return network.Range{First: address(x.GetFirst()), Last: address(x.GetLast())}
			}),
			Ports: each(r.GetPorts(), decodePortRange),
			Named: each(r.GetNamed(), func(x *nodev1.NamedPort) network.Endpoint {
				p := decodePortRange(&nodev1.PortRange{Protocol: x.GetProtocol(), First: x.GetPort(), Last: x.GetPort()})
				return network.Endpoint{Addr: address(x.GetAddr()), Protocol: p.Protocol, Port: p.First}
			}),
		}
	})}
}

// decodePortRange returns the ports in m. A number that does not fit becomes the protocol 0, which is not valid.
func decodePortRange(m *nodev1.PortRange) network.Port {
	if m.GetProtocol() > 1<<8-1 || m.GetFirst() > 1<<16-1 || m.GetLast() > 1<<16-1 {
		return network.Port{}
	}
	return network.Port{Protocol: network.Protocol(m.GetProtocol()), First: uint16(m.GetFirst()), Last: uint16(m.GetLast())}
}

func address(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}
