// Package reach decides which addresses a connection may reach if it was requested by somebody other than the machine's
// operator: a URL in a pod must not open a way to what only the machine can reach.
//
// KindOf classifies an address. Policy uses it for downloads, Fence for connections of a node to guests. Both check the
// address that is dialled, after names are resolved and redirects followed. They know no URLs and no protocols, and
// resolve no names. Join serves such a connection.
package reach

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Policy configures what is allowed besides public addresses. The zero value allows nothing more.
type Policy struct {
	Private  bool           // private networks, and the machine's own addresses in them
	Networks []netip.Prefix // always allowed
	Hosts    []string       // HOST or HOST:PORT, whatever it resolves to
	Setting  string         // for the error message: the setting that allows more
}

// Open adds a list of networks, addresses, and HOST[:PORT].
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

// hostOf returns HOST of HOST[:PORT]; "" if s is neither.
func hostOf(s string) string {
	if host, _, err := net.SplitHostPort(s); err == nil {
		return host
	}
	if strings.Contains(s, ":") {
		return ""
	}
	return s
}

// Guard makes t connect only to what p allows, with d. A proxy that t uses is the operator's: it may have any address,
// and the proxy itself decides where it connects.
func (p Policy) Guard(t *http.Transport, d *net.Dialer) {
	var proxies sync.Map // HOST:PORT of the proxies in use
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
		if r, ok := errors.AsType[*refused](err); ok { // the full error would reveal what an internal name resolves to
			host, _, _ := net.SplitHostPort(addr)
			return nil, errdefs.Preconditionf("%s is at %s, which pods cannot reach through the node; %s allows it", host, r.kind, p.Setting)
		}
		return c, err
	}
}

// dialled returns the address of a proxy in the form in which a transport passes it to its dialer.
func dialled(u *url.URL) string {
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme])
	return net.JoinHostPort(u.Hostname(), port)
}

// named reports whether the operator allowed the host of addr by its name.
func (p Policy) named(addr string) bool {
	addr = strings.ToLower(addr)
	host, _, _ := net.SplitHostPort(addr)
	return slices.Contains(p.Hosts, addr) || slices.Contains(p.Hosts, host)
}

// refused is the error for a refused address; kind describes it.
type refused struct{ kind string }

func (r *refused) Error() string { return "refused: " + r.kind }

func (p Policy) check(address string) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return &refused{"an address that cannot be read"}
	}
	kind := KindOf(at.Addr())
	if kind == Public && own(at.Addr()) != nil {
		kind = Node
	}
	if kind == Public || kind == Private && p.Private {
		return nil
	}
	for _, n := range p.Networks {
		if n.Contains(at.Addr().WithZone("").Unmap()) {
			return nil
		}
	}
	return &refused{kind.String()}
}
