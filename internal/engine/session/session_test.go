package session

import (
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest is told its own names, those that only it knows, and its name servers.
func TestNamesOfAGuest(t *testing.T) {
	r := vm.Record{
		Spec: vm.Spec{Hostname: "web", Domain: "svc-1.ns", Hosts: []vm.HostEntry{{IP: "10.0.0.9", Names: []string{"db", "data"}}}},
		NICs: []vm.NIC{{IP: "10.0.0.2", DNS: []string{"10.0.0.1"}}, {DNS: []string{"10.0.1.1"}}},
	}
	for name, tc := range map[string]struct {
		dns      *vm.DNS
		servers  [][]string
		resolver []string
	}{
		"of the networks": {nil, [][]string{{"10.0.0.1"}, {"10.0.1.1"}}, nil},
		"more":            {&vm.DNS{Servers: []string{"9.9.9.9"}, Searches: []string{"a", "b"}}, [][]string{{"10.0.0.1"}, {"10.0.1.1", "9.9.9.9"}}, []string{"search a b"}},
		"its own":         {&vm.DNS{Own: true, Servers: []string{"9.9.9.9"}}, [][]string{nil, {"9.9.9.9"}}, nil},
	} {
		r.Spec.DNS = tc.dns
		s := setupOf(r)
		var servers [][]string
		for _, n := range s.NICs {
			servers = append(servers, n.DNS)
		}
		if d := diff.Of(tc.servers, servers) + diff.Of(tc.resolver, s.Resolver) + diff.Of([]string{"10.0.0.2 web.svc-1.ns web", "10.0.0.9\tdb\tdata"}, s.Hosts); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	if len(r.NICs[1].DNS) != 1 {
		t.Error("the record was changed")
	}
}
