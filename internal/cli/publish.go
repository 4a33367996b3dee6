package cli

import (
	"cmp"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// parsePorts parses the values of --publish. The engine validates protocols and addresses.
func parsePorts(list []string) (ports []vm.PortMapping, err error) {
	for _, s := range list {
		p, ok := parsePort(s)
		if !ok {
			return nil, errdefs.Invalidf("--publish %q: use HOSTPORT:PORT, as in 8080:80, 192.0.2.7:8080:80 or 5353:53/udp", s)
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func parsePort(s string) (p vm.PortMapping, ok bool) {
	s, protocol, _ := strings.Cut(s, "/")
	p.Protocol = vm.Protocol(strings.ToLower(cmp.Or(protocol, string(vm.TCP))))
	parts := strings.Split(s, ":")
	if len(parts) == 3 {
		p.HostIP, parts = parts[0], parts[1:]
	}
	if len(parts) != 2 {
		return p, false
	}
	host, err := strconv.ParseUint(parts[0], 10, 16)
	guest, gerr := strconv.ParseUint(parts[1], 10, 16)
	p.HostPort, p.GuestPort = uint16(host), uint16(guest)
	return p, err == nil && gerr == nil && host > 0 && guest > 0
}
