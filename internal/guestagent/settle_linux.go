package guestagent

import (
	"context"
	"fmt"
	"runtime"

	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Settle implements guestv1.GuestServer. What it does once here, no guest resumed from the state saved next has to do.
// Where instructions are emulated, that saves time and memory in each of them.
func (s *Server) Settle(ctx context.Context, _ *guestv1.SettleRequest) (*guestv1.SettleReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	if err := rehearse(); err != nil {
		return nil, errdefs.New(errdefs.Internal, "prepare the agent for the save: %w", err)
	}
	if err := s.machine.Settle(ctx); err != nil {
		return nil, fmt.Errorf("prepare the guest for the save: %w", err)
	}
	runtime.GC() // every clone would have to collect the garbage, and would then own those pages alone
	return &guestv1.SettleReply{}, nil
}

// rehearse encodes and decodes the request and the reply of Resumed. The library prepares for a message type when it
// first handles one, and that takes longer than Resumed itself.
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
