package enginetest

import (
	"context"
	"errors"
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
	_ guest.ContainerStarter = (*session)(nil)
	_ guest.ContainerPauser  = (*session)(nil)
	_ hypervisor.DiskPlugger = (*Guest)(nil)

	_ hypervisor.FolderPlugger = (*Guest)(nil)
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

// KillContainer implements guest.ContainerKeeper: a killed container runs again at once, unless it is Manual.
func (s *session) KillContainer(_ context.Context, container string, run int, grace time.Duration) error {
	if err := s.alive("agent.KillContainer"); err != nil {
		return err
	}
	s.g.change(func() {
		i := slices.Index(s.g.p.Names, container)
		if slices.Contains(s.g.p.Manual, container) {
			s.g.end(i, 137)
			return
		}
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
		serials := slices.Clone(c.Layers)
		for _, v := range c.Volumes {
			serials = append(append(serials, v.Layers...), v.Device)
		}
		for _, serial := range slices.DeleteFunc(serials, func(s string) bool { return s == "" }) {
			if !slices.Contains(p.Serials, serial) {
				err = errdefs.Unavailablef("the disk %s has not appeared", serial)
				return
			}
		}
		for len(p.Stand) < len(p.Names) {
			p.Stand = append(slices.Clip(p.Stand), vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now().UTC()})
		}
		status := vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now().UTC()}
		if c.Manual {
			status = vm.ContainerStatus{State: vm.ContainerCreated}
		}
		p.Names = append(slices.Clip(p.Names), c.Name)
		p.Stand = append(slices.Clip(p.Stand), status)
		if c.Manual {
			p.Manual = append(slices.Clip(p.Manual), c.Name)
		}
		if len(c.Process.Entrypoint) > 0 && c.Process.Entrypoint[0] == "missing" {
			p.Missing = append(slices.Clip(p.Missing), c.Name)
		}
	})
	return err
}

// StartContainer implements guest.ContainerStarter. The entrypoint "missing" is not found.
func (s *session) StartContainer(_ context.Context, container string) error {
	if err := s.alive("agent.StartContainer"); err != nil {
		return err
	}
	var err error
	s.g.change(func() {
		i := slices.Index(s.g.p.Names, container)
		switch {
		case i < 0:
			err = errdefs.NotFoundf("the guest has no container %q", container)
		case s.g.p.Stand[i].State == vm.ContainerTerminated:
			err = errdefs.Preconditionf("container %s has ended", container)
		case s.g.p.Stand[i].State == vm.ContainerCreated && slices.Contains(s.g.p.Missing, container):
			s.g.end(i, 128)
			s.g.p.Stand[i].Reason, s.g.p.Stand[i].Message = vm.ContainerStartError, "missing: no such file"
		case s.g.p.Stand[i].State == vm.ContainerCreated:
			s.g.p.Stand = slices.Clone(s.g.p.Stand)
			s.g.p.Stand[i] = vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now().UTC()}
		}
	})
	return errors.Join(err, s.alive("agent.StartContainer done"))
}

// RemoveContainer implements guest.ContainerStarter.
func (s *session) RemoveContainer(_ context.Context, container string, disks []string) error {
	if err := s.alive("agent.RemoveContainer"); err != nil {
		return err
	}
	s.g.change(func() {
		p := &s.g.p
		p.Forgotten = disks
		p.Entries = maps.Clone(p.Entries)
		delete(p.Entries, container)
		if i := slices.Index(p.Names, container); i >= 0 {
			p.Names, p.Stand = slices.Delete(slices.Clone(p.Names), i, i+1), slices.Delete(slices.Clone(p.Stand), i, i+1)
		}
	})
	return s.alive("agent.RemoveContainer done")
}

// end ends the i-th container with that code. Preconditions: mu is held.
func (g *Guest) end(i, code int) {
	g.p.Stand = slices.Clone(g.p.Stand)
	c := &g.p.Stand[i]
	if c.State == vm.ContainerTerminated {
		return
	}
	c.State, c.Reason = vm.ContainerTerminated, vm.ContainerError
	c.Exit = &vm.ContainerExit{Code: code, Reason: vm.ContainerError, StartedAt: c.StartedAt, FinishedAt: time.Now().UTC()}
}

// EndContainer ends a container with that code.
func (g *Guest) EndContainer(name string, code int) {
	g.change(func() { g.end(slices.Index(g.p.Names, name), code) })
}

// Has returns the names of the containers in the guest.
func (g *Guest) Has() []string {
	p, _ := g.look()
	return p.Names
}

// Forgotten returns the serials of the disks that the guest has released for the last container that was removed.
func (g *Guest) Forgotten() []string {
	p, _ := g.look()
	return p.Forgotten
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

// PlugFolder implements hypervisor.FolderPlugger.
func (g *Guest) PlugFolder(_ context.Context, at string, s hypervisor.Share) error {
	return g.w.around("driver.PlugFolder", func() error {
		g.change(func() {
			g.p.Folders = maps.Clone(g.p.Folders)
			if g.p.Folders == nil {
				g.p.Folders = map[string]string{}
			}
			g.p.Folders[at] = s.Path
		})
		return nil
	})
}

// UnplugFolder implements hypervisor.FolderPlugger.
func (g *Guest) UnplugFolder(_ context.Context, at string) error {
	return g.w.around("driver.UnplugFolder", func() error {
		g.change(func() {
			g.p.Folders = maps.Clone(g.p.Folders)
			delete(g.p.Folders, at)
		})
		return nil
	})
}

// UnplugShare implements hypervisor.FolderPlugger.
func (g *Guest) UnplugShare(context.Context, string) error {
	return g.w.around("driver.UnplugShare", func() error {
		if p, _ := g.look(); !p.Resting {
			return errdefs.Unavailablef("the guest uses it")
		}
		g.change(func() { g.p.Apart = true })
		return nil
	})
}

// PlugShare implements hypervisor.FolderPlugger.
func (g *Guest) PlugShare(context.Context, string) error {
	return g.w.around("driver.PlugShare", func() error {
		g.change(func() { g.p.Apart = false })
		return nil
	})
}

// PauseContainers implements guest.ContainerPauser.
func (s *session) PauseContainers(context.Context) error {
	if err := s.alive("agent.PauseContainers"); err != nil {
		return err
	}
	s.g.change(func() { s.g.p.Resting = true })
	return s.alive("agent.PauseContainers done")
}

// ResumeContainers implements guest.ContainerPauser.
func (s *session) ResumeContainers(_ context.Context, held []string) error {
	if err := s.alive("agent.ResumeContainers"); err != nil {
		return err
	}
	var err error
	s.g.change(func() {
		p := &s.g.p
		if !p.Resting {
			return
		}
		if p.Apart {
			err = errdefs.Unavailablef("there is no device")
			return
		}
		p.Resting, p.Stand = false, slices.Clone(p.Stand)
		for i, name := range p.Names {
			if slices.Contains(held, name) && p.Stand[i].State == vm.ContainerRunning {
				p.Stand[i] = vm.ContainerStatus{State: vm.ContainerCreated}
			}
		}
	})
	return errors.Join(err, s.alive("agent.ResumeContainers done"))
}

// Rests reports whether the containers are paused, or the guest lacks the folder that it shares.
func (g *Guest) Rests() bool {
	p, _ := g.look()
	return p.Resting || p.Apart
}

// Folders returns the folders of the node that were shared while the guest ran, by where they are.
func (g *Guest) Folders() map[string]string {
	p, _ := g.look()
	return p.Folders
}
