package bridge

import (
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// What guests do not reach: the host's own addresses by the guard of its input, which lists none of them since they change,
// and the closed networks by the chain called closed.

// resolvers match questions to the name servers that guests are told.
func (r rules) resolvers() (out [][]expr.Any) {
	for _, d := range r.dns {
		for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			out = append(out, join(to(netip.PrefixFrom(d, d.BitLen())), proto(p), dport(53)))
		}
	}
	return out
}

// routed keeps guests from the closed networks. Who is there may still ask guests, and is answered.
func (r rules) routed() [][]expr.Any {
	return append([][]expr.Any{
		join(ctReply(), pass()),
		join(ctBits(expr.CtKeySTATE, expr.CtStateBitRELATED), pass()),
	}, r.elsewhere()...)
}

// elsewhere does so at the taps of an adopted bridge too, whose owner may have the router beyond it. There are no
// connections there, so that closed networks are not answered either. The subnet itself is never closed: a kernel that
// shows bridged packets to inet tables would part the guests of one bridge.
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
