package host

import (
	"bufio"
	"net/netip"
	"os"
	"strings"
)

// Resolvers returns the host's own name servers, except those on the host's loopback, which guests cannot reach.
// systemd-resolved keeps the real ones in another file.
func Resolvers() []netip.Addr {
	for _, path := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if out := parseResolvConf(string(b)); len(out) > 0 {
			return out
		}
	}
	return nil
}

// parseResolvConf returns the IPv4 name servers that are not on loopback, at most the three that resolvers use.
func parseResolvConf(s string) []netip.Addr {
	var out []netip.Addr
	for sc := bufio.NewScanner(strings.NewReader(s)); sc.Scan() && len(out) < 3; {
		f := strings.Fields(sc.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil && a.Is4() && !a.IsLoopback() && !a.IsUnspecified() {
			out = append(out, a)
		}
	}
	return out
}
