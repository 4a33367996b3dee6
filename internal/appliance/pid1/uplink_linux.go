package pid1

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	linkPatience = 15 * time.Second // for a link with a carrier
	clientIDFile = "dhcp-clientid"
	addressFile  = "dhcp-address"
)

// firstLink returns the first Ethernet link of hardware, one with a carrier if there is one.
func firstLink() (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the links: %w", err)
	}
	links = slices.DeleteFunc(links, func(l netlink.Link) bool {
		_, err := os.Stat(filepath.Join("/sys/class/net", l.Attrs().Name, "device"))
		return err != nil || l.Attrs().EncapType != "ether"
	})
	slices.SortFunc(links, func(a, b netlink.Link) int { return strings.Compare(a.Attrs().Name, b.Attrs().Name) })
	for _, l := range links {
		if l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
			return l, nil
		}
	}
	if len(links) == 0 {
		return nil, errdefs.NotFoundf("the machine has no Ethernet link")
	}
	return links[0], nil
}

// uplink gives the first link the address that a DHCP server leases, and keeps the lease, until ctx ends.
func (m *machine) uplink(ctx context.Context) {
	delays := delays()
	for ctx.Err() == nil {
		link, err := waitLink(ctx)
		if err == nil {
			err = m.lease(ctx, link, delays.Reset)
		}
		if ctx.Err() != nil {
			return
		}
		delay := delays.NextBackOff()
		m.log.Warn("no address yet", "err", err, "again", delay)
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// waitLink sets the first link up and waits for its carrier.
func waitLink(ctx context.Context) (netlink.Link, error) {
	ctx, stop := context.WithTimeout(ctx, linkPatience)
	defer stop()
	every := backoff.NewConstantBackOff(200 * time.Millisecond)
	return backoff.Retry(ctx, func() (netlink.Link, error) {
		link, err := firstLink()
		if err != nil {
			return nil, err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return nil, fmt.Errorf("set link %s up: %w", link.Attrs().Name, err)
		}
		if link.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
			return nil, errdefs.Unavailablef("link %s has no carrier", link.Attrs().Name)
		}
		return link, nil
	}, backoff.WithBackOff(every))
}

// lease gets a lease, uses it, and renews it until that fails or ctx ends. It calls got for each.
func (m *machine) lease(ctx context.Context, link netlink.Link, got func()) error {
	name := link.Attrs().Name
	client, err := nclient4.New(name, nclient4.WithTimeout(3*time.Second), nclient4.WithRetry(4))
	if err != nil {
		return fmt.Errorf("ask for an address on %s: %w", name, err)
	}
	defer client.Close()
	wishes, err := leaseOptions(ownDir)
	if err != nil { // the address may be another one after the next start
		m.log.Warn("no stable client id", "err", err)
	}
	lease, err := client.Request(ctx, wishes...)
	for err == nil {
		got()
		if err := m.use(link, lease.ACK); err != nil {
			return err
		}
		half := max(lease.ACK.IPAddressLeaseTime(time.Hour)/2, 10*time.Second)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(half):
		}
		if lease, err = client.Renew(ctx, lease, wishes[:min(1, len(wishes))]...); err != nil {
			lease, err = client.Request(ctx, wishes...)
		}
	}
	return fmt.Errorf("ask for an address on %s: %w", name, err)
}

// leaseOptions returns what is asked for: by the id in dir, which is made once, so that both slots get the same address; and the address of last time.
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
		if err := os.WriteFile(path, []byte(hex.EncodeToString(id)+"\n"), 0o600); err != nil {
			return nil, err
		}
	}
	wishes := []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptClientIdentifier(id))}
	if text, err := os.ReadFile(filepath.Join(dir, addressFile)); err == nil {
		if ip := net.ParseIP(strings.TrimSpace(string(text))).To4(); ip != nil {
			wishes = append(wishes, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ip)))
		}
	}
	return wishes, nil
}

// use gives the link the address of a lease, and the machine its routes and name servers.
func (m *machine) use(link netlink.Link, ack *dhcpv4.DHCPv4) error {
	ip, mask := ack.YourIPAddr.To4(), ack.SubnetMask()
	if ip == nil || mask == nil {
		return errdefs.Invalidf("the DHCP server's answer has no address with a mask")
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: mask}}
	old, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", link.Attrs().Name, err)
	}
	if err := netlink.AddrReplace(link, address); err != nil {
		return fmt.Errorf("give %s the address %s: %w", link.Attrs().Name, address.IPNet, err)
	}
	known := false
	for _, a := range old {
		if a.IP.Equal(ip) {
			known = true
		} else if err := netlink.AddrDel(link, &a); err != nil {
			m.log.Warn("an old address stays", "address", a.IP.String(), "err", err)
		}
	}
	var errs []error
	if routers := ack.Router(); len(routers) > 0 {
		errs = append(errs, netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: routers[0]}))
	}
	var conf strings.Builder
	for _, server := range ack.DNS() {
		fmt.Fprintf(&conf, "nameserver %s\n", server)
	}
	errs = append(errs, os.WriteFile("/etc/resolv.conf", []byte(conf.String()), 0o644))
	if err := os.WriteFile(filepath.Join(ownDir, addressFile), []byte(ip.String()+"\n"), 0o600); err != nil {
		m.log.Warn("the address is not kept for the next start", "err", err)
	}
	if !known {
		m.banner(ip)
	}
	return errors.Join(errs...)
}

// banner tells people at the console where the machine is.
func (m *machine) banner(ip net.IP) {
	host, _ := os.Hostname()
	what := fmt.Sprintf("slot %s", m.boot.Slot)
	if m.installer {
		what = "installer"
	}
	fmt.Fprintf(m.console, "\n  Cocoon OS %s, %s\n  %s at %s\n\n", m.cfg.Version, what, host, net.JoinHostPort(ip.String(), fmt.Sprint(m.cfg.Port)))
}
