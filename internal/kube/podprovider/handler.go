package podprovider

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	informers "k8s.io/client-go/informers/core/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file contains the functions that virtual-kubelet calls. None of them waits for a VM. The provider may keep the pods
// that it gets, because virtual-kubelet does not change them afterwards.

// CreatePod records that pod must run on this node. It is idempotent. If the node refuses the pod, the status says so, and
// CreatePod returns no error.
func (p *Provider) CreatePod(_ context.Context, pod *corev1.Pod) error {
	return p.ensure(pod, nil)
}

// UpdatePod records changed labels, annotations and deadlines. A pod with the same name but another UID is a new pod.
func (p *Provider) UpdatePod(_ context.Context, pod *corev1.Pod) error {
	return p.ensure(pod, nil)
}

// DeletePod records that the pod's VM must be removed. With a deletion timestamp the guest gets its grace period. Without one,
// virtual-kubelet's cache no longer has the pod. The worker then asks the API server before it removes the VM.
func (p *Provider) DeletePod(_ context.Context, pod *corev1.Pod) error {
	s := p.index.find(pod.Namespace, pod.Name)
	if s == nil || pod.UID != "" && s.uid != pod.UID {
		return vkNotFound(pod.Namespace, pod.Name)
	}
	p.remove(s, pod)
	return nil
}

// remove requests the removal of pod's VM, with the grace period of the deletion.
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

// GetPod returns the pod with its status. A pod that was replaced under the same name is NotFound, because virtual-kubelet
// would otherwise treat the new pod as created.
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

// NotifyPods tells virtual-kubelet that the provider is asynchronous. The callback is not used, because it would PUT the whole
// pod as last seen and so undo changes that others made meanwhile. Each worker patches its own pod's status instead.
func (p *Provider) NotifyPods(context.Context, func(*corev1.Pod)) {}

// observe records the informer's state of a pod, because others write the conditions of readiness gates.
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
		if pod.DeletionTimestamp != nil { // an earlier process may have begun the removal
			p.remove(s, pod)
		}
		return s
	})
}

// PodClient returns the client for virtual-kubelet. It is the provider's client, except that it does not delete the object of
// a pod that has a worker. The worker deletes the object when the VM is gone. virtual-kubelet would not wait for that: it
// deletes a pod that is not running yet immediately, and any pod when the grace period is over.
func (p *Provider) PodClient() typed.PodsGetter { return gatedPods{p.Client.CoreV1(), p} }

type gatedPods struct {
	typed.PodsGetter
	p *Provider
}

func (g gatedPods) Pods(namespace string) typed.PodInterface {
	return gatedPod{g.PodsGetter.Pods(namespace), g.p}
}

type gatedPod struct {
	typed.PodInterface
	p *Provider
}

func (g gatedPod) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	if o.Preconditions != nil && o.Preconditions.UID != nil && g.p.willDelete(*o.Preconditions.UID) {
		return apierrors.NewNotFound(corev1.Resource("pods"), name) // virtual-kubelet treats NotFound as success
	}
	return g.PodInterface.Delete(ctx, name, o)
}

// willDelete reports whether a worker has deleted the pod or will delete it. If necessary it requests the removal.
func (p *Provider) willDelete(uid types.UID) bool {
	if p.deletions.has(uid) {
		return true
	}
	s := p.index.withUID(uid)
	if s == nil {
		return false
	}
	p.deletions.add(uid)
	s.requestRemoval(removal{grace: convert.Grace(s.look().pod), confirmed: true})
	return true
}

// PodInformer returns the informer for virtual-kubelet. It hides updates in which only the status changed. Most updates of
// pods are such updates, by this provider. virtual-kubelet would compare each pod field by field, to find that nothing must be
// done.
func (p *Provider) PodInformer(of informers.PodInformer) informers.PodInformer {
	return newsOfPods{of, p}
}

type newsOfPods struct {
	informers.PodInformer
	p *Provider
}

func (n newsOfPods) Informer() cache.SharedIndexInformer {
	return newsInformer{n.PodInformer.Informer(), n.p}
}

type newsInformer struct {
	cache.SharedIndexInformer
	p *Provider
}

func (n newsInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return n.SharedIndexInformer.AddEventHandler(newsHandler{h, n.p})
}

type newsHandler struct {
	cache.ResourceEventHandler
	p *Provider
}

func (h newsHandler) OnUpdate(before, now any) {
	old, _ := before.(*corev1.Pod)
	pod, ok := now.(*corev1.Pod)
	if ok {
		h.p.observe(pod)
	}
	if !ok || old == nil || !onlyStatus(old, pod) {
		h.ResourceEventHandler.OnUpdate(before, now)
	}
}

// onlyStatus reports whether, of the fields that concern a node, two states of a pod differ only in the status. The server
// counts the changes of the spec in the generation. If the pod has no generation, onlyStatus returns false.
func onlyStatus(a, b *corev1.Pod) bool {
	return a.UID == b.UID && a.Generation == b.Generation && b.Generation != 0 &&
		a.DeletionTimestamp.Equal(b.DeletionTimestamp) && sameGrace(a.DeletionGracePeriodSeconds, b.DeletionGracePeriodSeconds) &&
		maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
}

func sameGrace(a, b *int64) bool { return a == b || a != nil && b != nil && *a == *b }
