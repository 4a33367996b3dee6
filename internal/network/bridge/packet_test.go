package bridge

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

const testSubnet = "10.88.7.0/24"

func TestDHCP(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, DNS: []string{"9.9.9.9"}, MTU: 1400, StateDir: t.TempDir()}
	n := start(t, cfg)
	g := newGuest(t, n, "web.one")
	for name, broadcast := range map[string]bool{"unicast": false, "broadcast": true} {
		t.Run(name, func(t *testing.T) {
			lease := g.request(t, dhcpv4.WithBroadcast(broadcast))
			ack := lease.ACK
			ones, _ := ack.SubnetMask().Size()
			if ack.YourIPAddr.String() != g.nic.IP || ones != 24 || ack.Router()[0].String() != g.nic.Gateway ||
				ack.HostName() != "web-one" || ack.DNS()[0].String() != "9.9.9.9" || ack.IPAddressLeaseTime(0) != leaseTime {
				t.Errorf("leased %s", ack.Summary())
			}
		})
	}
	g.configure(g.nic.IP)
	if !g.pings(g.nic.Gateway, patience) {
		t.Error("the gateway does not answer under the leased address")
	}
	file := waitForLease(t, filepath.Join(cfg.StateDir, "leases.json"), g.nic.MAC)
	if file["ip"] != g.nic.IP {
		t.Errorf("lease file says %v", file)
	}
	if expiry, err := time.Parse(time.RFC3339, file["expiry"].(string)); err != nil || time.Until(expiry) < leaseTime-time.Minute {
		t.Errorf("expiry %v (%v)", file["expiry"], err)
	}
	if v, err := host.Sysctl("ipv6/conf/" + g.nic.Tap + "/disable_ipv6"); v != "1" && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("IPv6 of the host on the tap: disable_ipv6 is %q, %v", v, err)
	}
	if err := n.Detach(t.Context(), g.nic); err != nil {
		t.Fatal(err)
	}
	if err := n.Release(t.Context(), g.nic); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(cfg.StateDir, "leases.json")); err != nil || strings.TrimSpace(string(b)) != "[]" {
		t.Errorf("after release the lease file holds %s (%v)", b, err)
	}
}

// request gets a lease as a guest's DHCP client does.
func (g guest) request(t *testing.T, change ...dhcpv4.Modifier) *nclient4.Lease {
	t.Helper()
	var client *nclient4.Client
	g.do(func() (err error) {
		client, err = nclient4.New("eth0", nclient4.WithTimeout(time.Second), nclient4.WithRetry(5))
		return err
	})
	defer client.Close()
	lease, err := client.Request(t.Context(), change...)
	if err != nil {
		t.Fatal("dhcp:", err)
	}
	return lease
}

// waitForLease reads the file as other programs do, until it contains mac.
func waitForLease(t *testing.T, path, mac string) map[string]any {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		var leases []map[string]any
		if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &leases) == nil {
			for _, l := range leases {
				if l["mac"] == mac {
					return l
				}
			}
		}
		<-time.After(5 * time.Millisecond)
	}
	t.Fatalf("%s never held %s", path, mac)
	return nil
}

func TestGuard(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	t.Run("on", func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, NAT: true, DNS: []string{"10.88.7.1"}})
		g := newGuest(t, n, "web")
		g.configure(g.nic.IP)
		closed, _ := listen(t, "", "10.88.7.1:0")
		dns, _ := listen(t, "", "10.88.7.1:53")
		if !g.pings(g.nic.Gateway, patience) {
			t.Error("the gateway does not answer ping")
		}
		if g.dials(closed, impatience) {
			t.Error("a guest reached a TCP port of the host")
		}
		if !g.dials(dns, patience) {
			t.Error("a guest does not reach the configured DNS server")
		}
		served, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
		if !dial(t, served, patience) {
			t.Error("the host does not reach its guest")
		}
	})
	t.Run("off", func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, Unguarded: true, DNS: []string{}})
		g := newGuest(t, n, "web")
		g.configure(g.nic.IP)
		open, _ := listen(t, "", "10.88.7.1:0")
		if !g.dials(open, patience) {
			t.Error("without the guard a guest does not reach the host: the test proves nothing")
		}
	})
}

func TestMasquerade(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	far := outside(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	g := newGuest(t, n, "web")
	g.configure(g.nic.IP)
	service, peers := listen(t, far, "198.51.100.2:0")
	if !g.dials(service, patience) {
		t.Fatal("a guest does not get out")
	}
	if peer := <-peers; peer != "198.51.100.1" {
		t.Errorf("outside it is seen as %s", peer)
	}
	netns.Do(t, far, func() error {
		_, subnet, _ := net.ParseCIDR(testSubnet)
		return netlink.RouteAdd(&netlink.Route{Dst: subnet, Gw: net.ParseIP("198.51.100.1")})
	})
	served, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
	netns.Do(t, far, func() error {
		if dial(t, served, impatience) {
			t.Error("the outside reaches a guest behind NAT unasked")
		}
		return nil
	})
}

// The host masquerades as another of its addresses only what leaves it: a connection to itself must not hang when that address goes.
func TestHostMeetsItselfAsItself(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	outside(t) // its link has an address, and is older than the bridge
	start(t, Config{Subnet: testSubnet, NAT: true})
	service, peers := listen(t, "", "10.88.7.1:0")
	if !dial(t, service, patience) {
		t.Fatal("the host does not reach itself")
	}
	if peer := <-peers; peer != "10.88.7.1" {
		t.Errorf("the host sees itself as %s", peer)
	}
}

func TestGuestsMeet(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for name, isolated := range map[string]bool{"shared": false, "isolated": true} {
		t.Run(name, func(t *testing.T) {
			n := start(t, Config{Subnet: testSubnet, NAT: true, Isolation: isolated})
			a, b := newGuest(t, n, "a"), newGuest(t, n, "b")
			a.configure(a.nic.IP)
			b.configure(b.nic.IP)
			if !a.pings(a.nic.Gateway, patience) || !b.pings(b.nic.Gateway, patience) {
				t.Fatal("a guest does not reach the gateway")
			}
			within := patience
			if isolated {
				within = impatience
			}
			if got := a.pings(b.nic.IP, within); got == isolated {
				t.Errorf("ping between guests: %v", got)
			}
		})
	}
}

func TestSpoofingEndsAtTheTap(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b := newGuest(t, n, "a"), newGuest(t, n, "b")
	b.configure(b.nic.IP)
	if !b.pings(b.nic.Gateway, patience) {
		t.Fatal("an honest guest does not reach the gateway")
	}
	free := "10.88.7.200"
	a.configure(free)
	if a.pings(a.nic.Gateway, impatience) {
		t.Error("a guest speaks under an address that is not its own")
	}
	a.configure(a.nic.IP)
	a.do(func() error { return a.setMAC("02:de:ad:be:ef:00") })
	a.configure(a.nic.IP)
	if a.pings(a.nic.Gateway, impatience) {
		t.Error("a guest speaks under a MAC that is not its own")
	}
	a.do(func() error { return a.setMAC(a.nic.MAC) })
	a.configure(a.nic.IP)
	if !a.pings(a.nic.Gateway, patience) {
		t.Error("the guest did not recover with its own MAC")
	}
}

// A daemon that dies leaves a working network, and the next one adopts it without an effect on guests.
func TestRestartUnderTraffic(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	dir := t.TempDir()
	first := build(t, Config{Subnet: SubnetAuto, NAT: true, StateDir: dir})
	if err := first.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	g := newGuest(t, first, "web")
	g.configure(g.nic.IP)
	if !g.pings(g.nic.Gateway, patience) {
		t.Fatal("no answer before")
	}
	// The lease file has never contained the guest, and is now lost as well.
	_ = os.Remove(filepath.Join(dir, "leases.json"))
	second := start(t, Config{Subnet: SubnetAuto, NAT: true, StateDir: dir})
	if !g.pings(g.nic.Gateway, patience) {
		t.Error("no answer after")
	}
	if lease := g.request(t); lease.ACK.YourIPAddr.String() != g.nic.IP {
		t.Errorf("the restarted server leased %s, before %s", lease.ACK.YourIPAddr, g.nic.IP)
	}
	kept, _, err := second.Sweep(context.WithoutCancel(t.Context()), []string{g.nic.Tap}, everybody)
	if err != nil || len(kept) != 0 {
		t.Errorf("sweep removed %v (%v)", kept, err)
	}
	other, err := second.Attach(t.Context(), vm.NewID(), "web", 0, vm.NICSpec{})
	if err != nil || other.IP == g.nic.IP {
		t.Errorf("a living guest's address was given away: %+v (%v)", other, err)
	}
}
