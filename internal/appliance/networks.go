package appliance

import (
	"context"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc/peer"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Uplink is the machine's own network.
type Uplink interface {
	// Get describes it.
	Get(ctx context.Context) (*capsulev1.NetworkGetResponse, error)
	// Set tries a configuration until it is confirmed or within is over; 0 is the default. If dry, it only checks it.
	Set(ctx context.Context, c *capsulev1.NetworkConfig, within time.Duration, dry bool) (*capsulev1.NetworkSetResponse, error)
	// Confirm keeps what is tried. at is the address of the machine by which the caller came.
	Confirm(ctx context.Context, at netip.Addr) (*capsulev1.NetworkConfirmResponse, error)
}

// uplinks implements NetworkService.
type uplinks struct {
	capsulev1.UnimplementedNetworkServiceServer
	door *Door
}

// uplink returns the network. Errors: FailedPrecondition on another system than Cocoon OS.
func (u *uplinks) uplink() (Uplink, error) {
	if u.door.deps.Uplink == nil {
		return nil, errdefs.Preconditionf("this machine runs another operating system than Cocoon's own, which has its network; configure it by its own means")
	}
	return u.door.deps.Uplink, nil
}

// Get implements capsulev1.NetworkServiceServer.
func (u *uplinks) Get(ctx context.Context, _ *capsulev1.NetworkGetRequest) (*capsulev1.NetworkGetResponse, error) {
	n, err := u.uplink()
	if err != nil {
		return nil, err
	}
	return n.Get(ctx)
}

// Set implements capsulev1.NetworkServiceServer.
func (u *uplinks) Set(ctx context.Context, req *capsulev1.NetworkSetRequest) (*capsulev1.NetworkSetResponse, error) {
	n, err := u.uplink()
	switch {
	case err != nil:
		return nil, err
	case req.GetConfig() == nil:
		return nil, errdefs.Invalidf("there is no configuration; an empty one means DHCP on the first link")
	}
	if f := req.GetConfig().ProtoReflect().GetUnknown(); len(f) > 0 {
		return nil, errdefs.Invalidf("the configuration has fields that this machine does not know; update the machine, or use an older capsulectl")
	}
	return n.Set(ctx, req.GetConfig(), time.Duration(req.GetConfirmWithinSeconds())*time.Second, req.GetDryRun())
}

// Confirm implements capsulev1.NetworkServiceServer.
func (u *uplinks) Confirm(ctx context.Context, _ *capsulev1.NetworkConfirmRequest) (*capsulev1.NetworkConfirmResponse, error) {
	n, err := u.uplink()
	if err != nil {
		return nil, err
	}
	var at netip.Addr
	if p, ok := peer.FromContext(ctx); ok {
		if a, isTCP := p.LocalAddr.(*net.TCPAddr); isTCP {
			at = a.AddrPort().Addr()
		}
	}
	return n.Confirm(ctx, at)
}
