package pod

import (
	"context"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// ListMetricDescriptors describes the metrics of VM pods.
func (s *Service) ListMetricDescriptors(context.Context, *cri.ListMetricDescriptorsRequest) (*cri.ListMetricDescriptorsResponse, error) {
	return &cri.ListMetricDescriptorsResponse{Descriptors: convert.MetricDescriptors()}, nil
}

// ListPodSandboxMetrics returns the metrics of VM pods. It leaves out a pod whose guest does not answer.
func (s *Service) ListPodSandboxMetrics(ctx context.Context, _ *cri.ListPodSandboxMetricsRequest) (*cri.ListPodSandboxMetricsResponse, error) {
	all, err := s.podMetrics(ctx)
	return &cri.ListPodSandboxMetricsResponse{PodMetrics: all}, err
}

// StreamPodSandboxMetrics is ListPodSandboxMetrics as a stream.
func (s *Service) StreamPodSandboxMetrics(_ *cri.StreamPodSandboxMetricsRequest, to cri.RuntimeService_StreamPodSandboxMetricsServer) error {
	all, err := s.podMetrics(to.Context())
	if err != nil {
		return err
	}
	for _, one := range all {
		if err := to.Send(&cri.StreamPodSandboxMetricsResponse{PodSandboxMetrics: []*cri.PodSandboxMetrics{one}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) podMetrics(ctx context.Context) (out []*cri.PodSandboxMetrics, err error) {
	all, err := s.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if r.State != vm.StateRunning {
			continue
		}
		st, err := s.stats(ctx, r)
		if err != nil {
			s.log.Debug("guest of sandbox tells no numbers", "vm", r.ID, "err", err)
			continue
		}
		out = append(out, convert.Metrics(r, st, time.Now()))
	}
	return out, nil
}
