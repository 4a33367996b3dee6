package pod

import (
	"context"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// statsTime limits how long a guest may take to tell its numbers, so that one that hangs does not delay those of the others.
const statsTime = 2 * time.Second

func (s *Service) stats(ctx context.Context, r vm.Record) (guest.Stats, error) {
	if r.State != vm.StateRunning {
		return guest.Stats{}, errdefs.Preconditionf("the guest of sandbox %s does not run", convert.SandboxID(r.ID))
	}
	ctx, cancel := context.WithTimeout(ctx, statsTime)
	defer cancel()
	return s.engine.Stats(ctx, string(r.ID))
}

// ContainerStats returns what a container uses.
func (s *Service) ContainerStats(ctx context.Context, req *cri.ContainerStatsRequest) (*cri.ContainerStatsResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	st, err := s.stats(ctx, r)
	if err != nil {
		return nil, err
	}
	return &cri.ContainerStatsResponse{Stats: convert.ContainerStats(r, e, st, s.store, time.Now())}, nil
}

// ListContainerStats returns what the running containers use. It leaves out those of a guest that does not answer.
func (s *Service) ListContainerStats(ctx context.Context, req *cri.ListContainerStatsRequest) (*cri.ListContainerStatsResponse, error) {
	all, err := s.containerStats(ctx, req.GetFilter())
	return &cri.ListContainerStatsResponse{Stats: all}, err
}

// StreamContainerStats is ListContainerStats as a stream.
func (s *Service) StreamContainerStats(req *cri.StreamContainerStatsRequest, to cri.RuntimeService_StreamContainerStatsServer) error {
	all, err := s.containerStats(to.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	for _, one := range all {
		if err := to.Send(&cri.StreamContainerStatsResponse{ContainerStats: []*cri.ContainerStats{one}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) containerStats(ctx context.Context, f *cri.ContainerStatsFilter) (out []*cri.ContainerStats, err error) {
	all, err := s.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if !strings.HasPrefix(convert.SandboxID(r.ID), f.GetPodSandboxId()) {
			continue
		}
		wanted := slices.DeleteFunc(slices.Clone(r.Ephemeral), func(e vm.Ephemeral) bool {
			c := convert.ListedContainer(r, e)
			return c.GetState() != cri.ContainerState_CONTAINER_RUNNING || !strings.HasPrefix(c.GetId(), f.GetId()) || !labelled(c.GetLabels(), f.GetLabelSelector())
		})
		if len(wanted) == 0 {
			continue
		}
		st, err := s.stats(ctx, r)
		if err != nil {
			s.log.Debug("guest of sandbox tells no numbers", "vm", r.ID, "err", err)
			continue
		}
		for _, e := range wanted {
			out = append(out, convert.ContainerStats(r, e, st, s.store, time.Now()))
		}
	}
	return out, nil
}

// PodSandboxStats returns what a sandbox uses.
func (s *Service) PodSandboxStats(ctx context.Context, req *cri.PodSandboxStatsRequest) (*cri.PodSandboxStatsResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	st, err := s.stats(ctx, r)
	if err != nil {
		return nil, err
	}
	return &cri.PodSandboxStatsResponse{Stats: convert.SandboxStats(r, st, s.store, time.Now())}, nil
}

// ListPodSandboxStats returns what the sandboxes use. It leaves out those whose guest does not answer.
func (s *Service) ListPodSandboxStats(ctx context.Context, req *cri.ListPodSandboxStatsRequest) (*cri.ListPodSandboxStatsResponse, error) {
	all, err := s.sandboxStats(ctx, req.GetFilter())
	return &cri.ListPodSandboxStatsResponse{Stats: all}, err
}

// StreamPodSandboxStats is ListPodSandboxStats as a stream.
func (s *Service) StreamPodSandboxStats(req *cri.StreamPodSandboxStatsRequest, to cri.RuntimeService_StreamPodSandboxStatsServer) error {
	all, err := s.sandboxStats(to.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	for _, one := range all {
		if err := to.Send(&cri.StreamPodSandboxStatsResponse{PodSandboxStats: []*cri.PodSandboxStats{one}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) sandboxStats(ctx context.Context, f *cri.PodSandboxStatsFilter) (out []*cri.PodSandboxStats, err error) {
	all, err := s.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		i := convert.Listed(r)
		if r.State != vm.StateRunning || !strings.HasPrefix(i.GetId(), f.GetId()) || !labelled(i.GetLabels(), f.GetLabelSelector()) {
			continue
		}
		st, err := s.stats(ctx, r)
		if err != nil {
			s.log.Debug("guest of sandbox tells no numbers", "vm", r.ID, "err", err)
			continue
		}
		out = append(out, convert.SandboxStats(r, st, s.store, time.Now()))
	}
	return out, nil
}
