//go:build os

package appliance

import (
	"encoding/json"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// TestMain runs the tests in a network of their own.
func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// leases has one address, for whoever asks.
type leases struct{ addr netip.Addr }

func (l leases) Lookup(net.HardwareAddr) (dhcp.Reservation, bool) {
	return dhcp.Reservation{IP: l.addr}, true
}

func (leases) Answered(dhcp.Answer) {}

// lab makes a link of this machine to which another one can be connected, with a DHCP server that gives it an address.
func lab(t *testing.T, name string, own netip.Prefix, other netip.Addr) {
	t.Helper()
	link := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TAP}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	if err := netlink.AddrAdd(link, must(netlink.ParseAddr(own.String()))); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	socket := must(dhcp.Listen(name))
	go func() {
		_ = dhcp.Serve(t.Context(), socket, dhcp.Config{Server: own.Addr(), Prefix: own, Router: own.Addr(), LeaseTime: time.Hour}, leases{other}, slog.New(slog.DiscardHandler))
	}()
}

// A machine that somebody connects to a network is found there by multicast DNS, with the fingerprint that its console shows, and adopted. It is found again
// as the machine of that context.
func TestDiscover(t *testing.T) {
	netns.Require(t)
	lab(t, "lab0", netip.MustParsePrefix("192.0.2.1/24"), netip.MustParseAddr("192.0.2.77"))
	m, cmd := firmwareWith(t, disk(t), true, "tap,ifname=lab0,script=no,downscript=no")
	o := &operator{t: t, m: m, dir: t.TempDir()}
	var found []struct {
		ID          string `json:"short_id"`
		Addr        string `json:"addr"`
		Fingerprint string `json:"fingerprint"`
		Adopted     bool   `json:"adopted"`
	}
	o.wait("the machine is found", func() bool {
		out, err := o.try("discover", "--unadopted", "--json")
		if err != nil || json.Unmarshal([]byte(out), &found) != nil {
			t.Fatalf("discover: %v\n%s", err, out)
		}
		return len(found) == 1 && found[0].Fingerprint != ""
	})
	t.Logf("%s from power on to discovered", time.Since(m.begin).Round(time.Second))
	if found[0].Addr != "192.0.2.77:50000" || found[0].Adopted {
		t.Errorf("discovered: %+v", found[0])
	}
	m.wait(m.serial, "192.0.2.77:50000")
	m.wait(m.serial, append([]string{"nobody has adopted it"}, strings.Fields(capsulewire.FingerprintRows(found[0].Fingerprint))...)...)
	o.do("adopt", "--capsule", found[0].Addr, "--name", "box", "--yes")
	o.until("context box", "discover")
	if out := o.do("discover", "--unadopted"); strings.Contains(out, found[0].ID) {
		t.Errorf("after the adoption:\n%s", out)
	}
	o.until("192.0.2.77", "network", "get")
	m.off(cmd)
}
