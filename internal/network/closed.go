package network

import (
	"net/netip"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/reach"
)

// AlwaysClosed are the addresses at which clouds give a machine its identity and credentials: link-local ones and some others.
// Guests must not act as that machine.
func AlwaysClosed() []netip.Prefix {
	return append([]netip.Prefix{netip.MustParsePrefix("169.254.0.0/16")}, reach.Clouds()...)
}

// Closed says which networks guests cannot reach. The zero value closes nothing.
type Closed struct {
	Closed []netip.Prefix
	Open   []netip.Prefix // overrides Closed
}

// NewClosed returns the networks that are closed by default plus those in closed, except for those in open. Entries are CIDRs
// or addresses. Errors: InvalidArgument.
func NewClosed(closed, open []string) (Closed, error) {
	var out Closed
	var err error
	if out.Closed, err = Prefixes("network.closed", closed); err != nil {
		return Closed{}, err
	}
	out.Closed = append(AlwaysClosed(), out.Closed...)
	if out.Open, err = Prefixes("network.open", open); err != nil {
		return Closed{}, err
	}
	return out, nil
}

// Prefixes parses CIDRs and single addresses; setting is their source, for the error message.
func Prefixes(setting string, list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil && a.Zone() == "" {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		switch {
		case err != nil || p.Addr().Is4In6():
			return nil, errdefs.Invalidf("%s: %q is neither an address nor a network such as 192.168.7.0/24 or fd00:7::/48", setting, s)
		case p != p.Masked():
			return nil, errdefs.Invalidf("%s: %q has bits set after its prefix length; use %s", setting, s, p.Masked())
		}
		out = append(out, p)
	}
	return out, nil
}
