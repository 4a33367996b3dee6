package netpolicy

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"

	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// watched are the pods, namespaces and policies of the cluster.
type watched struct {
	factory    informers.SharedInformerFactory
	informers  []cache.SharedIndexInformer
	static     networks // of machines that static pods may be
	pods       corelisters.PodLister
	namespaces corelisters.NamespaceLister
	policies   networkinglisters.NetworkPolicyLister
}

func watch(client kubernetes.Interface, node string, static networks, changed func(), denied func(error)) (*watched, error) {
	f := informers.NewSharedInformerFactory(client, 0)
	pods, namespaces, policies := f.Core().V1().Pods(), f.Core().V1().Namespaces(), f.Networking().V1().NetworkPolicies()
	w := &watched{
		factory: f, informers: []cache.SharedIndexInformer{pods.Informer(), namespaces.Informer(), policies.Informer()},
		static: static, pods: pods.Lister(), namespaces: namespaces.Lister(), policies: policies.Lister(),
	}
	slim := slimPod(node, w.static)
	for i, transform := range []cache.TransformFunc{slim, slimObject, slimObject} {
		err := w.informers[i].SetTransform(transform)
		if err == nil {
			_, err = w.informers[i].AddEventHandler(handler(changed))
		}
		if err == nil {
			err = w.informers[i].SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
				if apierrors.IsForbidden(err) {
					denied(err)
				}
				cache.DefaultWatchErrorHandler(ctx, r, err)
			})
		}
		if err != nil {
			return nil, fmt.Errorf("set up the watch of network policies: %w", err)
		}
	}
	return w, nil
}

// handler calls changed when something changes that policies depend on.
func handler(changed func()) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() }, DeleteFunc: func(any) { changed() },
		UpdateFunc: func(before, after any) {
			if !alike(before, after) {
				changed()
			}
		},
	}
}

func (w *watched) start(ctx context.Context) { w.factory.Start(ctx.Done()) }

// stop waits for the watches. Preconditions: the context of start has ended.
func (w *watched) stop() { w.factory.Shutdown() }

// wait returns true once all objects are known, and false if ctx has ended before.
func (w *watched) wait(ctx context.Context) bool {
	var all []cache.InformerSynced
	for _, i := range w.informers {
		all = append(all, i.HasSynced)
	}
	return cache.WaitForCacheSync(ctx.Done(), all...)
}

// synced reports whether all objects are known and their handlers have been called.
func (w *watched) synced() bool {
	for _, i := range w.informers {
		if !i.HasSynced() {
			return false
		}
	}
	return true
}

// read returns the cluster, with the VMs of this node's pods. The addresses of these pods are those of their VMs, because the
// status may not have them yet. A pod of this node without a VM has none, unless it may be a static pod.
func (w *watched) read(node string, records []guest) cluster {
	byUID, byID := map[string][]guest{}, map[vm.ID]guest{}
	for _, r := range records {
		switch {
		case r.uid != "":
			byUID[r.uid] = append(byUID[r.uid], r)
		case !r.made: // those of other virtual nodes are theirs
			byID[r.id] = r
		}
	}
	var out cluster
	pods, _ := w.pods.List(labels.Everything()) // from memory: never fails
	owners := podstatus.OwnersOf(pods)
	for _, p := range pods {
		one := pod{Pod: p, addresses: addressesOf(p)}
		if p.Spec.NodeName == node {
			mine := byUID[string(p.UID)]
			for _, c := range p.Status.ContainerStatuses { // of a VM that somebody else made, and that the pod has taken over
				r, there := byID[podstatus.VMOf(c.ContainerID)]
				if there && len(mine) == 0 && owners[r.id] == p.UID && (vm.Owner{Namespace: p.Namespace}).MayAdopt(r.owner, r.offered) {
					mine = append(mine, r)
				}
			}
			if len(mine) == 0 {
				one.addresses = slices.DeleteFunc(one.addresses, func(a netip.Addr) bool { return !w.static.contains(a) })
			}
			one = one.with(mine)
		}
		out.pods = append(out.pods, one)
	}
	namespaces, _ := w.namespaces.List(labels.Everything())
	out.namespaces = make(map[string]labels.Set, len(namespaces))
	for _, n := range namespaces {
		out.namespaces[n.Name] = n.Labels
	}
	out.policies, _ = w.policies.List(labels.Everything())
	return out
}

// with returns the pod with its VMs.
func (p pod) with(mine []guest) pod {
	for i, r := range mine {
		p.guests = append(p.guests, r.id)
		if len(r.addresses) > 0 {
			if i == 0 {
				p.addresses = nil
			}
			p.addresses = append(p.addresses, r.addresses...)
		}
	}
	return p
}

// slimObject drops what nothing here reads.
func slimObject(obj any) (any, error) {
	if m, ok := obj.(metav1.Object); ok {
		m.SetManagedFields(nil)
		m.SetAnnotations(nil)
	}
	return obj, nil
}

// alike reports whether two versions of an object mean the same for policies.
func alike(before, after any) bool {
	switch b := before.(type) {
	case *corev1.Pod:
		a, ok := after.(*corev1.Pod)
		if !ok {
			return false
		}
		one, two := *b, *a
		one.ResourceVersion, two.ResourceVersion = "", ""
		return equal(&one, &two)
	case *corev1.Namespace:
		a, ok := after.(*corev1.Namespace)
		return ok && labels.Equals(b.Labels, a.Labels)
	case *networkingv1.NetworkPolicy:
		a, ok := after.(*networkingv1.NetworkPolicy)
		return ok && equal(b.Spec, a.Spec)
	}
	return false
}

func equal(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }
