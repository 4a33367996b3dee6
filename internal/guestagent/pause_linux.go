package guestagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/volumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file pauses the containers of a guest and takes the folder of the host from it, so that the host can save the guest without the device of
// that folder. The guest may be resumed on another host.

// paused is what a guest has while its containers are paused.
type paused struct {
	away   *volumes.Away
	frozen []*container
}

// PauseContainers implements guestv1.GuestServer.
func (s *Server) PauseContainers(ctx context.Context, _ *guestv1.PauseContainersRequest) (*guestv1.PauseContainersReply, error) {
	p := s.containers()
	if p == nil || s.cfg.Volumes == nil {
		return nil, errdefs.Preconditionf("the guest has no containers that could be paused")
	}
	s.setup.Lock()
	defer s.setup.Unlock()
	if p.paused != nil {
		return &guestv1.PauseContainersReply{}, nil
	}
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		next, err := s.pause(ctx, p)
		if err == nil {
			p.paused = next
			return &guestv1.PauseContainersReply{}, nil
		}
		if try == pauseTries || !errdefs.IsFailedPrecondition(err) {
			return nil, fmt.Errorf("pause the containers: %w", err)
		}
		select {
		case <-time.After(retryPause): // they go on meanwhile
		case <-ctx.Done():
			return nil, fmt.Errorf("pause the containers: %w", err)
		}
	}
}

// A program that only writes a file now and then has it open for a moment.
const pauseTries, retryPause = 20, 50 * time.Millisecond

// pause pauses all or none. Preconditions: setup is held.
func (s *Server) pause(ctx context.Context, p *containers) (_ *paused, err error) {
	var next paused
	defer func() {
		if err != nil {
			err = errors.Join(err, p.thaw(next.frozen))
		}
	}()
	var live, ended []volumes.Place
	for _, c := range p.list() {
		if p.stateOf(c) == vm.ContainerTerminated {
			ended = append(ended, s.room(c.name))
			continue
		}
		live = append(live, s.room(c.name))
		next.frozen = append(next.frozen, c)
		if err := freezeContainer(ctx, c); err != nil {
			return nil, fmt.Errorf("container %s: %w", c.name, err)
		}
	}
	next.away, err = s.cfg.Volumes.TakeAway(ctx, vm.SharedVolume, live, ended)
	return &next, err
}

// stateOf returns the state of c.
func (p *containers) stateOf(c *container) vm.ContainerState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.status.State
}

// ResumeContainers implements guestv1.GuestServer.
func (s *Server) ResumeContainers(ctx context.Context, r *guestv1.ResumeContainersRequest) (*guestv1.ResumeContainersReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	p := s.containers()
	if p == nil || p.paused == nil {
		return &guestv1.ResumeContainersReply{}, nil
	}
	if err := p.paused.away.Return(ctx); err != nil {
		return nil, fmt.Errorf("resume the containers: %w", err)
	}
	for _, c := range p.paused.frozen {
		if slices.Contains(r.GetHeld(), c.name) {
			p.hold(c)
		}
	}
	if err := p.thaw(p.paused.frozen); err != nil {
		return nil, fmt.Errorf("resume the containers: %w", err)
	}
	p.paused = nil
	return &guestv1.ResumeContainersReply{}, nil
}

// hold makes a paused container that runs wait for start: its processes stand still until then.
func (p *containers) hold(c *container) {
	p.change(func() {
		if c.status.State == vm.ContainerRunning {
			was := c.status
			c.held, c.status = &was, vm.ContainerStatus{State: vm.ContainerCreated}
		}
	})
}

// letGo lets a held container go on. Preconditions: mu is held.
func (p *containers) letGo(c *container) error {
	if err := thawContainer(c); err != nil {
		return err
	}
	c.held.StartedAt = time.Now()
	p.unhold(c)
	return nil
}

// unhold makes a held container one that runs, although its processes stand still. Preconditions: mu is held.
func (p *containers) unhold(c *container) {
	c.status, c.held = *c.held, nil
	p.wake()
}

// freezePause is the time between two looks at a control group that is being frozen.
const freezePause = time.Millisecond

// freezeContainer stops all processes of a container, and returns when they stand still.
func freezeContainer(ctx context.Context, c *container) error {
	dir := c.command.cgroup
	if dir == nil {
		return errdefs.Unsupportedf("the guest has no control groups, so it cannot be paused")
	}
	if err := writeCgroup(*dir, "cgroup.freeze", "1"); err != nil {
		return err
	}
	for {
		events, err := readCgroup(*dir, "cgroup.events")
		if err != nil {
			return err
		}
		populated, _ := keyed(events, "populated")
		if frozen, _ := keyed(events, "frozen"); frozen == 1 || populated == 0 {
			return nil
		}
		select {
		case <-time.After(freezePause):
		case <-ctx.Done():
			return errdefs.Unavailablef("its processes do not stand still: %w", context.Cause(ctx))
		}
	}
}

// thaw lets containers go on, except those that are held.
func (p *containers) thaw(all []*container) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, c := range all {
		if c.held == nil {
			errs = append(errs, thawContainer(c))
		}
	}
	return errors.Join(errs...)
}

// thawContainer lets the processes of a container go on. It is no error if there are none.
func thawContainer(c *container) error {
	if c.command.cgroup == nil {
		return nil
	}
	return writeCgroup(*c.command.cgroup, "cgroup.freeze", "0")
}
