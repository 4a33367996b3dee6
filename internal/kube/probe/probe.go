// Package probe checks guests and their containers by pings, TCP connections, HTTP and gRPC requests and commands. One timer
// and one ICMP socket serve any number of targets.
//
// It turns a series of results into a verdict. The caller decides what follows from a verdict.
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

// Result is the outcome of one probe.
type Result int

// The results of probes.
const (
	Unknown Result = iota // the probe could not be run, so the state of its target is unknown
	Success
	Warning // success, with a message
	Failure
)

// Judge turns a series of results into a verdict. The verdict changes only after as many equal results in a row as its
// threshold requires.
type Judge struct {
	Successes int // required in a row; 1 if below 1
	Failures  int

	last Result
	row  int
}

// Take adds a result and returns the verdict: Success, Failure, or Unknown while too few equal results follow each other.
func (j *Judge) Take(r Result) Result {
	switch r {
	case Unknown:
		return Unknown
	case Warning:
		r = Success
	case Success, Failure:
	}
	if j.last != r {
		j.last, j.row = r, 0
	}
	j.row++
	if r == Success && j.row < j.Successes || r == Failure && j.row < j.Failures {
		return Unknown
	}
	return r
}
