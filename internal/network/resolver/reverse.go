package resolver

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// addressOf returns the address whose reverse name is name, which is canonical; false if it is none of a whole address.
func addressOf(name string) (netip.Addr, bool) {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		parts := strings.Split(rest, ".")
		slices.Reverse(parts)
		a, err := netip.ParseAddr(strings.Join(parts, "."))
		return a, err == nil && a.Is4()
	}
	rest, ok := strings.CutSuffix(name, ".ip6.arpa.")
	digits := strings.Split(rest, ".")
	if !ok || len(digits) != 32 {
		return netip.Addr{}, false
	}
	var b [16]byte
	for i, d := range digits {
		n, err := strconv.ParseUint(d, 16, 4)
		if err != nil || len(d) != 1 {
			return netip.Addr{}, false
		}
		b[15-i/2] |= byte(n) << (4 * (i % 2))
	}
	return netip.AddrFrom16(b), true
}
