package cri

import (
	"context"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// side is who answers a call.
type side int

const (
	theirs side = iota // containerd
	ours               // VM pods
	both               // the answers are joined
	mixed              // both at the same time, as it comes
)

// images tells which images are ours.
type images interface {
	Has(ctx context.Context, spec *cri.ImageSpec) bool
}

// pods tells which pods are ours.
type pods interface {
	Has(ctx context.Context, pod *cri.PodSandboxMetadata) bool
}

// router decides who answers.
type router struct {
	handlers []string // runtime handlers of VM pods
	images   images
	pods     pods
}

// The fields by which calls are routed.
type (
	ofSandbox   interface{ GetPodSandboxId() string }
	ofContainer interface{ GetContainerId() string }
)

// route returns who answers a request of CRI.
// Errors: InvalidArgument if the request contradicts itself.
func (t router) route(ctx context.Context, req any) (side, error) {
	switch r := req.(type) {
	case *cri.RunPodSandboxRequest:
		return t.byHandler(r.GetRuntimeHandler(), r.GetConfig().GetAnnotations())
	case *cri.RestorePodRequest:
		return t.byHandler(r.GetRuntimeHandler(), r.GetConfig().GetAnnotations())

	case *cri.ListPodSandboxRequest:
		return byID(r.GetFilter().GetId()), nil
	case *cri.StreamPodSandboxesRequest:
		return byID(r.GetFilter().GetId()), nil
	case *cri.ListContainersRequest:
		return byID(r.GetFilter().GetId(), r.GetFilter().GetPodSandboxId()), nil
	case *cri.StreamContainersRequest:
		return byID(r.GetFilter().GetId(), r.GetFilter().GetPodSandboxId()), nil
	case *cri.ListContainerStatsRequest:
		return byID(r.GetFilter().GetId(), r.GetFilter().GetPodSandboxId()), nil
	case *cri.StreamContainerStatsRequest:
		return byID(r.GetFilter().GetId(), r.GetFilter().GetPodSandboxId()), nil
	case *cri.ListPodSandboxStatsRequest:
		return byID(r.GetFilter().GetId()), nil
	case *cri.StreamPodSandboxStatsRequest:
		return byID(r.GetFilter().GetId()), nil

	case *cri.ListMetricDescriptorsRequest, *cri.ListPodSandboxMetricsRequest, *cri.StreamPodSandboxMetricsRequest:
		return both, nil
	case *cri.StatusRequest, *cri.ImageFsInfoRequest, *cri.ListImagesRequest, *cri.StreamImagesRequest:
		return both, nil
	case *cri.GetEventsRequest:
		return mixed, nil
	case *cri.PullImageRequest:
		if t.pods.Has(ctx, r.GetSandboxConfig().GetMetadata()) {
			return ours, nil
		}
		return t.byImage(r.GetImage(), r.GetSandboxConfig().GetAnnotations())
	case *cri.ImageStatusRequest: // without a handler the kubelet asks for a container of containerd as well, which needs the image there
		return t.byImage(r.GetImage(), nil)
	case *cri.RemoveImageRequest:
		if t.images.Has(ctx, r.GetImage()) { // both may have it, and who removes an image wants it gone
			return both, nil
		}
		return theirs, nil

	case ofContainer:
		return owned(r.GetContainerId()), nil
	case ofSandbox:
		return owned(r.GetPodSandboxId()), nil
	}
	return theirs, nil
}

// owned returns whose a sandbox or container is.
func owned(id string) side {
	if convert.Ours(id) {
		return ours
	}
	return theirs
}

// byID returns who lists what a filter with these ids lets through; an empty one lets everything through.
func byID(ids ...string) side {
	s := both
	for _, id := range ids {
		if id != "" {
			s = owned(id)
		}
	}
	return s
}

// byHandler returns whose a new sandbox is: that of its runtime handler or, without one, of its annotation.
func (t router) byHandler(handler string, annotations map[string]string) (side, error) {
	target := annotations[contract.KeyTargetRuntime]
	wanted := t.isOurs(target)
	if target != "" && !wanted && target != handler {
		return theirs, errdefs.Invalidf("the annotation %s is %q, and this node has no such runtime; use %s, or remove it", contract.KeyTargetRuntime, target, strings.Join(t.handlers, " or "))
	}
	switch {
	case slices.Contains(t.handlers, handler):
		return ours, nil
	case handler != "" && wanted:
		return theirs, errdefs.Invalidf("the RuntimeClass of the pod names the handler %q, and its annotation %s the runtime %q; remove one of them", handler, contract.KeyTargetRuntime, target)
	case wanted:
		return ours, nil
	}
	return theirs, nil
}

func (t router) isOurs(target string) bool {
	return target == contract.TargetVirtlet || slices.Contains(t.handlers, target)
}

// byImage returns who fetches an image: that of the runtime handler of its pod, of the pod's annotation, or of the prefix of its name.
func (t router) byImage(spec *cri.ImageSpec, sandbox map[string]string) (side, error) {
	if strings.HasPrefix(spec.GetImage(), contract.TargetVirtlet+"/") {
		return ours, nil
	}
	annotations := spec.GetAnnotations()
	if annotations[contract.KeyTargetRuntime] == "" {
		annotations = sandbox
	}
	return t.byHandler(spec.GetRuntimeHandler(), annotations)
}
