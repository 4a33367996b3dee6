// Package reach decides to which addresses a connection may go that somebody other than the operator of the machine asked
// for: so that a URL in a pod is no way to what only the machine reaches.
//
// It looks at the address that is dialled, after names are resolved and redirects followed; it knows no URLs and no
// protocols, and resolves nothing itself.
package reach

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Policy says what is open beside public addresses. The zero value opens nothing.
type Policy struct {
	Private  bool           // private networks, and the machine's own addresses in them
	Networks []netip.Prefix // whatever else is said
	Hosts    []string       // HOST or HOST:PORT, wherever the name leads
	Setting  string         // what to tell who is refused: the setting that opens more
}

// Open reads a list of networks, addresses, and HOST[:PORT].
// Errors: InvalidArgument.
func (p Policy) Open(list []string) (Policy, error) {
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			p.Networks = append(p.Networks, netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()))
			continue
		}
		if n, err := netip.ParsePrefix(s); err == nil && n == n.Masked() && !n.Addr().Is4In6() {
			p.Networks = append(p.Networks, n)
			continue
		}
		if host := hostOf(s); s == "" || host == "" || strings.ContainsAny(s, "/@ ?#*") {
			return Policy{}, errdefs.Invalidf("%q is neither a network such as 10.1.0.0/16, nor an address, nor HOST[:PORT]", s)
		}
		p.Hosts = append(p.Hosts, strings.ToLower(s))
	}
	return p, nil
}

// hostOf is HOST of HOST[:PORT]; "" when it is neither.
func hostOf(s string) string {
	if host, _, err := net.SplitHostPort(s); err == nil {
		return host
	}
	if strings.Contains(s, ":") {
		return ""
	}
	return s
}

// Guard has t connect only to where p allows, by d. A proxy that t uses is the operator's: it is reached wherever it is, and
// where it connects to is its own to decide.
func (p Policy) Guard(t *http.Transport, d *net.Dialer) {
	var proxies sync.Map // HOST:PORT of those in use
	if ask := t.Proxy; ask != nil {
		t.Proxy = func(r *http.Request) (*url.URL, error) {
			u, err := ask(r)
			if u != nil {
				proxies.Store(dialled(u), true)
			}
			return u, err
		}
	}
	guarded := *d
	guarded.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error { return p.check(address) }
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if _, proxy := proxies.Load(addr); proxy || p.named(addr) {
			return d.DialContext(ctx, network, addr)
		}
		c, err := guarded.DialContext(ctx, network, addr)
		if r, ok := errors.AsType[*refused](err); ok { // the rest of it tells where an internal name leads
			host, _, _ := net.SplitHostPort(addr)
			return nil, errdefs.Preconditionf("%s is at %s, which pods do not reach by way of the node; %s opens it", host, r.kind, p.Setting)
		}
		return c, err
	}
}

// dialled is how a transport names a proxy to its dialer.
func dialled(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// named reports whether the operator opened the host of addr by its name.
func (p Policy) named(addr string) bool {
	addr = strings.ToLower(addr)
	host, _, _ := net.SplitHostPort(addr)
	for _, h := range p.Hosts {
		if h == addr || h == host {
			return true
		}
	}
	return false
}

// refused says what is at an address.
type refused struct{ kind string }

func (r *refused) Error() string { return "refused: " + r.kind }

func (p Policy) check(address string) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return &refused{"an address that cannot be read"}
	}
	kind, private := kindOf(at.Addr().WithZone("").Unmap())
	switch {
	case kind == "" || private && p.Private:
		return nil
	}
	for _, n := range p.Networks {
		if n.Contains(at.Addr().WithZone("").Unmap()) {
			return nil
		}
	}
	return &refused{kind}
}

// kindOf says what an address is, "" for a public one, and whether it is of a private network.
func kindOf(a netip.Addr) (kind string, private bool) {
	if inner, ok := embedded(a); ok {
		a = inner
	}
	switch {
	case in(a, metadata):
		return "an address of cloud metadata", false
	case a.IsLoopback() || a.IsUnspecified() || in(a, thisHost):
		return "a loopback address", false
	case a.IsLinkLocalUnicast():
		return "a link-local address", false
	case a.IsMulticast() || in(a, reserved):
		return "a multicast or reserved address", false
	case a.IsPrivate() || in(a, privates):
		return "a private address", true
	case own(a):
		return "an address of the node itself", true
	}
	return "", false
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// metadata is where clouds tell a machine its identity and credentials, beside link-local addresses: Azure, Alibaba, Oracle,
// AWS, Google, Scaleway.
var metadata = prefixes("169.254.169.254/32", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd20:ce::254/128", "fd00:42::42/128")

var (
	thisHost = prefixes("0.0.0.0/8")
	reserved = prefixes("240.0.0.0/4", "192.0.0.0/24", "fec0::/10", "100::/64")
	privates = prefixes("100.64.0.0/10", "198.18.0.0/15", "64:ff9b:1::/48") // shared by carriers, benchmarks, local NAT64
)

func in(a netip.Addr, list []netip.Prefix) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// embedded is the IPv4 address that an IPv6 address is translated to on its way: NAT64 and 6to4.
func embedded(a netip.Addr) (netip.Addr, bool) {
	b := a.As16()
	switch {
	case a.Is4():
	case in(a, nat64):
		return netip.AddrFrom4([4]byte(b[12:16])), true
	case in(a, sixToFour):
		return netip.AddrFrom4([4]byte(b[2:6])), true
	}
	return a, false
}

var nat64, sixToFour = prefixes("64:ff9b::/96"), prefixes("2002::/16")

// own reports whether the machine has the address, or whether that cannot be told.
func own(a netip.Addr) bool {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, i := range all {
		if n, ok := i.(*net.IPNet); ok {
			if mine, ok := netip.AddrFromSlice(n.IP); ok && mine.Unmap() == a {
				return true
			}
		}
	}
	return false
}
