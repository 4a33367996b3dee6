package nodewire

import (
	"reflect"
	"testing"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestPluginMessages(t *testing.T) {
	roundTrip(t, EncodePublished, DecodePublished)
	roundTrip(t, EncodePublishedUsage, DecodePublishedUsage)
	type drivers struct{ All []csinode.Driver }
	roundTrip(t,
		func(d drivers) *nodev1.Drivers { return EncodeDrivers(d.All) },
		func(m *nodev1.Drivers) drivers { return drivers{DecodeDrivers(m)} })

	// The owner of a request is the one on whose behalf it is made, and not a part of the message.
	var want csinode.Request
	n := 0
	fill(t, reflect.ValueOf(&want).Elem(), &n, 0)
	owner := vm.Owner{Namespace: "prod"}
	got := DecodePublish(owner, EncodePublish(want))
	want.Owner = owner
	if d := diff.Of(want, got); d != "" {
		t.Errorf("round trip: %s", d)
	}
}
