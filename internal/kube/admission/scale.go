package admission

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"cocoonstack.io/cocoon/api/contract"
)

// scaleGuard refuses to scale down Deployments and StatefulSets of VMs, because nobody can choose which VMs, with their
// state, are deleted.
type scaleGuard struct {
	decoder ctrladmission.Decoder
	live    client.Reader
}

// workload holds the relevant fields of a Deployment or StatefulSet.
type workload struct {
	replicas    int32
	template    *corev1.PodTemplateSpec
	annotations map[string]string
}

func deployment(d *appsv1.Deployment) workload {
	return workload{orOne(d.Spec.Replicas), &d.Spec.Template, d.Annotations}
}

func statefulSet(s *appsv1.StatefulSet) workload {
	return workload{orOne(s.Spec.Replicas), &s.Spec.Template, s.Annotations}
}

func orOne(n *int32) int32 {
	if n == nil {
		return 1
	}
	return *n
}

func (w workload) vms() bool {
	pod := &corev1.Pod{ObjectMeta: w.template.ObjectMeta, Spec: w.template.Spec}
	return tolerates(pod.Spec.Tolerations) || asks(pod)
}

func (w workload) allowed() bool { return w.annotations[contract.KeyAllowScaleDown] == "true" }

// Handle implements admission.Handler. The old object decides whether the pods are VMs, so that an update cannot evade the
// check by removing the toleration and scaling down at the same time.
func (g *scaleGuard) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	old, now, err := g.read(ctx, req)
	switch {
	case apierrors.IsNotFound(err):
		return ctrladmission.Allowed("")
	case err != nil:
		return failed(err)
	case now.replicas >= old.replicas || !old.vms() || now.allowed():
		return ctrladmission.Allowed("")
	}
	return deny(apierrors.NewForbidden(schema.GroupResource{Group: req.Resource.Group, Resource: req.Resource.Resource}, req.Name, fmt.Errorf(
		"spec.replicas: its pods are VMs; scaling from %d to %d would delete arbitrary VMs with their data; delete the object, use a CocoonSet, or set its annotation %s to true",
		old.replicas, now.replicas, contract.KeyAllowScaleDown)))
}

// read returns the workload before and after the request.
func (g *scaleGuard) read(ctx context.Context, req ctrladmission.Request) (old, now workload, err error) {
	stateful := req.Resource.Resource == "statefulsets"
	if req.SubResource == "scale" {
		var was, is autoscalingv1.Scale
		if err := g.both(req, &was, &is); err != nil {
			return old, now, err
		}
		if is.Spec.Replicas >= was.Spec.Replicas {
			return workload{template: &corev1.PodTemplateSpec{}}, now, nil
		}
		key := client.ObjectKey{Namespace: req.Namespace, Name: req.Name}
		if stateful {
			s := &appsv1.StatefulSet{}
			err = g.live.Get(ctx, key, s)
			old = statefulSet(s)
		} else {
			d := &appsv1.Deployment{}
			err = g.live.Get(ctx, key, d)
			old = deployment(d)
		}
		if err != nil {
			return old, now, fmt.Errorf("get %s %s: %w", req.Resource.Resource, key, err)
		}
		now = old
		old.replicas, now.replicas = was.Spec.Replicas, is.Spec.Replicas
		return old, now, nil
	}
	if stateful {
		was, is := &appsv1.StatefulSet{}, &appsv1.StatefulSet{}
		err = g.both(req, was, is)
		return statefulSet(was), statefulSet(is), err
	}
	was, is := &appsv1.Deployment{}, &appsv1.Deployment{}
	err = g.both(req, was, is)
	return deployment(was), deployment(is), err
}

func (g *scaleGuard) both(req ctrladmission.Request, old, now client.Object) error {
	if err := g.decoder.DecodeRaw(req.OldObject, old); err != nil {
		return err
	}
	return g.decoder.Decode(req, now)
}
