package nodewire

import (
	"context"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// behalfKey is the metadata key of the Owner on whose behalf a request is made.
const behalfKey = "cocoon-on-behalf-bin"

// EncodeOwner returns o as a message, nil for the operator.
func EncodeOwner(o vm.Owner) *nodev1.Owner {
	if o == (vm.Owner{}) {
		return nil
	}
	return &nodev1.Owner{Namespace: o.Namespace, PodUid: o.PodUID, SetUid: o.SetUID}
}

// DecodeOwner returns the owner in m.
func DecodeOwner(m *nodev1.Owner) vm.Owner {
	return vm.Owner{Namespace: m.GetNamespace(), PodUID: m.GetPodUid(), SetUID: m.GetSetUid()}
}

// SendBehalf returns a context whose calls carry the Owner on whose behalf they are made.
func SendBehalf(ctx context.Context) (context.Context, error) {
	who := vm.Behalf(ctx)
	if who.Operator() {
		return ctx, nil
	}
	raw, err := proto.Marshal(EncodeOwner(who))
	if err != nil {
		return nil, errdefs.Invalidf("namespace %q cannot be sent: %w", who.Namespace, err)
	}
	return metadata.AppendToOutgoingContext(ctx, behalfKey, string(raw)), nil
}

// TakeBehalf returns the context of a call with the Owner on whose behalf it was made. An unreadable value is an error:
// no caller may become the operator by mistake.
func TakeBehalf(ctx context.Context) (context.Context, error) {
	values := metadata.ValueFromIncomingContext(ctx, behalfKey)
	if len(values) == 0 {
		return ctx, nil
	}
	var m nodev1.Owner
	if err := proto.Unmarshal([]byte(values[0]), &m); err != nil || len(values) > 1 || m.GetNamespace() == "" {
		return nil, errdefs.Invalidf("the call does not say clearly on whose behalf it is made")
	}
	return vm.OnBehalf(ctx, DecodeOwner(&m)), nil
}
