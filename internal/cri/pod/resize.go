package pod

import (
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// UpdatePodSandboxResources is how a kubelet asks whether a pod can have other resources, before it changes those of the containers when the pod
// grows, and after that when it shrinks. The VM grows if it must, and never shrinks; limits within it hold in the guest, by UpdateContainerResources.
// After an error the kubelet changes no container.
func (s *Service) UpdatePodSandboxResources(ctx context.Context, req *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if !convert.Ready(r) {
		return nil, errdefs.Preconditionf("the sandbox %s is not ready: %s", req.GetPodSandboxId(), r.Message)
	}
	to, err := convert.Sized(r, req.GetResources())
	if err == nil && to != r.Spec.Size() {
		_, err = s.engine.Resize(ctx, string(r.ID), to)
	}
	if err != nil {
		return nil, fmt.Errorf("resize sandbox %s: %w", req.GetPodSandboxId(), err)
	}
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}
