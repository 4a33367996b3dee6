package podprovider

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
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
	w := p.find(pod.Namespace, pod.Name)
	if w == nil || pod.UID != "" && w.uid != pod.UID {
		return vkNotFound(pod.Namespace, pod.Name)
	}
	p.remove(w, pod)
	return nil
}

// remove tells w to remove the VM of pod with the grace that pod sets.
func (p *Provider) remove(w *worker, pod *corev1.Pod) {
	r := removal{grace: convert.Grace(pod), confirmed: pod.DeletionTimestamp != nil}
	if s := pod.DeletionGracePeriodSeconds; s != nil {
		r.grace = convert.Seconds(*s)
	}
	if r.confirmed {
		p.leaving.add(w.uid)
		w.renew(pod)
	}
	w.requestRemoval(r)
}

// GetPod returns the pod with its status. A pod that was replaced under the same name is not found; otherwise
// virtual-kubelet would believe that the new pod was already created.
func (p *Provider) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	w := p.find(namespace, name)
	if w == nil {
		return nil, vkNotFound(namespace, name)
	}
	if cached, err := p.Cached(namespace, name); err == nil && cached.UID != w.uid {
		return nil, vkNotFound(namespace, name)
	}
	return w.snapshot(), nil
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
	p.mu.Lock()
	all := make([]*worker, 0, len(p.workers))
	for _, w := range p.workers {
		all = append(all, w)
	}
	p.mu.Unlock()
	pods := make([]*corev1.Pod, len(all))
	for i, w := range all {
		pods[i] = w.snapshot()
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
	if w := p.find(pod.Namespace, pod.Name); w != nil && w.uid == pod.UID {
		w.noteGates(pod)
	}
}

func (p *Provider) find(namespace, name string) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers[namespace+"/"+name]
}

// ensure makes sure that pod has a worker, with the VM rec if one was already found.
func (p *Provider) ensure(pod *corev1.Pod, rec *vm.Record) error {
	key := pod.Namespace + "/" + pod.Name
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.begin == nil:
		return vkUnavailable("the virtual node is not running")
	case p.ended:
		return nil // an error now would be written into the pod's status; the next process adopts the pod
	}
	if w := p.workers[key]; w != nil {
		if w.uid == pod.UID {
			w.update(pod)
			return nil
		}
		w.replaced()
	}
	w := newWorker(p, pod, rec)
	w.prior = p.holders[w.vmKey()]
	p.workers[key], p.byUID[w.uid], p.holders[w.vmKey()] = w, w, w
	if rec != nil && rec.Spec.Labels[contract.VMLabelPodUID] == "" {
		p.adopters[rec.ID] = w
	}
	if pod.DeletionTimestamp != nil { // an earlier process knew this, and may have done half of it
		p.remove(w, pod)
	}
	p.Metrics.tableSize.Set(float64(len(p.byUID)))
	p.begin(w)
	return nil
}

// drop forgets a worker whose VM is gone.
func (p *Provider) drop(w *worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[w.key] == w {
		delete(p.workers, w.key)
	}
	if p.holders[w.vmKey()] == w {
		delete(p.holders, w.vmKey())
	}
	delete(p.byUID, w.uid)
	maps.DeleteFunc(p.adopters, func(_ vm.ID, a *worker) bool { return a == w })
	p.Metrics.tableSize.Set(float64(len(p.byUID)))
}
