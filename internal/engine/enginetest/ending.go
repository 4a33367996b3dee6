package enginetest

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// This file is how the fake guest ends.

// Wait implements guest.Agent.
func (s *session) Wait(ctx context.Context) (guest.Exit, error) {
	for {
		if err := s.alive("agent.Wait"); err != nil {
			return guest.Exit{}, err
		}
		p, changed := s.g.look()
		if p.Exit != nil {
			return guest.Exit{Code: *p.Exit}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return guest.Exit{}, ctx.Err()
		case <-s.done:
		}
	}
}

// AckExit implements guest.Agent.
func (s *session) AckExit(context.Context) error {
	if err := s.alive("agent.AckExit"); err != nil {
		return err
	}
	s.g.mu.Lock()
	s.g.acked = true
	s.g.mu.Unlock()
	if !s.g.Stubborn {
		s.g.End(hypervisor.Exit{GuestShutdown: true})
	}
	return nil
}

// Poweroff implements guest.Agent.
func (s *session) Poweroff(context.Context, time.Duration) error {
	if err := s.alive("agent.Poweroff"); err != nil {
		return err
	}
	if s.g.Stubborn {
		return nil
	}
	if s.disk() {
		s.g.End(hypervisor.Exit{GuestShutdown: true})
		return nil
	}
	s.g.change(func() {
		if s.g.p.Exit == nil {
			code := 143
			s.g.p.Exit = &code
		}
	})
	return nil
}
