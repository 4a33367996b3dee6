package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file contains what virtual-kubelet calls. Nothing here waits for a VM. The provider may keep the pods that it gets:
// nobody changes them afterwards.

// CreatePod records that pod must run here. It is idempotent; refusals show in the pod's status, not as an error.
func (p *Provider) CreatePod(_ context.Context, pod *corev1.Pod) error {
	return p.ensure(pod, nil)
}

// UpdatePod records changed labels, annotations and deadlines. A pod that replaced one of the same name is a new pod.
func (p *Provider) UpdatePod(_ context.Context, pod *corev1.Pod) error {
	return p.ensure(pod, nil)
}

// DeletePod records that the pod's VM must be removed. With a deletion timestamp the guest gets its grace. Without one,
// virtual-kubelet no longer sees the pod, and the worker verifies that before it destroys anything.
func (p *Provider) DeletePod(_ context.Context, pod *corev1.Pod) error {
	s := p.index.find(pod.Namespace, pod.Name)
	if s == nil || pod.UID != "" && s.uid != pod.UID {
		return vkNotFound(pod.Namespace, pod.Name)
	}
	p.remove(s, pod)
	return nil
}

// remove requests to remove the VM of pod with the grace that pod sets.
func (p *Provider) remove(s *podState, pod *corev1.Pod) {
	r := removal{grace: convert.Grace(pod), confirmed: pod.DeletionTimestamp != nil}
	if grace := pod.DeletionGracePeriodSeconds; grace != nil {
		r.grace = convert.Seconds(*grace)
	}
	if r.confirmed {
		p.deletions.add(s.uid)
		s.renew(pod)
	}
	s.requestRemoval(r)
}

// GetPod returns the pod with its status. A pod that was replaced under the same name is not found; otherwise
// virtual-kubelet would believe that the new pod was already created.
func (p *Provider) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	s := p.index.find(namespace, name)
	if s == nil {
		return nil, vkNotFound(namespace, name)
	}
	if cached, err := p.Cached(namespace, name); err == nil && cached.UID != s.uid {
		return nil, vkNotFound(namespace, name)
	}
	return s.snapshot(), nil
}

// GetPodStatus returns the status of a pod.
func (p *Provider) GetPodStatus(ctx context.Context, namespace, name string) (*corev1.PodStatus, error) {
	pod, err := p.GetPod(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return &pod.Status, nil
}

// GetPods returns every pod the provider knows.
func (p *Provider) GetPods(context.Context) ([]*corev1.Pod, error) {
	all := p.index.current()
	pods := make([]*corev1.Pod, len(all))
	for i, s := range all {
		pods[i] = s.snapshot()
	}
	return pods, nil
}

// NotifyPods tells virtual-kubelet that the provider is asynchronous. The callback is not used: it would PUT the whole pod
// as last seen and so undo what others changed meanwhile. Each worker patches its own pod's status instead.
func (p *Provider) NotifyPods(context.Context, func(*corev1.Pod)) {}

// observe records a pod as the informer saw it. This matters for readiness gates, whose conditions others write.
func (p *Provider) observe(pod *corev1.Pod) {
	if len(pod.Spec.ReadinessGates) == 0 {
		return
	}
	if s := p.index.find(pod.Namespace, pod.Name); s != nil && s.uid == pod.UID {
		s.noteGates(pod)
	}
}

// ensure makes sure that pod has a worker, with the VM rec if one was already found.
func (p *Provider) ensure(pod *corev1.Pod, rec *vm.Record) error {
	return p.index.ensure(pod, func() *podState {
		s := newPodState(p.common, pod, rec)
		if pod.DeletionTimestamp != nil { // an earlier process knew this, and may have done half of it
			p.remove(s, pod)
		}
		return s
	})
}
