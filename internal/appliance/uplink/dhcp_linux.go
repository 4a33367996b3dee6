package uplink

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	clientIDFile = "dhcp-clientid"
	addressFile  = "dhcp-address"
	minRenewal   = 10 * time.Second // between two renewals, whatever a server says
)

// lease gets a lease, uses it, and renews it until that fails or ctx ends.
func (u *use) lease(ctx context.Context) error {
	name := u.link.Attrs().Name
	if l, err := netlink.LinkByName(name); err == nil && l.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
		return errdefs.Unavailablef("link %s has no carrier", name)
	}
	// What the link had before is not part of this configuration, unless the server gives it again. IPv6 need not wait for the server.
	if err := assign(u.link, u.before(), u.config.GetIpv6().GetMethod()); err != nil {
		return err
	}
	client, err := nclient4.New(name, nclient4.WithTimeout(3*time.Second), nclient4.WithRetry(4))
	if err != nil {
		return fmt.Errorf("ask for an address on %s: %w", name, err)
	}
	defer client.Close()
	wishes, err := leaseOptions(u.host.Dir)
	if err != nil { // the address may be another one after the next start
		u.host.Log.Warn("no stable client id", "err", err)
	}
	lease, err := client.Request(ctx, wishes...)
	for err == nil {
		if err := u.useLease(lease.ACK); err != nil {
			return err
		}
		half := max(lease.ACK.IPAddressLeaseTime(time.Hour)/2, minRenewal)
		if err := u.wait(ctx, half); err != nil {
			return err
		}
		if lease, err = client.Renew(ctx, lease, wishes[:min(2, len(wishes))]...); err != nil {
			lease, err = client.Request(ctx, wishes...)
		}
	}
	return fmt.Errorf("ask for an address on %s: %w", name, err)
}

// before returns what the link keeps until there is a lease: the static part, and the address of the last lease, if it still has that.
func (u *use) before() given {
	g := fixed(u.config)
	last, ok := lastAddress(u.host.Dir)
	all, err := netlink.AddrList(u.link, netlink.FAMILY_V4)
	if !ok || err != nil {
		return g
	}
	for _, a := range all {
		if p, ok := prefix(a.IPNet); ok && p.Addr() == last {
			g.addresses = append(g.addresses, p)
			if old, err := netlink.RouteList(u.link, netlink.FAMILY_V4); err == nil {
				for _, r := range old {
					if gw, ok := netip.AddrFromSlice(r.Gw.To4()); ok && p.Contains(gw) {
						g.gateways = append(g.gateways, gw)
					}
				}
			}
		}
	}
	return g
}

// useLease uses what a server gives.
func (u *use) useLease(ack *dhcpv4.DHCPv4) error {
	ones, bits := ack.SubnetMask().Size()
	ip, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	if !ok || bits != 32 || ones == 0 || !usable(ip) {
		return errdefs.Invalidf("the DHCP server's answer has no address with a mask")
	}
	if err := u.set(dynamic(u.config, netip.PrefixFrom(ip, ones), addrs(ack.Router())), texts(ack.DNS()), texts(ack.NTPServers())); err != nil {
		return err
	}
	if err := atomicfile.WriteFile(filepath.Join(u.host.Dir, addressFile), []byte(ip.String()+"\n"), 0o600); err != nil {
		u.host.Log.Warn("the address is not kept for the next start", "err", err)
	}
	return nil
}

func addrs(ips []net.IP) (out []netip.Addr) {
	for _, ip := range ips {
		if a, ok := netip.AddrFromSlice(ip.To4()); ok && usable(a) {
			out = append(out, a)
		}
	}
	return out
}

func texts(ips []net.IP) (out []string) {
	for _, a := range addrs(ips) {
		out = append(out, a.String())
	}
	return out
}

func lastAddress(dir string) (netip.Addr, bool) {
	text, err := os.ReadFile(filepath.Join(dir, addressFile))
	if err != nil {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(strings.TrimSpace(string(text)))
	return a, err == nil && a.Is4()
}

// leaseOptions returns what is asked for: by the id in dir, which is made once, so that both slots get the same address; and the address
// of last time.
func leaseOptions(dir string) ([]dhcpv4.Modifier, error) {
	path := filepath.Join(dir, clientIDFile)
	text, err := os.ReadFile(path)
	id, bad := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil || bad != nil || len(id) < 2 {
		id = make([]byte, 19) // an identifier of our own kind, as RFC 2132 has it: type 0
		if _, err := rand.Read(id[1:]); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, err
		}
		if err := atomicfile.WriteFile(path, []byte(hex.EncodeToString(id)+"\n"), 0o600); err != nil {
			return nil, err
		}
	}
	wishes := []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptClientIdentifier(id)), dhcpv4.WithRequestedOptions(dhcpv4.OptionNTPServers)}
	if last, ok := lastAddress(dir); ok {
		wishes = append(wishes, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(last.AsSlice())))
	}
	return wishes, nil
}
