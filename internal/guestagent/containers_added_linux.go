package guestagent

import (
	"context"
	"errors"
	"fmt"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// AddContainer implements guestv1.GuestServer.
func (s *Server) AddContainer(ctx context.Context, r *guestv1.AddContainerRequest) (*guestv1.AddContainerReply, error) {
	m, p := r.GetContainer(), s.containers()
	switch {
	case vm.ContainerKind(m.GetKind()) != vm.ContainerEphemeral || m.GetRoot() || m.GetHold():
		return nil, errdefs.Invalidf("container %s of kind %q cannot be added to a running guest", m.GetName(), m.GetKind())
	case m.GetOwnPids() && m.GetPidsOf() != "":
		return nil, errdefs.Invalidf("container %s is to see its own processes and those of container %s", m.GetName(), m.GetPidsOf())
	case len(m.GetMounts()) > 0 && s.cfg.Volumes == nil:
		return nil, errNoVolumes()
	case s.cfg.Rooms == nil:
		return nil, errdefs.Unsupportedf("this guest's agent does not support containers")
	case p == nil:
		return nil, errdefs.Preconditionf("the guest has no containers that container %s could join", m.GetName())
	}
	if c, err := p.find(m.GetName()); err == nil {
		return &guestv1.AddContainerReply{}, c.isEphemeral()
	}
	if err := s.cfg.Rooms.Await(ctx, disksOf(m)); err != nil {
		return nil, fmt.Errorf("container %s: %w", m.GetName(), err)
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if c, err := p.find(m.GetName()); err == nil {
		return &guestv1.AddContainerReply{}, c.isEphemeral()
	}
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	if err := s.addContainer(ctx, p, m); err != nil {
		return nil, fmt.Errorf("container %s: %w", m.GetName(), err)
	}
	return &guestv1.AddContainerReply{}, nil
}

func (c *container) isEphemeral() error {
	if c.kind != vm.ContainerEphemeral {
		return errdefs.Conflictf("the guest has a container %s, which was not added to it", c.name)
	}
	return nil
}

// addContainer makes the room of a container and starts it. Preconditions: setup is held.
func (s *Server) addContainer(ctx context.Context, p *containers, m *guestv1.Container) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, s.cfg.Rooms.Seal())
		}
	}()
	folder, err := s.cfg.Rooms.Make(m.GetName(), m.GetLayers(), covers(m.GetProcess()))
	if err != nil {
		return fmt.Errorf("make its file system: %w", err)
	}
	if err := s.limit(folder, m); err != nil {
		return err
	}
	message, err := s.messageOf(folder, m)
	if err != nil {
		return err
	}
	if message.file != nil { // in a guest without volumes, the first message opens the stage of the volumes
		if _, err := s.cfg.Volumes.Mount(ctx, nil, nil, nil); err != nil {
			return err
		}
	}
	if err := s.mountAdded(ctx, folder, m); err != nil {
		return err
	}
	makeWorkdir(folder, m.GetProcess())
	if err := s.cfg.Rooms.Seal(); err != nil {
		return err
	}
	s.mu.Lock()
	hostname := s.hostname
	s.mu.Unlock()
	c, err := s.container(m, &guestv1.SetupRequest{Hostname: hostname, Restart: string(vm.RestartNever)}, p.groups)
	if err != nil {
		return err
	}
	c.message, c.devices = message, devicesOf(m)
	return p.join(c)
}
