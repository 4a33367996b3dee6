package nodewire

import (
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestPoliciesCrossTheWire(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	want := network.Policies{
		Node:    "n",
		Guests:  []network.Guest{{ID: "a", Ingress: []int{0}, Egress: []int{0, 1}}, {ID: "b"}},
		Ingress: []network.Policy{{Name: "ns/deny"}},
		Egress: []network.Policy{
			{Name: "ns/any", Rules: []network.Rule{{Anyone: true, AllPorts: true}}},
			{Name: "ns/some", Rules: []network.Rule{{
				Peers: []network.Range{{First: a, Last: a}, {First: b, Last: b}},
				Ports: []network.Port{{Protocol: network.SCTP, First: 1, Last: 65535}},
				Named: []network.Endpoint{{Addr: b, Protocol: network.UDP, Port: 53}},
			}}},
		},
	}
	raw, err := proto.Marshal(EncodePolicies(want))
	if err != nil {
		t.Fatal(err)
	}
	var m nodev1.PoliceRequest
	if err := proto.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	got := DecodePolicies(&m)
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
}

// What a client makes up must not become another address or port than it wrote.
func TestBadPolicies(t *testing.T) {
	for name, r := range map[string]*nodev1.PolicyRule{
		"short address":  {Peers: []*nodev1.AddressRange{{First: []byte{1, 2, 3}, Last: []byte{1, 2, 3}}}},
		"no address":     {Peers: []*nodev1.AddressRange{{}}},
		"large port":     {Ports: []*nodev1.PortRange{{Protocol: 6, First: 65536 + 80, Last: 65536 + 80}}},
		"large protocol": {Ports: []*nodev1.PortRange{{Protocol: 256 + 6, First: 80, Last: 80}}},
		"large endpoint": {Named: []*nodev1.NamedPort{{Addr: []byte{10, 0, 0, 1}, Protocol: 6, Port: 65536 + 80}}},
	} {
		p := DecodePolicies(&nodev1.PoliceRequest{Ingress: []*nodev1.Policy{{Rules: []*nodev1.PolicyRule{r}}}})
		if err := p.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}
