package convert

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
)

// Static reports whether pod represents an existing machine that no node creates, starts or stops.
func Static(pod *corev1.Pod) bool {
	return pod.Annotations[contract.KeyMode] == string(contract.ModeStatic)
}

// checkStatic returns what prevents the machine of a static pod from being adopted. It ignores most of what the pod says of
// containers, because nothing of it runs. It refuses only settings that would never take effect although somebody waits for
// them.
func checkStatic(pod *corev1.Pod) field.ErrorList {
	ask, err := contract.ParseVMSpec(pod.Annotations)
	errs := badKeys(err)
	runtime, err := contract.ParseVMRuntime(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	const why = "mode static adopts an existing machine and needs this annotation"
	if runtime.ID == "" {
		errs = append(errs, field.Required(annotationPath(contract.KeyID), why))
	}
	if pod.Annotations[contract.KeyIP] == "" {
		errs = append(errs, field.Required(annotationPath(contract.KeyIP), why))
	}
	no := func(when bool, path *field.Path, why string) {
		if when {
			errs = append(errs, field.Forbidden(path, why))
		}
	}
	no(ask.Managed, annotationPath(contract.KeyManaged), "a node cannot manage a static VM")
	no(contract.Hibernate(pod.Annotations), annotationPath(contract.KeyHibernate), "a node cannot hibernate a static VM")
	no(len(pod.Spec.Containers) > 1 || len(pod.Spec.InitContainers) > 0, field.NewPath("spec", "containers"), "a pod of a static VM must have one container and no init containers")
	no(pod.Spec.ActiveDeadlineSeconds != nil, field.NewPath("spec", "activeDeadlineSeconds"), "a node cannot stop a static VM")
	for i := range pod.Spec.Containers {
		c, path := &pod.Spec.Containers[i], field.NewPath("spec", "containers").Index(i)
		const foreign = "a static VM does not run the containers of the pod; its readiness is checked with ICMP, or on the TCP port of the annotation probe-port"
		no(c.ReadinessProbe != nil, path.Child("readinessProbe"), foreign)
		no(c.LivenessProbe != nil, path.Child("livenessProbe"), foreign)
		no(c.StartupProbe != nil, path.Child("startupProbe"), foreign)
		no(c.Lifecycle != nil, path.Child("lifecycle"), foreign)
	}
	return errs
}
