package engine

import (
	"context"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// link is a network on which an address is taken.
type link struct {
	network.Network
	name string
}

func (l link) Name() string { return l.name }

func (l link) Attach(context.Context, vm.ID, string, int, vm.NICSpec) (vm.NIC, error) {
	return vm.NIC{}, errdefs.Existsf("MAC 02:00:00:00:00:01 belongs to VM secret/db")
}

// owned is a link with nothing but VMs and the node.
type owned struct{ link }

func (owned) OwnLink() bool { return true }

// adopted is a link that the node's owner has made.
type adopted struct{ link }

func (adopted) OwnLink() bool { return false }

// A namespace chooses hardware addresses only where no other machine can have them, and is not told whose VM has one.
func TestChosenHardwareAddresses(t *testing.T) {
	a := nics{Networks: network.Fixed{"own": owned{link{name: "own"}}, "office": adopted{link{name: "office"}}, "cni": link{name: "cni"}}, byDefault: "own"}
	const mac = "02:00:00:00:00:01"
	tenant := vm.Owner{Namespace: "prod"}
	for on, refused := range map[string]bool{"": false, "own": false, "office": true, "cni": true} {
		all := []vm.NICSpec{{Network: "cni"}, {Network: on, MAC: mac}}
		err := a.choosable(tenant, all)
		if errdefs.IsFailedPrecondition(err) != refused || err != nil && !strings.Contains(err.Error(), "interface 2") {
			t.Errorf("on %q: %v", on, err)
		}
		if err := a.choosable(vm.Owner{}, all); err != nil {
			t.Errorf("the operator on %q: %v", on, err)
		}
	}
	if err := a.choosable(tenant, []vm.NICSpec{{Network: "none", MAC: mac}}); !errdefs.IsInvalid(err) {
		t.Errorf("on no network: %v", err)
	}
	r := vm.Record{Owner: tenant, Spec: vm.Spec{NICs: []vm.NICSpec{{MAC: mac}}}}
	if _, err := a.attach(t.Context(), r, nil, true); !errdefs.IsFailedPrecondition(err) || strings.Contains(err.Error(), "secret") {
		t.Errorf("a taken address: %v", err)
	}
}
