package podprovider

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// PodInformer is the informer that virtual-kubelet is to be given: it keeps to itself that a status has changed, as most
// that is told of pods does, by our own hand. virtual-kubelet would compare the pods field by field only to find that
// nothing is to be done.
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

// onlyStatus reports whether nothing else that concerns a node differs between two states of a pod. The server counts the
// changes of the spec; one that does not is not relied on.
func onlyStatus(a, b *corev1.Pod) bool {
	return a.UID == b.UID && a.Generation == b.Generation && b.Generation != 0 &&
		a.DeletionTimestamp.Equal(b.DeletionTimestamp) && sameGrace(a.DeletionGracePeriodSeconds, b.DeletionGracePeriodSeconds) &&
		maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
}

func sameGrace(a, b *int64) bool { return a == b || a != nil && b != nil && *a == *b }
