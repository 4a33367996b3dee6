package bridge

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/radv"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func startStateful(t *testing.T, cfg Config) *Network {
	t.Helper()
	cfg.IPv6Mode = IPv6Stateful
	return start6(t, cfg)
}

// settled waits for the link-local address, the source of clients' requests.
func (g guest) settled() guest {
	g.t.Helper()
	waitFor(g.t, "the guest has a link-local address", func() bool { return slices.ContainsFunc(g.addresses6(false), netip.Addr.IsLinkLocalUnicast) })
	return g
}

// Real DHCP clients request their IPv6 address. The test reads the results from the clients' files and from the interface.
func TestClients6(t *testing.T) {
	n := startStateful(t, Config{NAT: true, DNS: []string{"9.9.9.9", "fd00:88:7::1"}, Search: []string{"pods.example", "example"}})
	for name, client := range map[string]struct {
		tool  string
		run   func(t *testing.T, g guest, tool string)
		words []string
	}{
		"dhclient": {"dhclient", dhclient6, []string{
			"reason=BOUND6", "new_max_life=86400", "new_renew=43200", "new_rebind=69120", "new_dhcp6_name_servers=fd00:88:7::1",
			"new_dhcp6_domain_search=pods.example. example.",
		}},
		"dhcpcd": {"dhcpcd", dhcpcd6, []string{
			"reason=BOUND6", "new_dhcp6_ia_na1_ia_addr1_vltime=86400", "new_dhcp6_ia_na1_t1=43200", "new_dhcp6_ia_na1_t2=69120",
			"new_dhcp6_name_servers=fd00:88:7::1", "new_dhcp6_domain_search=pods.example example",
		}},
		"systemd-networkd": {"/lib/systemd/systemd-networkd", networkd6, []string{
			"DNS=fd00:88:7::1\n", "DOMAINS=pods.example example\n", "IPV6_ADDRESS_STATE=routable",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			tool := need.Tool(t, client.tool)
			g := newGuest(t, n, "with-"+strings.ReplaceAll(name, "systemd-", "")).settled()
			client.run(t, g, tool)
			known := ""
			lacks := func(word string) bool { return !strings.Contains(known, word) }
			words := append(client.words, g.nic.IPv6)
			for deadline := time.Now().Add(patience); time.Now().Before(deadline) && slices.ContainsFunc(words, lacks); <-time.After(20 * time.Millisecond) {
				told, _ := os.ReadFile("/run/told") // the file does not exist yet
				known = fmt.Sprintf("%s\n%v", told, g.addresses6(true))
			}
			for _, w := range words {
				if lacks(w) {
					t.Errorf("%q is not in what the client was told:\n%s", w, known)
				}
			}
		})
	}
}

func dhclient6(t *testing.T, g guest, tool string) {
	t.Helper()
	private(t)
	g.run(t, tool, "-6", "-d", "-cf", "/dev/null", "-lf", "/run/leases", "-pf", "/run/pid", "-sf", script(t), "eth0")
}

func dhcpcd6(t *testing.T, g guest, tool string) {
	t.Helper()
	private(t, "/var/lib/dhcpcd")
	conf := filepath.Join(t.TempDir(), "conf")
	const text = "slaac hwaddr\nnodelay\nduid\noption dhcp6_name_servers, dhcp6_domain_search\n"
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	g.run(t, tool, "-6", "-B", "-f", conf, "-c", script(t), "eth0")
}

// networkd6 has no setting to use DHCPv6: the advertisement makes it do so. Other results of the advertisement are left out.
func networkd6(t *testing.T, g guest, tool string) {
	t.Helper()
	g.runNetworkd(t, tool, "links", "[Match]\nName=eth0\n[Network]\nIPv6AcceptRA=yes\n[IPv6AcceptRA]\nUseDNS=no\n[DHCPv6]\nUseDomains=yes\n")
}

// An address is offered, leased, renewed, confirmed, declined and released by RFC 8415. A guest makes no address of its own,
// and messages from another guest's address are dropped.
func TestConversation6(t *testing.T) {
	n := startStateful(t, Config{NAT: true, DNS: []string{"fd00:88:7::1"}})
	a, b := newGuest(t, n, "a").settled(), newGuest(t, n, "b").settled()
	if want := []string{a.nic.IPv6 + "/128"}; !slices.Equal(a.nic.Addresses, want) {
		t.Errorf("guests without a client set %v, not %v", a.nic.Addresses, want)
	}
	offer := a.asks6(dhcpv6.MessageTypeSolicit, dhcpv6.WithRequestedOptions(dhcpv6.OptionDNSRecursiveNameServer))
	if got := leased6(offer); offer == nil || got != a.nic.IPv6 || len(offer.Options.DNS()) != 1 {
		t.Fatalf("offered %s: %v", got, offer)
	}
	server := dhcpv6.WithServerID(offer.Options.ServerID())
	mine := dhcpv6.WithIANA(dhcpv6.OptIAAddress{IPv6Addr: net.ParseIP(a.nic.IPv6)})
	for kind, change := range map[dhcpv6.MessageType][]dhcpv6.Modifier{
		dhcpv6.MessageTypeRequest: {server, mine}, dhcpv6.MessageTypeRenew: {server, mine}, dhcpv6.MessageTypeRebind: {mine},
	} {
		if got := leased6(a.asks6(kind, change...)); got != a.nic.IPv6 {
			t.Errorf("%s is answered with %s", kind, got)
		}
	}
	if quick := a.asks6(dhcpv6.MessageTypeSolicit, dhcpv6.WithRapidCommit); quick == nil || quick.MessageType != dhcpv6.MessageTypeReply || leased6(quick) != a.nic.IPv6 {
		t.Errorf("rapid commit: %v", quick)
	}
	if again := a.asks6(dhcpv6.MessageTypeConfirm, mine); again == nil || again.Options.Status().StatusCode != iana.StatusSuccess {
		t.Errorf("confirm: %v", again)
	}
	if moved := b.asks6(dhcpv6.MessageTypeConfirm, mine); moved == nil || moved.Options.Status().StatusCode != iana.StatusNotOnLink {
		t.Errorf("confirm of another's: %v", moved)
	}
	if made := a.addresses6(true); slices.ContainsFunc(made, netip.MustParsePrefix(testSubnet6).Contains) {
		t.Errorf("the guest made an address itself: %v", made)
	}

	// b sends from a's link-local address and declines a's address: its tap drops that.
	heard := n.DHCPv6Messages()
	b.add6(radv.Address(radv.LinkLocal, macOf(t, a.nic)).String() + "/64")
	forged := message6(t, b.nic, dhcpv6.MessageTypeDecline, server, mine).ToBytes()
	b.says6(radv.Address(radv.LinkLocal, macOf(t, a.nic)), forged, 0)
	b.says6(radv.Address(radv.LinkLocal, macOf(t, b.nic)), []byte("noise"), 0)
	waitFor(t, "b's noise is heard", func() bool { return n.DHCPv6Messages()["ignored"] == heard["ignored"]+1 })
	if heard := n.DHCPv6Messages(); heard["declined"] != 0 {
		t.Errorf("a guest spoke for another: %v", heard)
	}
	for _, kind := range []dhcpv6.MessageType{dhcpv6.MessageTypeDecline, dhcpv6.MessageTypeRelease} {
		if done := a.asks6(kind, server, mine); done == nil || done.Options.Status().StatusCode != iana.StatusSuccess {
			t.Errorf("%s: %v", kind, done)
		}
	}
	if heard := n.DHCPv6Messages(); heard["declined"] != 1 || heard["released"] != 1 {
		t.Errorf("heard %v", heard)
	}

	a.add6(a.nic.IPv6 + "/128")
	if !a.pings("fd00:88:7::1", patience) {
		t.Error("the router does not answer under the leased address")
	}
}

// Without the mode, guests that are not masqueraded get no answer.
func TestSLAACHasNoDHCPv6(t *testing.T) {
	n := start6(t, Config{NAT: true})
	g := newGuest(t, n, "a").joined().settled()
	if len(g.nic.Addresses) != 0 {
		t.Errorf("the guest is to set %v", g.nic.Addresses)
	}
	solicit := message6(t, g.nic, dhcpv6.MessageTypeSolicit).ToBytes()
	if m := g.says6(radv.Address(radv.LinkLocal, macOf(t, g.nic)), solicit, impatience); m != nil {
		t.Errorf("answered: %v", m)
	}
}

func macOf(t *testing.T, nic vm.NIC) net.HardwareAddr {
	t.Helper()
	mac, err := net.ParseMAC(nic.MAC)
	if err != nil {
		t.Fatal(err)
	}
	return mac
}

// leased6 returns the address in a message, "" if there is none.
func leased6(m *dhcpv6.Message) string {
	if m == nil || m.Options.OneIANA() == nil || m.Options.OneIANA().Options.OneAddress() == nil {
		return ""
	}
	return m.Options.OneIANA().Options.OneAddress().IPv6Addr.String()
}

func message6(t *testing.T, of vm.NIC, kind dhcpv6.MessageType, change ...dhcpv6.Modifier) *dhcpv6.Message {
	t.Helper()
	change = append([]dhcpv6.Modifier{dhcpv6.WithIAID([4]byte{1}), dhcpv6.WithClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: macOf(t, of)})}, change...)
	m, err := dhcpv6.NewMessage(change...)
	if err != nil {
		t.Fatal(err)
	}
	m.MessageType = kind
	return m
}

// asks6 sends a message and returns the answer; nil if there is none.
func (g guest) asks6(kind dhcpv6.MessageType, change ...dhcpv6.Modifier) *dhcpv6.Message {
	g.t.Helper()
	m := message6(g.t, g.nic, kind, change...)
	return g.says6(radv.Address(radv.LinkLocal, macOf(g.t, g.nic)), m.ToBytes(), patience)
}

// says6 sends a payload to DHCPv6 servers from one of the guest's addresses, and returns the answer.
func (g guest) says6(from netip.Addr, payload []byte, within time.Duration) (answer *dhcpv6.Message) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		zone := strconv.Itoa(eth0.Attrs().Index) // package net caches link names of another namespace
		c, err := net.ListenUDP("udp6", &net.UDPAddr{IP: from.AsSlice(), Port: dhcpv6.DefaultClientPort, Zone: zone})
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.WriteTo(payload, &net.UDPAddr{IP: dhcp.AllServers.AsSlice(), Port: dhcpv6.DefaultServerPort, Zone: zone}); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
			return err
		}
		buf := make([]byte, 1500)
		size, _, err := c.ReadFrom(buf)
		if err != nil {
			return nil // no answer
		}
		answer, err = dhcpv6.MessageFromBytes(buf[:size])
		return err
	})
	return answer
}
