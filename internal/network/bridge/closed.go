package bridge

import (
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// What guests cannot reach: the host's own addresses, and the closed networks. The rules for the host's input protect its
// addresses without listing them, because they change. The chain called closed blocks the closed networks.

// resolvers match DNS queries to the name servers that guests are told.
func (r rules) resolvers() (out [][]expr.Any) {
	for _, d := range r.dns {
		for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			out = append(out, join(to(netip.PrefixFrom(d, d.BitLen())), proto(p), dport(53)))
		}
	}
	return out
}

// routed blocks the closed networks for guests. Hosts there may still connect to guests, and get answers.
func (r rules) routed() [][]expr.Any {
	return append([][]expr.Any{
		join(ctReply(), pass()),
		join(ctBits(expr.CtKeySTATE, expr.CtStateBitRELATED), pass()),
	}, r.elsewhere()...)
}

// elsewhere blocks the closed networks also at the taps of an adopted bridge, whose owner may have the router beyond the
// bridge. There is no connection tracking there, so guests cannot answer closed networks either. The subnet itself is never
// closed: a kernel that shows bridged packets to inet tables would separate the guests of one bridge.
func (r rules) elsewhere() (out [][]expr.Any) {
	for _, own := range []netip.Prefix{r.prefix, r.prefix6} {
		if own.IsValid() {
			out = append(out, join(to(own), pass()))
		}
	}
	for _, asks := range r.resolvers() {
		out = append(out, join(asks, pass()))
	}
	for _, p := range r.closed.Open {
		out = append(out, join(to(p), pass()))
	}
	for _, p := range r.closed.Closed {
		out = append(out, join(to(p), drop()))
	}
	return out
}
