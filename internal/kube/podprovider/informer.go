package podprovider

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// PodInformer returns the informer for virtual-kubelet. It hides updates in which only the status changed: most updates of
// pods are such, and we cause them ourselves. virtual-kubelet would compare the pods field by field only to find that
// nothing must be done.
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

// onlyStatus reports whether two states of a pod differ in nothing else that concerns a node. The server counts the
// changes of the spec in the generation; if it does not count, onlyStatus returns false.
func onlyStatus(a, b *corev1.Pod) bool {
	return a.UID == b.UID && a.Generation == b.Generation && b.Generation != 0 &&
		a.DeletionTimestamp.Equal(b.DeletionTimestamp) && sameGrace(a.DeletionGracePeriodSeconds, b.DeletionGracePeriodSeconds) &&
		maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
}

func sameGrace(a, b *int64) bool { return a == b || a != nil && b != nil && *a == *b }
