package nodewire

import (
	"testing"

	"google.golang.org/grpc/metadata"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestBehalfTravels(t *testing.T) {
	for _, who := range []vm.Owner{{}, {Namespace: "prod"}, {Namespace: "prod", PodUID: "p", SetUID: "s"}} {
		sent, err := SendBehalf(vm.OnBehalf(t.Context(), who))
		if err != nil {
			t.Fatal(err)
		}
		md, _ := metadata.FromOutgoingContext(sent)
		got, err := TakeBehalf(metadata.NewIncomingContext(t.Context(), md))
		if err != nil || vm.Behalf(got) != who {
			t.Errorf("on behalf of %+v: %v, %s", who, err, diff.Of(who, vm.Behalf(got)))
		}
	}
}

// TestUnclearBehalf expects an error: a caller that means to be an owner must not become the operator.
func TestUnclearBehalf(t *testing.T) {
	for _, md := range []metadata.MD{
		metadata.Pairs(behalfKey, ""),
		metadata.Pairs(behalfKey, "\xff\xff"),
		metadata.Pairs(behalfKey, "\x0a\x04prod", behalfKey, "\x0a\x03dev"),
	} {
		if _, err := TakeBehalf(metadata.NewIncomingContext(t.Context(), md)); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", md, err)
		}
	}
}
