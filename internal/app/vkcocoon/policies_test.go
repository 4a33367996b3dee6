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
	err      error
}

func (d described) Info(context.Context) (nodewire.NodeInfo, error) {
	return nodewire.NodeInfo{NetworkDetails: d.networks}, d.err
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
