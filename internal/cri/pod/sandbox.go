package pod

import (
	"context"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// RunPodSandbox makes the VM of a pod. Its network is there when the call returns; its guest boots meanwhile, because the kubelet pulls
// images first. A second call for the same attempt returns the same sandbox.
func (s *Service) RunPodSandbox(ctx context.Context, req *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	spec, owner, err := convert.Sandbox(req.GetConfig(), req.GetRuntimeHandler(), s.node)
	if err != nil {
		return nil, err
	}
	r, err := s.engine.Create(vm.OnBehalf(ctx, owner), spec)
	if err == nil && convert.StandIn(r) != "" {
		s.log.Info("vm of pod runs in a stand-in for the driver that the pod asks for", "vm", r.ID, "driver", r.Driver)
	}
	if errdefs.IsAlreadyExists(err) {
		if r, err = s.engine.Inspect(vm.OnBehalf(ctx, owner), spec.Name); err == nil && (!convert.IsSandbox(r) || !convert.Ready(r)) {
			err = errdefs.Existsf("the sandbox of attempt %d exists, but it is not ready; remove it first", req.GetConfig().GetMetadata().GetAttempt())
		}
	}
	if err != nil {
		return nil, err
	}
	if r.BootContainer == "" {
		go s.boot(r)
	}
	return &cri.RunPodSandboxResponse{PodSandboxId: convert.SandboxID(r.ID)}, nil
}

// boot starts the guest of a sandbox. If that fails, the first container of the sandbox tries again, and tells the kubelet why.
func (s *Service) boot(r vm.Record) {
	if _, err := s.engine.Start(s.life, string(r.ID)); err != nil && !errdefs.IsNotFound(err) && s.life.Err() == nil {
		s.log.Warn("guest of sandbox not started", "vm", r.ID, "err", err)
	}
}

// StopPodSandbox kills what runs in the sandbox and gives its network back.
func (s *Service) StopPodSandbox(ctx context.Context, req *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err == nil && r.State != vm.StateError { // one that is lost cannot be stopped; its removal ends what is left of it
		_, err = s.engine.Stop(ctx, string(r.ID), 0)
	}
	if err == nil {
		_, err = s.engine.ReleaseNICs(ctx, string(r.ID))
	}
	return &cri.StopPodSandboxResponse{}, gone(err)
}

// RemovePodSandbox removes the sandbox with its containers.
func (s *Service) RemovePodSandbox(ctx context.Context, req *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err == nil {
		err = s.engine.Remove(ctx, string(r.ID), true)
	}
	return &cri.RemovePodSandboxResponse{}, gone(err)
}

// PodSandboxStatus returns the state of a sandbox.
func (s *Service) PodSandboxStatus(ctx context.Context, req *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	out := &cri.PodSandboxStatusResponse{Status: convert.SandboxStatus(r)}
	if req.GetVerbose() {
		out.Info = map[string]string{
			"vm": string(r.ID), "name": r.Owner.Qualify(r.Spec.Name), "state": string(r.State), "reason": r.Reason, "message": r.Message,
			"hypervisor": r.Driver, "standIn": convert.StandIn(r),
		}
	}
	return out, nil
}

// ListPodSandbox lists the sandboxes that match a filter.
func (s *Service) ListPodSandbox(ctx context.Context, req *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	items, err := s.listed(ctx, req.GetFilter())
	return &cri.ListPodSandboxResponse{Items: items}, err
}

// StreamPodSandboxes is ListPodSandbox as a stream.
func (s *Service) StreamPodSandboxes(req *cri.StreamPodSandboxesRequest, to cri.RuntimeService_StreamPodSandboxesServer) error {
	items, err := s.listed(to.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	for _, i := range items {
		if err := to.Send(&cri.StreamPodSandboxesResponse{PodSandboxes: []*cri.PodSandbox{i}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) listed(ctx context.Context, f *cri.PodSandboxFilter) (out []*cri.PodSandbox, err error) {
	all, err := s.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		i := convert.Listed(r)
		if strings.HasPrefix(i.GetId(), f.GetId()) && (f.GetState() == nil || f.GetState().GetState() == i.GetState()) && labelled(i.GetLabels(), f.GetLabelSelector()) {
			out = append(out, i)
		}
	}
	return out, nil
}

// labelled reports whether labels have all that a selector wants.
func labelled(labels, want map[string]string) bool {
	for key, value := range want {
		if has, ok := labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}
