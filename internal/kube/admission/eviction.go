package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/controller/eviction"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// evictionGuard hibernates a VM before its pod is evicted, if the VM would lose its state.
type evictionGuard struct {
	client   client.Client
	registry controller.Registry
	machines bool // VirtualMachineInstances are ours
}

// registryLimit is the timeout for the registry. It is shorter than the time that the API server waits for the webhook.
const registryLimit = 3 * time.Second

// Handle implements admission.Handler.
func (g *evictionGuard) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	dry, err := dryRun(req)
	if err != nil {
		return unreadable(err)
	}
	pod := &corev1.Pod{}
	switch err := g.client.Get(ctx, client.ObjectKey{Namespace: req.Namespace, Name: req.Name}, pod); {
	case apierrors.IsNotFound(err):
		return ctrladmission.Allowed("") // the API server reports that itself
	case err != nil:
		return failed(fmt.Errorf("get pod %s: %w", req.Name, err))
	}
	node := &corev1.Node{}
	if err := g.client.Get(ctx, client.ObjectKey{Name: pod.Spec.NodeName}, node); client.IgnoreNotFound(err) != nil {
		return failed(fmt.Errorf("get node %s: %w", pod.Spec.NodeName, err))
	}
	var durable eviction.Durable
	if g.registry != nil {
		durable = func() (bool, error) {
			ctx, cancel := context.WithTimeout(ctx, registryLimit)
			defer cancel()
			return g.registry.Has(ctx, controller.VM{Namespace: pod.Namespace, Name: convert.VMName(pod)}, contract.HibernateSnapshotTag)
		}
	}
	v := eviction.Decide(pod, eviction.Emptied(node), durable)
	vmi, err := g.instance(ctx, pod)
	if err != nil {
		return failed(err)
	}
	if vmi != nil && v.Answer == eviction.Allow && pod.Annotations[contract.KeyEvictionPolicy] == "" {
		v = eviction.DecideInstance(vmi, pod)
	}
	switch {
	case v.Answer == eviction.Allow:
		return ctrladmission.Allowed("")
	case v.Answer == eviction.Refuse:
		return deny(apierrors.NewForbidden(corev1.Resource("pods/eviction"), req.Name, errors.New(v.Why)))
	case dry: // report what a real request would do
		return ctrladmission.Allowed("").WithWarnings(v.Why)
	case v.Evacuate:
		if err := eviction.Evacuate(ctx, g.client, vmi, pod.Spec.NodeName); err != nil {
			return failed(err)
		}
	case v.Hibernate:
		if err := eviction.Hibernate(ctx, g.client, pod); err != nil {
			return failed(fmt.Errorf("tell VM of pod %s to hibernate: %w", req.Name, err))
		}
	}
	// No retry delay is suggested, because clients would wait for it silently. kubectl drain prints the reason and retries
	// after five seconds.
	return deny(apierrors.NewTooManyRequests(v.Why, 0))
}

// instance returns the VirtualMachineInstance whose VM pod is; nil if there is none.
func (g *evictionGuard) instance(ctx context.Context, pod *corev1.Pod) (*v1.VirtualMachineInstance, error) {
	owner := metav1.GetControllerOf(pod)
	if !g.machines || owner == nil || owner.Kind != v1.VirtualMachineInstanceGroupVersionKind.Kind || !kubevirt.IsLauncher(pod) {
		return nil, nil
	}
	vmi := &v1.VirtualMachineInstance{}
	err := g.client.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: owner.Name}, vmi)
	if apierrors.IsNotFound(err) || err == nil && vmi.UID != owner.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("get VirtualMachineInstance %s: %w", owner.Name, err)
	}
	return vmi, nil
}

// dryRun reports whether the request is a dry run. kubectl drain sets dryRun in the eviction, other clients in the request.
func dryRun(req ctrladmission.Request) (bool, error) {
	if req.DryRun != nil && *req.DryRun {
		return true, nil
	}
	var e policyv1.Eviction
	if len(req.Object.Raw) > 0 {
		if err := json.Unmarshal(req.Object.Raw, &e); err != nil {
			return false, err
		}
	}
	return e.DeleteOptions != nil && len(e.DeleteOptions.DryRun) > 0, nil
}
