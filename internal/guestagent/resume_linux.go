package guestagent

import (
	"context"
	"encoding/hex"
	"fmt"
	"runtime"
	"strings"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guest/link"
)

// Limits on the fields of a Resumed request, in bytes.
const (
	maxEntropy  = 4096
	maxHostname = 64 // the kernel's
)

// Resumption is what a machine that was resumed from saved state must be told.
type Resumption struct {
	Identity
	Now     time.Time // zero: unknown
	Entropy []byte    // secret
	Clone   *Clone    // nil: the machine keeps its identity
	Storage int64     // current size of the writable disk in bytes; 0: unchanged
}

// Clone holds what must differ between two machines resumed from one state, in addition to their Identity.
type Clone struct {
	MACs      []string // current MACs of the interfaces, in the order of Identity.NICs, unless they already have the new ones
	MachineID string   // 32 hex digits, or "" to keep the old one
}

// Resumed implements guestv1.GuestServer. The host waits for it with the guest's links down, so it does nothing that
// can be done later.
func (s *Server) Resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedReply, error) {
	seq, places := s.log.newest(), s.containers().places() // later entries belong to the resumed guest
	res, err := resumption(r)
	if err != nil {
		return nil, err
	}
	if _, err := s.thaw(); err != nil {
		return nil, fmt.Errorf("give the resumed guest its identity: %w", err)
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.machine.Resume(ctx, res); err != nil {
		return nil, fmt.Errorf("give the resumed guest its identity: %w", err)
	}
	s.setHostname(res.Hostname)
	if err := s.resumeRooms(res); err != nil {
		return nil, fmt.Errorf("give the resumed guest its identity: %w", err)
	}
	if res.Clone == nil {
		return &guestv1.ResumedReply{LogSeq: seq, Containers: places}, nil
	}
	s.forgetLater()
	if id := res.Clone.MachineID; s.resumed.id == "" || s.resumed.id != id {
		s.resumed = resumedAs{id: id, seq: seq, places: places}
	}
	if r.GetClone().GetSshHostKeys() && !s.resumed.keys {
		if err := s.renewKeys(ctx); err != nil {
			return nil, fmt.Errorf("make new SSH host keys: %w", err)
		}
		s.resumed.keys = true
	}
	return &guestv1.ResumedReply{LogSeq: s.resumed.seq, Containers: s.resumed.places}, nil
}

// forgetAfter delays work that nobody waits for, so that it does not slow down work that somebody waits for.
const forgetAfter = 3 * time.Second

// forgetLater makes the machine forget its source, some time after the clone is set up. Preconditions: setup is held.
func (s *Server) forgetLater() {
	if s.forget == nil {
		s.forget = time.AfterFunc(forgetAfter, func() {
			s.setup.Lock()
			defer s.setup.Unlock()
			_ = s.machine.Forget() // a lease that remains is requested again and refused
		})
		return
	}
	s.forget.Reset(forgetAfter)
}

// forgetNever cancels a forgetLater that has not run yet.
func (s *Server) forgetNever() {
	s.setup.Lock()
	defer s.setup.Unlock()
	if s.forget != nil {
		s.forget.Stop()
	}
}

// resumedAs records that the guest became a clone, so that a repeated call gets the same answer.
type resumedAs struct {
	id     string // the machine id it was given
	seq    uint64
	places []*guestv1.LogPlace
	keys   bool // the new SSH host keys exist
}

// resumption converts r and validates it.
func resumption(r *guestv1.ResumedRequest) (Resumption, error) {
	res := Resumption{
		Identity: Identity{Hostname: r.GetHostname(), NICs: nics(r.GetNics()), Hosts: r.GetHosts(), Resolver: r.GetResolver()},
		Entropy:  r.GetEntropy(),
		Storage:  r.GetStorage(),
	}
	if ns := r.GetNowUnixNano(); ns > 0 {
		res.Now = time.Unix(0, ns)
	}
	switch {
	case len(res.Entropy) > maxEntropy:
		return Resumption{}, errdefs.Invalidf("%d bytes of entropy are too many; a guest accepts at most %d", len(res.Entropy), maxEntropy)
	case len(res.Hostname) > maxHostname || strings.ContainsAny(res.Hostname, "\x00\r\n"):
		return Resumption{}, errdefs.Invalidf("%q is not a host name", res.Hostname)
	case res.Storage < 0:
		return Resumption{}, errdefs.Invalidf("invalid disk size of %d bytes", res.Storage)
	}
	c := r.GetClone()
	if c == nil {
		return res, nil
	}
	if n := len(c.GetMacs()); n != 0 && n != len(res.NICs) { // none: the new MACs are set, as after a boot
		return Resumption{}, errdefs.Invalidf("the clone has %d interfaces, but %d MAC addresses to find them", len(res.NICs), len(c.GetMacs()))
	}
	if id := c.GetMachineId(); id != "" {
		if b, err := hex.DecodeString(id); err != nil || len(b) != 16 {
			return Resumption{}, errdefs.Invalidf("%q is not a machine id of 32 hex digits", id)
		}
	}
	res.Clone = &Clone{MACs: c.GetMacs(), MachineID: strings.ToLower(c.GetMachineId())}
	return res, nil
}

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

// SetClock implements guestv1.GuestServer.
func (s *Server) SetClock(_ context.Context, r *guestv1.SetClockRequest) (*guestv1.SetClockReply, error) {
	if r.GetNowUnixNano() <= 0 {
		return nil, errdefs.Invalidf("%d ns since 1970 is no time to set the clock to", r.GetNowUnixNano())
	}
	if err := s.machine.SetClock(time.Unix(0, r.GetNowUnixNano())); err != nil {
		return nil, err
	}
	return &guestv1.SetClockReply{}, nil
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

// plainListener is a listener whose sessions may begin with plain messages (link.Port).
type plainListener interface {
	HandlePlain(func(message []byte) []byte)
}

// plain answers one message: a Resumed, which is the first request to a resumed guest.
func (s *Server) plain(ctx context.Context, message []byte) []byte {
	reply, err := s.resumedPlain(ctx, message)
	if err == nil {
		var b []byte
		if b, err = proto.Marshal(reply); err == nil {
			return append([]byte{link.PlainAnswer}, b...)
		}
	}
	st := status.Convert(grpcerr.ToStatus(err))
	return append([]byte{link.PlainRefusal, byte(st.Code())}, st.Message()...)
}

func (s *Server) resumedPlain(ctx context.Context, message []byte) (*guestv1.ResumedReply, error) {
	if len(message) == 0 || message[0] != link.PlainResumed {
		return nil, errdefs.Unsupportedf("this agent does not know the request that came before the session")
	}
	r := &guestv1.ResumedRequest{}
	if err := proto.Unmarshal(message[1:], r); err != nil {
		return nil, errdefs.Invalidf("the request cannot be read: %w", err)
	}
	return s.Resumed(ctx, r)
}
