package guestagent

import (
	"context"
	"fmt"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// ResizeContainers implements guestv1.GuestServer.
func (s *Server) ResizeContainers(_ context.Context, r *guestv1.ResizeContainersRequest) (*guestv1.ResizeContainersReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	p := s.containers()
	var all []resizing
	for _, m := range r.GetContainers() {
		c, err := p.find(m.GetName())
		if err != nil {
			return nil, err
		}
		want, err := resourcesOf(m.GetResources())
		if err == nil && want == nil {
			err = errdefs.Invalidf("the resources are missing")
		}
		if err == nil {
			err = fits(c.command.cgroup, want.MemoryLimit)
		}
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", c.name, err)
		}
		all = append(all, resizing{c, *want})
	}
	for _, z := range all {
		if err := p.resize(z); err != nil {
			return nil, err
		}
	}
	return &guestv1.ResizeContainersReply{}, nil
}

// resizing is what a container is to have.
type resizing struct {
	*container
	want vm.Resources
}

// resize makes the limits of a container what it is to have.
func (p *containers) resize(z resizing) error {
	p.change(func() { z.command.oomScoreAdj = z.want.OOMScoreAdj }) // from its next run on
	if err := limitCgroup(z.command.cgroup, z.want); err != nil {
		return errdefs.New(errdefs.Internal, "container %s: limit its resources: %w", z.name, err)
	}
	return nil
}

// resizeTo makes the limits of containers that were started before those of list, as far as what they use allows it.
func (p *containers) resizeTo(list []*guestv1.Container) {
	for _, m := range list {
		c, err := p.find(m.GetName())
		if err != nil {
			continue
		}
		want, err := resourcesOf(m.GetResources())
		if err != nil {
			continue
		}
		if want == nil { // a resize that added the first limits may have been interrupted
			want = &vm.Resources{}
		}
		if fits(c.command.cgroup, want.MemoryLimit) == nil {
			_ = p.resize(resizing{c, *want})
		}
	}
}

// resourcesOf returns the resources in m; nil: none are given.
func resourcesOf(m *guestv1.Resources) (*vm.Resources, error) {
	if m == nil {
		return nil, nil
	}
	r := &vm.Resources{CPULimit: m.GetCpuLimit(), CPUWeight: m.GetCpuWeight(), MemoryLimit: m.GetMemoryLimit(), OOMScoreAdj: int(m.GetOomScoreAdj())}
	return r, r.Validate()
}
