package kubevirt

import (
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
)

// Selector returns what the instances of a set have in common. Without a selector it matches nothing.
func Selector(set *v1.VirtualMachineInstanceReplicaSet) (labels.Selector, error) {
	if emptySelector(set.Spec.Selector) {
		return labels.Nothing(), nil // an empty one would match, and adopt, all instances of the namespace
	}
	return metav1.LabelSelectorAsSelector(set.Spec.Selector)
}

// CheckReplicaSet is Check for a whole VirtualMachineInstanceReplicaSet.
func CheckReplicaSet(set *v1.VirtualMachineInstanceReplicaSet) (errs field.ErrorList, warnings []string) {
	spec, at := &set.Spec, field.NewPath("spec")
	if n := spec.Replicas; n != nil && *n < 0 {
		errs = append(errs, field.Invalid(at.Child("replicas"), *n, "must be at least 0"))
	}
	selects := at.Child("selector")
	if emptySelector(spec.Selector) {
		errs = append(errs, field.Required(selects, "an empty selector would match all instances of the namespace; name a label of the template"))
	}
	errs = append(errs, metavalidation.ValidateLabelSelector(spec.Selector, metavalidation.LabelSelectorValidationOptions{}, selects)...)
	template := at.Child("template")
	if spec.Template == nil {
		return append(errs, field.Required(template, "")), nil
	}
	meta := template.Child("metadata")
	errs = append(errs, metavalidation.ValidateLabels(spec.Template.ObjectMeta.Labels, meta.Child("labels"))...)
	if selector, err := Selector(set); err == nil && !selector.Empty() && !selector.Matches(labels.Set(spec.Template.ObjectMeta.Labels)) && len(errs) == 0 {
		errs = append(errs, field.Invalid(meta.Child("labels"), spec.Template.ObjectMeta.Labels, "do not match spec.selector; add its labels"))
	}
	errs = append(errs, checkAnnotations(spec.Template.ObjectMeta.Annotations, meta)...)
	more, warnings := Check(&spec.Template.Spec, template.Child("spec"))
	return append(errs, more...), warnings
}

// Instance returns the instance called name that its owner, which is of the kind, makes from a template. It has its finalizer and its
// first phase from the start, which saves a write.
func Instance(owner metav1.Object, kind schema.GroupVersionKind, template *v1.VirtualMachineInstanceTemplateSpec, name string, now time.Time) *v1.VirtualMachineInstance {
	vmi := &v1.VirtualMachineInstance{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: owner.GetNamespace(),
			Labels: maps.Clone(template.ObjectMeta.Labels), Annotations: maps.Clone(template.ObjectMeta.Annotations),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)},
			Finalizers:      []string{v1.VirtualMachineInstanceFinalizer},
		},
		Spec: *template.Spec.DeepCopy(),
	}
	requestMemory(&vmi.Spec)
	SetPhase(&vmi.Status, v1.Pending, now)
	return vmi
}

// Since returns when the instance entered the phase last; zero: it never did.
func Since(vmi *v1.VirtualMachineInstance, phase v1.VirtualMachineInstancePhase) (at time.Time) {
	for _, t := range vmi.Status.PhaseTransitionTimestamps {
		if t.Phase == phase {
			at = t.PhaseTransitionTimestamp.Time
		}
	}
	return at
}
