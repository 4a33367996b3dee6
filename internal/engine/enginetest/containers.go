package enginetest

import (
	"context"
	"maps"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.ContainerKeeper  = (*session)(nil)
	_ guest.ContainerAdder   = (*session)(nil)
	_ guest.ContainerResizer = (*session)(nil)
	_ hypervisor.DiskPlugger = (*Guest)(nil)
)

// Containers implements guest.ContainerKeeper.
func (s *session) Containers(ctx context.Context, fn func([]guest.ContainerState) error) error {
	return s.follow(ctx, "agent.Containers", func() error {
		s.g.mu.Lock()
		p := s.g.p
		s.g.mu.Unlock()
		if p.Stand == nil {
			return nil
		}
		var all []guest.ContainerState
		for i, status := range p.Stand {
			name := ""
			if i < len(p.Names) {
				name = p.Names[i]
			}
			all = append(all, guest.ContainerState{Name: name, Status: status})
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

// AddContainer implements guest.ContainerAdder: the container runs at once, if its disks are plugged.
func (s *session) AddContainer(_ context.Context, c guest.Container) error {
	if err := s.alive("agent.AddContainer"); err != nil {
		return err
	}
	var err error
	s.g.change(func() {
		p := &s.g.p
		if slices.Contains(p.Names, c.Name) {
			return
		}
		for _, serial := range c.Layers {
			if !slices.Contains(p.Serials, serial) {
				err = errdefs.Unavailablef("the disk %s has not appeared", serial)
				return
			}
		}
		for len(p.Stand) < len(p.Names) {
			p.Stand = append(slices.Clip(p.Stand), vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now().UTC()})
		}
		p.Names = append(slices.Clip(p.Names), c.Name)
		p.Stand = append(slices.Clip(p.Stand), vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now().UTC()})
	})
	return err
}

// ResizeContainers implements guest.ContainerResizer. A fault "agent.ResizeContainers done" comes when the guest has the values.
func (s *session) ResizeContainers(_ context.Context, want map[string]vm.Resources) error {
	if err := s.alive("agent.ResizeContainers"); err != nil {
		return err
	}
	s.g.change(func() {
		sized := maps.Clone(s.g.p.Sized)
		if sized == nil {
			sized = map[string]vm.Resources{}
		}
		maps.Copy(sized, want)
		maps.DeleteFunc(sized, func(_ string, r vm.Resources) bool { return r == vm.Resources{} })
		s.g.p.Sized = sized
	})
	return s.alive("agent.ResizeContainers done")
}

// Sized returns what the containers may use, by name.
func (g *Guest) Sized() map[string]vm.Resources {
	p, _ := g.look()
	return p.Sized
}

// PlugDisk implements hypervisor.DiskPlugger.
func (g *Guest) PlugDisk(_ context.Context, d vm.Disk) error {
	return g.w.around("driver.PlugDisk", func() error {
		g.change(func() {
			if !slices.Contains(g.p.Serials, d.Serial) {
				g.p.Serials = append(slices.Clip(g.p.Serials), d.Serial)
			}
		})
		return nil
	})
}

// UnplugDisk implements hypervisor.DiskPlugger.
func (g *Guest) UnplugDisk(_ context.Context, serial string) error {
	return g.w.around("driver.UnplugDisk", func() error {
		g.change(func() {
			g.p.Serials = slices.DeleteFunc(slices.Clone(g.p.Serials), func(s string) bool { return s == serial })
		})
		return nil
	})
}
