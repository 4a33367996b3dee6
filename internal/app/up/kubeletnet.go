package up

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"text/template"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
)

// The node with a kubelet is at the end of a link of its own. This machine routes between it, the bridges of the virtual nodes and other
// networks, as it does for guests of a bridge, and redirects Services for it.

// kubeletRange is where subnets of nodes are looked for. The virtual nodes' begin in other ranges.
var kubeletRange = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 89, 0, 0}), 16)

// kubeletSubnet returns the subnet of an earlier start if it is still free, else a free one. Each instance begins to look at another place.
func kubeletSubnet(kept string, l layout) (string, error) {
	used, err := usedNetworks(l.kubelet().link())
	if err != nil {
		return "", err
	}
	free := func(p netip.Prefix) bool {
		for _, u := range used {
			if u.Overlaps(p) {
				return false
			}
		}
		return true
	}
	if p, err := netip.ParsePrefix(kept); err == nil && free(p) {
		return kept, nil
	}
	first := fnv.New32a()
	_, _ = first.Write([]byte(l.dir)) // never fails
	for i := range 256 {
		b := kubeletRange.Addr().As4()
		b[2] = byte(int(first.Sum32()) + i)
		if p := netip.PrefixFrom(netip.AddrFrom4(b), 24); free(p) {
			return p.String(), nil
		}
	}
	return "", errdefs.Exhaustedf("--kubelet needs a free IPv4 network of 24 bits in %s, and this machine uses parts of all of them", kubeletRange)
}

// usedNetworks returns the IPv4 networks of this machine's addresses and routes, but for those of a link. Routes wider than 8 bits are
// left out: as the default route, they only lead elsewhere.
func usedNetworks(except string) ([]netip.Prefix, error) {
	var used []netip.Prefix
	links, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		addrs, err := l.Addrs()
		if err != nil || l.Name == except {
			continue // the link has just gone
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
				used = append(used, p.Masked())
			}
		}
	}
	routes, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return append(used, routesOf(routes, except)...), nil
}

// routesOf returns the networks in the kernel's table of routes, whose numbers are in the byte order of the machine.
func routesOf(table []byte, except string) (all []netip.Prefix) {
	for lines := bufio.NewScanner(bytes.NewReader(table)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 8 || f[0] == except {
			continue
		}
		to, err := hex.DecodeString(f[1])
		mask, maskErr := hex.DecodeString(f[7])
		if err != nil || maskErr != nil || len(to) != 4 || len(mask) != 4 {
			continue // the heading
		}
		var a [4]byte
		binary.NativeEndian.PutUint32(a[:], binary.BigEndian.Uint32(to))
		var m [4]byte
		binary.NativeEndian.PutUint32(m[:], binary.BigEndian.Uint32(mask))
		if bits, _ := net.IPMask(m[:]).Size(); bits >= 8 {
			all = append(all, netip.PrefixFrom(netip.AddrFrom4(a), bits))
		}
	}
	return all
}

// kubeletRules is a script for nft: the node and its pods reach other networks through this machine's address, and the pods of the
// virtual nodes with their own. Of this machine they reach Services, its name servers and ping, as guests of a bridge do.
func kubeletRules(k kubeletLayout, s Settings) []byte {
	peers := []string{`"` + k.link() + `"`, `"lo"`}
	for i := range s.Nodes {
		peers = append(peers, `"`+bridgeName(k.node(s, i))+`"`)
	}
	var asked []string
	for _, a := range host.Resolvers() {
		if a.Is4() {
			asked = append(asked, a.String())
		}
	}
	var b bytes.Buffer
	_ = kubeletRulesText.Execute(&b, map[string]any{ // its fields are all here
		"Table": k.table(), "Link": k.link(), "Subnet": s.Kubelet.Subnet, "Services": serviceCIDR,
		"Peers": strings.Join(peers, ", "), "Resolvers": strings.Join(asked, ", "),
	})
	return b.Bytes()
}

var kubeletRulesText = template.Must(template.New("rules").Parse(`add table inet {{.Table}}
delete table inet {{.Table}}
table inet {{.Table}} {
	chain postrouting {
		type nat hook postrouting priority srcnat
		ip saddr {{.Subnet}} oifname != { {{.Peers}} } masquerade
	}
	chain forward {
		type filter hook forward priority filter
		iifname "{{.Link}}" ip saddr != {{.Subnet}} drop
		iifname "{{.Link}}" ip daddr 169.254.0.0/16 drop
		iifname "{{.Link}}" meta nfproto ipv6 drop
		oifname "{{.Link}}" iifname { {{.Peers}} } accept
		oifname "{{.Link}}" ct state established,related accept
		oifname "{{.Link}}" ct status dnat accept
		oifname "{{.Link}}" drop
	}
	chain input {
		type filter hook input priority filter
		iifname != "{{.Link}}" accept
		ct state established,related accept
		ip saddr != {{.Subnet}} drop
		ip protocol icmp accept
		ct status dnat ct original ip daddr {{.Services}} accept
{{- if .Resolvers}}
		ip daddr { {{.Resolvers}} } meta l4proto { tcp, udp } th dport 53 accept
{{- end}}
		drop
	}
}
`))

// applyRules makes the rules, in place of those of an earlier start.
func (k kubeletLayout) applyRules() error {
	_, err := nft("", "-f", k.rulesFile())
	return err
}

// removeRules removes the rules. It is no error if there are none.
func (k kubeletLayout) removeRules() error {
	if _, err := exec.LookPath("nft"); err != nil || !exists(k.rulesFile()) {
		return nil //nolint:nilerr // without it there are none
	}
	_, err := nft("add table inet "+k.table()+"\ndelete table inet "+k.table()+"\n", "-f", "-")
	return err
}

// alias says whose the link is.
func (k kubeletLayout) alias() string { return "cocoon " + k.folder("") }

// removeLink removes the link of the node, which the kernel does too, but later than the end of its namespaces.
func (k kubeletLayout) removeLink() error {
	l, err := host.FindLink(k.link())
	if err != nil || l == nil || l.Attrs().Alias != k.alias() {
		return err
	}
	return host.RemoveLink(l)
}

// connect makes the link between this machine and the namespace of the thread of inside.
func (k kubeletLayout) connect(s KubeletSettings, inside *spawner) error {
	var space int
	if err := inside.do(func() (err error) {
		space, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	}); err != nil {
		return fmt.Errorf("open the network namespace of node %s: %w", k.name, err)
	}
	defer unix.Close(space)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = k.link()
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(space)}); err != nil {
		return fmt.Errorf("make link %s: %w", k.link(), err)
	}
	here, err := netlink.LinkByName(k.link())
	if err != nil {
		return fmt.Errorf("find link %s: %w", k.link(), err)
	}
	if err := errors.Join(netlink.LinkSetAlias(here, k.alias()), addressed(here, s.machine())); err != nil {
		return fmt.Errorf("set up link %s: %w", k.link(), err)
	}
	if err := inside.do(func() error { return k.connectInside(s) }); err != nil {
		return fmt.Errorf("set up the network of node %s: %w", k.name, err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: here.Attrs().Index, Dst: network(s.pods()), Gw: s.node().AsSlice()}); err != nil {
		return fmt.Errorf("add the route to the pods of node %s: %w", k.name, err)
	}
	return nil
}

func (k kubeletLayout) connectInside(s KubeletSettings) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	there, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetUp(lo), addressed(there, s.node())); err != nil {
		return err
	}
	return errors.Join(
		netlink.RouteAdd(&netlink.Route{LinkIndex: there.Attrs().Index, Gw: s.machine().AsSlice()}),
		host.SetSysctl("ipv4/ip_forward", "1"))
}

// addressed gives a link one of the two addresses of the node's link, and sets it up.
func addressed(l netlink.Link, a netip.Addr) error {
	_ = host.QuietIPv6(l.Attrs().Name) // it has no address there
	return errors.Join(netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(30, 32)}}), netlink.LinkSetUp(l))
}

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}
