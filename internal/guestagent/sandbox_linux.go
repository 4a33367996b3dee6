package guestagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is about guests that wait for containers, and about containers that are started and removed one by one.

// setUpSandbox mounts the volumes and then waits for containers, unless that was done before.
func (s *Server) setUpSandbox(ctx context.Context, r *guestv1.SetupRequest) error {
	if s.containers() != nil {
		return nil
	}
	switch {
	case s.cfg.Rooms == nil:
		return errdefs.Unsupportedf("this guest's agent does not support containers")
	case s.mainProcess() != nil || r.GetProcess() != nil || len(r.GetMounts()) > 0 || len(r.GetContainers()) > 0:
		return errdefs.Invalidf("a guest that waits for containers cannot have a process, mounts or containers")
	}
	if err := s.cfg.Rooms.Clear(); err != nil {
		return err
	}
	done, err := s.mount(ctx, r, nil)
	if err != nil {
		return err
	}
	if err := s.cfg.Rooms.Seal(); err != nil {
		return err
	}
	all := newContainers(s.procs, s.pace)
	all.groups = done.groups
	s.begin(all, all.await)
	return nil
}

// await waits until the guest is told to stop, and then until all containers have ended.
func (p *containers) await() {
	defer close(p.done)
	<-p.stop
	p.mu.Lock() // whoever joins or starts has seen the stop from now on, or is waited for
	for _, c := range p.joined {
		p.withdraw(c)
	}
	p.mu.Unlock()
	p.kept.Wait()
}

// StartContainer implements guestv1.GuestServer.
func (s *Server) StartContainer(ctx context.Context, r *guestv1.StartContainerRequest) (*guestv1.StartContainerReply, error) {
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	return &guestv1.StartContainerReply{}, s.containers().start(ctx, r.GetName())
}

// start starts a container that waits for it, and returns when it runs, or when its start has failed: then its state says so. A
// container that was started before is no error, unless it has ended since.
func (p *containers) start(ctx context.Context, name string) error {
	c, err := p.find(name)
	if err != nil {
		return err
	}
	p.mu.Lock()
	switch state := c.status.State; {
	case isClosed(p.stop) || isClosed(p.done):
		err = errdefs.Preconditionf("the guest is stopping")
	case state == vm.ContainerTerminated:
		err = errdefs.Preconditionf("container %s has ended", name)
	case c.held != nil:
		err = p.letGo(c)
	case state == vm.ContainerCreated:
		c.status = vm.ContainerStatus{State: vm.ContainerWaiting, Reason: vm.ContainerCreating}
		p.kept.Go(func() { p.keep(c, c.begun) }) // ends with its process; a power-off ends that
		p.wake()
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case <-c.begun:
	case <-c.over:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// RemoveContainer implements guestv1.GuestServer.
func (s *Server) RemoveContainer(ctx context.Context, r *guestv1.RemoveContainerRequest) (*guestv1.RemoveContainerReply, error) {
	name, p := r.GetName(), s.containers()
	switch {
	case s.cfg.Rooms == nil:
		return nil, errdefs.Unsupportedf("this guest's agent does not support containers")
	case p == nil:
		return nil, errdefs.Preconditionf("the guest has no containers")
	case name == mainRoom:
		return nil, errdefs.Invalidf("name the container")
	}
	if c, err := p.find(name); err == nil {
		if err := c.isEphemeral(); err != nil {
			return nil, errdefs.As(errdefs.InvalidArgument, err)
		}
		if err := p.retire(ctx, c); err != nil {
			return nil, err
		}
	}
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.removeContainer(ctx, p, name); err != nil {
		return nil, fmt.Errorf("container %s: %w", name, err)
	}
	return &guestv1.RemoveContainerReply{}, s.cfg.Rooms.Release(ctx, r.GetDisks())
}

// retire ends a container for good, and waits until it has ended.
func (p *containers) retire(ctx context.Context, c *container) error {
	p.mu.Lock()
	p.withdraw(c)
	if !isClosed(c.quit) {
		close(c.quit)
	}
	p.mu.Unlock()
	if err := p.kill(ctx, c.name, 0, 0); err != nil {
		return err
	}
	select {
	case <-c.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// removeContainer removes the room, the control group and the state of a container that has ended. Preconditions: setup is held.
func (s *Server) removeContainer(ctx context.Context, p *containers, name string) error {
	if group := s.groups[name]; group != nil {
		killCgroup(group) // commands beside the container
		if err := removeCgroup(ctx, *s.cgroups(), *group, name); err != nil {
			return err
		}
		unix.Close(*group)
	}
	delete(s.groups, name)
	if c, err := p.find(name); err == nil && c.message.file != nil {
		s.cfg.Volumes.DropMessage(c.message.file)
	}
	if err := s.cfg.Rooms.Remove(name); err != nil {
		return fmt.Errorf("remove its file system: %w", err)
	}
	if c, err := p.find(name); err == nil {
		for _, v := range c.devices {
			if err := s.cfg.Volumes.Detach(ctx, v, "", nil); err != nil {
				return fmt.Errorf("forget its volume %s: %w", v, err)
			}
		}
	}
	p.change(func() {
		p.joined = slices.DeleteFunc(slices.Clone(p.joined), func(c *container) bool { return c.name == name })
	})
	return nil
}

// emptyPause is the time between two attempts to remove a control group whose processes have just been killed.
const emptyPause = 5 * time.Millisecond

// removeCgroup removes the control group of the container called name, as soon as its processes have ended. dir is that group.
func removeCgroup(ctx context.Context, root, dir int, name string) error {
	for {
		err := unix.Unlinkat(root, cgroupOf(name), unix.AT_REMOVEDIR)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("remove its control group: %w", err)
		}
		killCgroup(&dir)
		select {
		case <-time.After(emptyPause):
		case <-ctx.Done():
			return errdefs.Unavailablef("its processes have not ended: %w", context.Cause(ctx))
		}
	}
}
