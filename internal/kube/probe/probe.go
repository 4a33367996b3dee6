// Package probe checks guests and their containers by pings, TCP connections, HTTP and gRPC requests and commands. One ICMP
// socket serves any number of targets.
//
// It says what one probe found. Package probing turns a series of results into a verdict, and runs checks when they are due.
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

// NewNet returns a prober that pings with p. Without a Pinger (nil), every ping succeeds, so that a known address is enough.
func NewNet(p *Pinger) Net { return Net{p} }

// Probe returns nil if ip accepts a TCP connection on port, or, if port is 0, answers an ICMP echo. Errors: InvalidArgument
// for an invalid address, Unavailable if there is no answer before ctx ends.
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
