package admission

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// hibernationChecker refuses CocoonHibernations of pods that cannot hibernate. The schema ensures that a pod is named. A pod
// that does not exist is allowed, because it may be created later.
type hibernationChecker struct {
	decoder ctrladmission.Decoder
	pods    client.Reader
}

// Handle implements admission.Handler.
func (c *hibernationChecker) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	h := &v1.CocoonHibernation{}
	if err := c.decoder.Decode(req, h); err != nil {
		return unreadable(err)
	}
	if h.Spec.Desire != v1.DesireHibernate {
		return ctrladmission.Allowed("")
	}
	pod := &corev1.Pod{}
	err := c.pods.Get(ctx, client.ObjectKey{Namespace: req.Namespace, Name: h.Spec.PodRef.Name}, pod)
	if apierrors.IsNotFound(err) {
		return ctrladmission.Allowed("")
	}
	if err != nil {
		return failed(fmt.Errorf("get pod %s: %w", h.Spec.PodRef.Name, err))
	}
	path, name := field.NewPath("spec", "podRef", "name"), h.Spec.PodRef.Name
	var errs field.ErrorList
	switch {
	case !tolerates(pod.Spec.Tolerations) && !asks(pod):
		errs = append(errs, field.Invalid(path, name, "the pod is not a VM"))
	case convert.Static(pod):
		errs = append(errs, field.Invalid(path, name, "the pod represents a static VM, and no node can hibernate a static VM"))
	}
	return refuse(v1.GroupVersion.WithKind("CocoonHibernation").GroupKind(), h.Name, errs)
}
