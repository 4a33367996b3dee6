package guestagent

import (
	"context"
	"fmt"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/volumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// AttachVolume implements guestv1.GuestServer.
func (s *Server) AttachVolume(ctx context.Context, r *guestv1.AttachVolumeRequest) (*guestv1.AttachVolumeReply, error) {
	v := volume(r.GetVolume())
	spec := vm.Spec{Volumes: []vm.Volume{v}}
	if r.GetPath() != "" {
		spec.Mounts = []vm.Mount{{Volume: v.Name, Path: r.GetPath()}}
	}
	if err := spec.ValidateVolumes(); err != nil {
		return nil, err
	}
	if v.Disk == nil {
		return nil, errdefs.Invalidf("volume %s is no disk, so it cannot be attached to a running guest", v.Name)
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	places, err := s.places(false)
	if err == nil {
		err = s.cfg.Volumes.Attach(ctx, v, r.GetPath(), places)
	}
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return &guestv1.AttachVolumeReply{}, nil
}

// DetachVolume implements guestv1.GuestServer.
func (s *Server) DetachVolume(ctx context.Context, r *guestv1.DetachVolumeRequest) (*guestv1.DetachVolumeReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	places, err := s.places(true)
	if err == nil {
		places = append(places, ownRoot()) // a room that shows it has copies of its mounts
		err = s.cfg.Volumes.Detach(ctx, r.GetName(), r.GetSerial(), places)
	}
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", r.GetName(), err)
	}
	return &guestv1.DetachVolumeReply{}, nil
}

// GrowVolume implements guestv1.GuestServer.
func (s *Server) GrowVolume(ctx context.Context, r *guestv1.GrowVolumeRequest) (*guestv1.GrowVolumeReply, error) {
	if s.cfg.Volumes == nil {
		return nil, errNoVolumes()
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	if err := s.cfg.Volumes.Grow(ctx, r.GetName(), r.GetSerial(), r.GetSize()); err != nil {
		return nil, fmt.Errorf("volume %s: %w", r.GetName(), err)
	}
	return &guestv1.GrowVolumeReply{}, nil
}

// places returns the root folders of the main process or of the containers, with added also of those that were added later.
// Preconditions: setup is held.
func (s *Server) places(added bool) ([]volumes.Place, error) {
	m, several := s.mainProcess(), s.containers()
	switch {
	case s.cfg.Volumes == nil:
		return nil, errNoVolumes()
	case m != nil:
		return []volumes.Place{s.rootOf(m.command)}, nil
	case several == nil:
		return nil, errdefs.Preconditionf("the guest has not started its programs yet")
	}
	list := several.all
	if added {
		list = several.list()
	}
	var places []volumes.Place
	for _, c := range list {
		if c.root {
			places = append(places, s.rootOf(c.command))
			continue
		}
		places = append(places, s.room(c.name))
	}
	return places, nil
}

// rootOf returns the root folder of a process that runs in the guest's own root.
func (s *Server) rootOf(c command) volumes.Place {
	if c.within != nil {
		return s.room(mainRoom)
	}
	return ownRoot()
}

// ownRoot is the guest's own root folder.
func ownRoot() volumes.Place {
	here := func(f func() error) error { return f() }
	return volumes.Place{Name: "/", Enter: here, Change: here}
}

// room returns the root folder of a room.
func (s *Server) room(name string) volumes.Place {
	return volumes.Place{
		Name:   name,
		Enter:  func(f func() error) error { return s.cfg.Rooms.Enter(name, f) },
		Change: func(f func() error) error { return s.cfg.Rooms.Change(name, f) },
	}
}
