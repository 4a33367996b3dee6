package agent

import (
	"context"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.Resumer = (*session)(nil)
	_ guest.Freezer = (*session)(nil)
)

// Resumed implements guest.Resumer.
func (s *session) Resumed(ctx context.Context, g guest.Resumed) (guest.ResumedReply, error) {
	r := &guestv1.ResumedRequest{
		NowUnixNano: g.Now.UnixNano(), Entropy: g.Entropy, Hostname: g.Hostname, Nics: nics(g.NICs), Hosts: g.Hosts,
	}
	if g.Now.IsZero() { // has no Unix time
		r.NowUnixNano = 0
	}
	if c := g.Clone; c != nil {
		r.Clone = &guestv1.CloneIdentity{Macs: c.MACs, MachineId: c.MachineID, SshHostKeys: c.SSHHostKeys}
	}
	reply, err := s.client.Resumed(ctx, r)
	if err != nil {
		return guest.ResumedReply{}, s.failure(ctx, "bring the resumed guest to itself", err)
	}
	return guest.ResumedReply{LogSeq: reply.GetLogSeq()}, nil
}

// Freeze implements guest.Freezer.
func (s *session) Freeze(ctx context.Context) (int, error) {
	reply, err := s.client.Freeze(ctx, &guestv1.FreezeRequest{})
	if err != nil {
		return 0, s.failure(ctx, "freeze the guest's file systems", err)
	}
	return int(reply.GetCount()), nil
}

// Thaw implements guest.Freezer.
func (s *session) Thaw(ctx context.Context) (int, error) {
	reply, err := s.client.Thaw(ctx, &guestv1.ThawRequest{})
	if err != nil {
		return 0, s.failure(ctx, "thaw the guest's file systems", err)
	}
	return int(reply.GetCount()), nil
}

func nics(list []vm.NIC) []*guestv1.NIC {
	var out []*guestv1.NIC
	for _, n := range list {
		out = append(out, &guestv1.NIC{
			Mac: n.MAC, Ip: n.IP, Prefix: int32(n.Prefix), Gateway: n.Gateway, Dns: n.DNS, Mtu: int32(n.MTU),
		})
	}
	return out
}
