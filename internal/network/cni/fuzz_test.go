package cni

import (
	"net/netip"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// FuzzResult reads possible results of plugins, of all versions of CNI. The values taken from them must be well formed, and
// plan must close and open networks correctly.
func FuzzResult(f *testing.F) {
	for _, seed := range []string{
		`{"cniVersion":"1.0.0","interfaces":[{"name":"br0","mac":"1e:73:c0:a2:5f:aa"},{"name":"veth1","mac":"1e:73:c0:a2:5f:ab"},{"name":"eth0","mac":"be:f0:5c:89:23:b5","sandbox":"/run/netns/x"}],
		  "ips":[{"interface":2,"address":"10.124.0.2/24","gateway":"10.124.0.1"}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{}}`,
		`{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mtu":1400}],"ips":[{"interface":0,"address":"fd00::2/64","gateway":"fe80::1"},{"address":"10.1.0.2/24"}],
		  "routes":[{"dst":"::/0","gw":"fe80::1"},{"dst":"10.9.0.0/16","gw":"10.1.0.9","mtu":1400,"scope":0}],"dns":{"nameservers":["10.1.0.53","fd00::53","here"],"search":["example"]}}`,
		`{"cniVersion":"0.4.0","ips":[{"version":"4","interface":0,"address":"10.1.0.2/24","gateway":"10.1.0.1"}],"interfaces":[{"name":"eth0"}]}`,
		`{"cniVersion":"0.2.0","ip4":{"ip":"10.1.2.3/24","gateway":"10.1.2.1","routes":[{"dst":"15.5.6.0/24","gw":"15.5.6.8"}]},"ip6":{"ip":"abcd:1234:ffff::cdde/64"}}`,
		`{"cniVersion":"1.0.0","interfaces":[null],"ips":[null,{"interface":0,"address":"10.1.0.2/24"},{"interface":-1,"address":"10.1.0.2/24"}],"routes":[null]}`,
		`{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1"}],"routes":[null,{"dst":"::ffff:10.0.0.0/104","gw":"10.1.0.1"}]}`,
		`{"cniVersion":"1.0.0","ips":[{"address":"::ffff:10.1.0.2/120"},{"address":"::/0"},{"address":"0.0.0.0/0","gateway":"::ffff:1.2.3.4"}],"routes":[{"dst":"::ffff:10.0.0.0/104"}]}`,
		`{"cniVersion":"1.0.0"}`, `{}`, `{"cniVersion":"9.9.9"}`,
	} {
		f.Add([]byte(seed))
	}
	closed, err := network.NewClosed([]string{"10.0.0.0/8"}, []string{"10.9.9.9"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		raw, err := create.CreateFromBytes(answer)
		if err != nil {
			return
		}
		res, err := types100.NewResultFromResult(raw)
		if err != nil {
			return
		}
		var nic vm.NIC
		fill(&nic, "eth0", res)
		check(t, nic)
		for _, m := range plan(closed, nic) {
			if len(m.keys) == 0 || len(m.keys) > 7 {
				t.Errorf("a filter of %d keys: %+v", len(m.keys), m)
			}
		}
	})
}

// check fails if no guest could be configured like this.
func check(t *testing.T, nic vm.NIC) {
	t.Helper()
	addr := func(what, s string) netip.Addr {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Is4In6() {
			t.Errorf("%s is %q", what, s)
		}
		return a
	}
	if nic.IP != "" {
		if ip := addr("the address", nic.IP); nic.Prefix < 0 || nic.Prefix > ip.BitLen() {
			t.Errorf("%s has %d bits", nic.IP, nic.Prefix)
		}
	}
	if nic.Gateway != "" {
		addr("the gateway", nic.Gateway)
	}
	if nic.IPv6 != "" && !addr("the IPv6 address", nic.IPv6).Is6() {
		t.Errorf("the IPv6 address is %q", nic.IPv6)
	}
	for _, d := range nic.DNS {
		if _, err := netip.ParseAddr(d); err != nil {
			t.Errorf("a name server is %q", d)
		}
	}
	for _, p := range nic.Addresses {
		if _, err := netip.ParsePrefix(p); err != nil {
			t.Errorf("an address is %q", p)
		}
	}
	for _, r := range nic.Routes {
		to, err := netip.ParsePrefix(r.To)
		if via := addr("a way", r.Via); err != nil || to.Addr().Is6() != via.Is6() {
			t.Errorf("a route is %+v", r)
		}
	}
}
