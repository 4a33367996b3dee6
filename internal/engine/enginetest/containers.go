package enginetest

import (
	"context"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ guest.ContainerKeeper = (*session)(nil)

// Containers implements guest.ContainerKeeper.
func (s *session) Containers(ctx context.Context, fn func([]vm.ContainerStatus) error) error {
	return s.follow(ctx, "agent.Containers", func() error {
		s.g.mu.Lock()
		all := slices.Clone(s.g.p.Stand)
		s.g.mu.Unlock()
		if all == nil {
			return nil
		}
		return fn(all)
	})
}

// ContainerLogs implements guest.ContainerKeeper.
func (s *session) ContainerLogs(ctx context.Context, container string, run int, after uint64, fn func(guest.LogEntry) error) error {
	return s.follow(ctx, "agent.ContainerLogs", func() error {
		s.g.mu.Lock()
		entries := slices.Clone(s.g.p.Entries[container])
		s.g.mu.Unlock()
		for _, e := range entries {
			if e.Run < run || e.Run == run && e.Seq <= after {
				continue
			}
			if err := fn(e); err != nil {
				return err
			}
			run, after = e.Run, e.Seq
		}
		return nil
	})
}

// KillContainer implements guest.ContainerKeeper: a killed container runs again at once.
func (s *session) KillContainer(_ context.Context, container string, run int, grace time.Duration) error {
	if err := s.alive("agent.KillContainer"); err != nil {
		return err
	}
	s.g.change(func() {
		i := slices.Index(s.g.p.Names, container)
		if at := s.g.p.Stand[i]; at.State != vm.ContainerRunning || run != 0 && run != at.Run() {
			return
		}
		all := slices.Clone(s.g.p.Stand)
		all[i].Last = &vm.ContainerExit{Code: 143, Reason: vm.ContainerError, Message: grace.String(), StartedAt: all[i].StartedAt, FinishedAt: time.Now()}
		all[i].Restarts++
		all[i].StartedAt = time.Now()
		s.g.p.Stand = all
	})
	return nil
}

// ReleaseContainer implements guest.ContainerKeeper.
func (s *session) ReleaseContainer(context.Context, string) error {
	return s.alive("agent.ReleaseContainer")
}

// follow calls say at once and after every change of the guest, until its main process has ended or the session is
// lost.
func (s *session) follow(ctx context.Context, call string, say func() error) error {
	for {
		if err := s.alive(call); err != nil {
			return err
		}
		p, changed := s.g.look()
		if err := say(); err != nil || p.Exit != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
		}
	}
}
