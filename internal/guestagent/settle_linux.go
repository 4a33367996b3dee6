package guestagent

import (
	"context"
	"fmt"
	"runtime"

	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Settle implements guestv1.GuestServer. Each guest that is resumed from the state about to be saved has less to do by
// what is done once here; where instructions are emulated, that is time and memory of each.
func (s *Server) Settle(ctx context.Context, _ *guestv1.SettleRequest) (*guestv1.SettleReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	if err := rehearse(); err != nil {
		return nil, errdefs.New(errdefs.Internal, "rehearse what a resumed guest is told: %w", err)
	}
	if err := s.machine.Settle(ctx); err != nil {
		return nil, fmt.Errorf("settle the guest: %w", err)
	}
	runtime.GC() // garbage is memory that every clone would have to collect, and have alone by that
	return &guestv1.SettleReply{}, nil
}

// rehearse encodes and decodes what Resumed is asked and answers. The library prepares for a kind of message when it
// meets the first one, which is more work than all that Resumed does by itself.
func rehearse() error {
	request, err := proto.Marshal(&guestv1.ResumedRequest{
		NowUnixNano: 1, Entropy: []byte{1}, Hostname: "h", Hosts: []string{"h"}, Storage: 1,
		Nics:  []*guestv1.NIC{{Mac: "m", Ip: "i", Prefix: 1, Gateway: "g", Dns: []string{"d"}, Mtu: 1, Addresses: []string{"a"}}},
		Clone: &guestv1.CloneIdentity{Macs: []string{"m"}, MachineId: "i", SshHostKeys: true},
	})
	if err == nil {
		err = proto.Unmarshal(request, &guestv1.ResumedRequest{})
	}
	if err == nil {
		_, err = proto.Marshal(&guestv1.ResumedReply{LogSeq: 1, Containers: []*guestv1.LogPlace{{Run: 1, Seq: 1}}})
	}
	return err
}
