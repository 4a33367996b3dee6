package vkcocoon

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodewire"
)

type described struct {
	networks []nodewire.Network
	drivers  []nodewire.Driver
	err      error
}

func (d described) Info(context.Context) (nodewire.NodeInfo, error) {
	return nodewire.NodeInfo{NetworkDetails: d.networks, Drivers: d.drivers}, d.err
}

func (described) Police(context.Context, network.Policies) error { return nil }

func TestUnpoliced(t *testing.T) {
	for name, tt := range map[string]struct {
		networks []nodewire.Network
		want     string
	}{
		"a bridge":          {[]nodewire.Network{{Name: "default", Polices: true}}, ""},
		"a bridge and CNI":  {[]nodewire.Network{{Name: "lab", Unpoliced: "the plugins"}, {Name: "default", Polices: true}}, ""},
		"switched":          {[]nodewire.Network{{Name: "default", Unpoliced: "switched"}, {Name: "lab", Unpoliced: "the plugins"}}, "switched"},
		"an earlier daemon": {[]nodewire.Network{{Name: "default"}}, "cocoond is older than this node"},
		"no network":        {nil, "VMs of this node have no network"},
	} {
		if got, err := unpoliced(t.Context(), described{networks: tt.networks}); got != tt.want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := unpoliced(t.Context(), described{err: errdefs.Unavailablef("away")}); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
}

// TestStandIn: what stands in for a hypervisor that the node lacks is its default one.
func TestStandIn(t *testing.T) {
	type runtime struct {
		Runtime
		described
	}
	n := &Node{runtime: runtime{described: described{drivers: []nodewire.Driver{{Name: "cloud-hypervisor"}, {Name: "firecracker", Default: true}, {Name: "qemu"}}}}}
	if got, err := n.standIn()(t.Context()); got != "firecracker" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	n.runtime = runtime{described: described{err: errdefs.Unavailablef("away")}}
	if _, err := n.standIn()(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
	n.runtime = struct{ Runtime }{}
	if n.standIn() != nil {
		t.Error("a runtime that tells nothing has a stand-in")
	}
}
