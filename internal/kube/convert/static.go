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
	const why = "mode static adopts a machine that is there already, and needs to be told of it"
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
	no(ask.Managed, annotationPath(contract.KeyManaged), "a static VM is not the node's to manage")
	no(contract.Hibernate(pod.Annotations), annotationPath(contract.KeyHibernate), "the node cannot put a static VM to sleep")
	no(len(pod.Spec.Containers) > 1 || len(pod.Spec.InitContainers) > 0, field.NewPath("spec", "containers"), "a static VM stands in for one container")
	no(pod.Spec.ActiveDeadlineSeconds != nil, field.NewPath("spec", "activeDeadlineSeconds"), "the node cannot end a static VM")
	for i := range pod.Spec.Containers {
		c, path := &pod.Spec.Containers[i], field.NewPath("spec", "containers").Index(i)
		const foreign = "nothing of the pod runs in a static VM; its readiness is asked by ICMP, or on the annotation's probe-port"
		no(c.ReadinessProbe != nil, path.Child("readinessProbe"), foreign)
		no(c.LivenessProbe != nil, path.Child("livenessProbe"), foreign)
		no(c.StartupProbe != nil, path.Child("startupProbe"), foreign)
		no(c.Lifecycle != nil, path.Child("lifecycle"), foreign)
	}
	return errs
}
