package agent

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.Resumer     = (*session)(nil)
	_ guest.Freezer     = (*session)(nil)
	_ guest.Settler     = (*session)(nil)
	_ guest.ClockSetter = (*session)(nil)
)

// Resumed implements guest.Resumer.
func (s *session) Resumed(ctx context.Context, g guest.Resumed) (guest.ResumedReply, error) {
	r := &guestv1.ResumedRequest{
		NowUnixNano: g.Now.UnixNano(), Entropy: g.Entropy, Hostname: g.Hostname, Nics: nics(g.NICs), Hosts: g.Hosts, Resolver: g.Resolver,
		Storage: g.Storage,
	}
	if g.Now.IsZero() { // a zero time has no Unix time
		r.NowUnixNano = 0
	}
	if c := g.Clone; c != nil {
		r.Clone = &guestv1.CloneIdentity{Macs: c.MACs, MachineId: c.MachineID, SshHostKeys: c.SSHHostKeys}
	}
	reply, err := s.resumed(ctx, r)
	if err != nil {
		return guest.ResumedReply{}, s.failure(ctx, "give the resumed guest its identity", err)
	}
	return resumedOf(reply), nil
}

// resumed uses a plain message if nothing was sent in the session yet. In a guest that was just resumed and whose
// instructions are emulated, the first gRPC call alone takes as long as all the work requested here.
func (s *session) resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedReply, error) {
	request, err := proto.MarshalOptions{}.MarshalAppend([]byte{link.PlainResumed}, r)
	if err != nil {
		return nil, errdefs.Invalidf("the request cannot be sent: %w", err)
	}
	defer clear(request) // it contains entropy
	if len(request) > link.MaxPlain {
		return s.client.Resumed(ctx, r)
	}
	select {
	case <-s.plain:
		defer func() { s.plain <- struct{}{} }()
	default:
		return s.client.Resumed(ctx, r)
	}
	reply, err := s.ask(ctx, request)
	if _, refused := status.FromError(err); !refused { // what the next read would return is unknown
		_ = s.stream.Close()
	}
	return reply, err
}

// ask sends the Resumed request as a plain message. The error is a status when the guest has answered.
func (s *session) ask(ctx context.Context, request []byte) (*guestv1.ResumedReply, error) {
	stop := context.AfterFunc(ctx, func() { _ = s.stream.SetDeadline(time.Unix(1, 0)) })
	answer, err := link.Ask(s.stream, request)
	switch {
	case !stop():
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, errdefs.Unavailablef("the link to the guest was lost: %w", err)
	case len(answer) > 0 && answer[0] == link.PlainAnswer:
		reply := &guestv1.ResumedReply{}
		if err := proto.Unmarshal(answer[1:], reply); err == nil {
			return reply, nil
		}
	case len(answer) > 1 && answer[0] == link.PlainRefusal && answer[1] != byte(codes.OK):
		return nil, status.Error(codes.Code(answer[1]), string(answer[2:]))
	}
	return nil, errdefs.Unavailablef("the guest's answer cannot be read")
}

// Settle implements guest.Settler.
func (s *session) Settle(ctx context.Context) error {
	_, err := s.client.Settle(ctx, &guestv1.SettleRequest{})
	return s.failure(ctx, "prepare the guest for the save", err)
}

// SetClock implements guest.ClockSetter.
func (s *session) SetClock(ctx context.Context, now time.Time) error {
	_, err := s.client.SetClock(ctx, &guestv1.SetClockRequest{NowUnixNano: now.UnixNano()})
	return s.failure(ctx, "set the guest's clock", err)
}

// Freeze implements guest.Freezer.
func (s *session) Freeze(ctx context.Context) (int, error) {
	reply, err := s.client.Freeze(ctx, &guestv1.FreezeRequest{})
	if err != nil {
		return 0, s.failure(ctx, "freeze the guest's file systems", err)
	}
	return count(reply.GetCount()), nil
}

// Thaw implements guest.Freezer.
func (s *session) Thaw(ctx context.Context) (int, error) {
	reply, err := s.client.Thaw(ctx, &guestv1.ThawRequest{})
	if err != nil {
		return 0, s.failure(ctx, "thaw the guest's file systems", err)
	}
	return count(reply.GetCount()), nil
}

func nics(list []vm.NIC) []*guestv1.NIC {
	var out []*guestv1.NIC
	for _, n := range vm.OneDefaultRoute(list) {
		nic := &guestv1.NIC{
			Mac: n.MAC, Ip: n.IP, Prefix: int32(n.Prefix), Gateway: n.Gateway, Dns: n.DNS, Mtu: int32(n.MTU), Addresses: n.Addresses,
		}
		for _, r := range n.Routes {
			nic.Routes = append(nic.Routes, &guestv1.Route{To: r.To, Via: r.Via})
		}
		out = append(out, nic)
	}
	return out
}
