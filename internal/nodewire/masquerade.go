package nodewire

import (
	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func encodeMasquerade(m vm.Masquerade) *nodev1.Masquerade {
	if !m.Asked() {
		return nil
	}
	return &nodev1.Masquerade{Cidr: m.CIDR, Cidr6: m.CIDR6, Ports: each(m.Ports, func(p vm.PortRange) *nodev1.GuestPorts {
		return &nodev1.GuestPorts{Protocol: string(p.Protocol), First: uint32(p.First), Last: uint32(p.Last)}
	})}
}

// decodeMasquerade makes numbers that are no ports 0, which the validation of a spec refuses.
func decodeMasquerade(m *nodev1.Masquerade) vm.Masquerade {
	return vm.Masquerade{CIDR: m.GetCidr(), CIDR6: m.GetCidr6(), Ports: each(m.GetPorts(), func(p *nodev1.GuestPorts) vm.PortRange {
		return vm.PortRange{Protocol: vm.Protocol(p.GetProtocol()), First: port(p.GetFirst()), Last: port(p.GetLast())}
	})}
}

func encodeInside(in vm.Inside) *nodev1.Inside {
	if in == (vm.Inside{}) {
		return nil
	}
	return &nodev1.Inside{Ip: in.IP, Prefix: int64(in.Prefix), Gateway: in.Gateway, Ipv6: in.IPv6, Prefix6: int64(in.Prefix6), Gateway6: in.Gateway6}
}

func decodeInside(m *nodev1.Inside) vm.Inside {
	return vm.Inside{
		IP: m.GetIp(), Prefix: int(m.GetPrefix()), Gateway: m.GetGateway(),
		IPv6: m.GetIpv6(), Prefix6: int(m.GetPrefix6()), Gateway6: m.GetGateway6(),
	}
}
