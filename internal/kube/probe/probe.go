// Package probe finds out how guests and what runs in them do: by pings, connections, requests and commands, for any
// number of them on one timer and one ICMP socket.
//
// It judges single answers and rows of them. What follows from a verdict is its caller's business.
package probe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Net probes guests over the network of this host.
type Net struct{ ping *Pinger }

// NewNet returns a prober that pings with p. Without a Pinger (nil) an address alone counts as an answer, which is weaker
// than one but better than nothing.
func NewNet(p *Pinger) Net { return Net{p} }

// Probe returns nil when ip answers: to a TCP connection on port, or, when port is 0, to an ICMP echo. Errors:
// InvalidArgument for an address that is none, Unavailable when nobody answers before ctx ends.
func (n Net) Probe(ctx context.Context, ip string, port int) error {
	if port != 0 {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
		if err != nil {
			return errdefs.Unavailablef("probe tcp port: %w", err)
		}
		return c.Close()
	}
	if n.ping == nil {
		return nil
	}
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return errdefs.Invalidf("ping: %w", err)
	}
	if err := n.ping.Ping(ctx, addr); err != nil {
		return fmt.Errorf("ping %s: %w", ip, err)
	}
	return nil
}
