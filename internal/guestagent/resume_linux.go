package guestagent

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
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
		Identity: Identity{Hostname: r.GetHostname(), NICs: nics(r.GetNics()), Hosts: r.GetHosts()},
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
