package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
)

// PodClient returns the client for virtual-kubelet. It is the provider's own client, but it leaves the deletion of a pod's
// object to the pod's worker, which does it when the VM is gone. virtual-kubelet would not wait for that: it deletes a pod
// that is not running yet at once, and any pod when the grace is over.
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
		return apierrors.NewNotFound(corev1.Resource("pods"), name) // virtual-kubelet takes this as done
	}
	return g.PodInterface.Delete(ctx, name, o)
}

// willDelete reports whether a worker has deleted the pod or will delete it, and makes sure that it does.
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
