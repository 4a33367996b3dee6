package kubevirt

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
)

// PoolKind is the kind of a VirtualMachinePool.
var PoolKind = poolv1.SchemeGroupVersion.WithKind(poolv1.VirtualMachinePoolKind)

// PoolSelector returns what the machines of a pool have in common. Without a selector it matches nothing.
func PoolSelector(pool *poolv1.VirtualMachinePool) (labels.Selector, error) {
	if emptySelector(pool.Spec.Selector) {
		return labels.Nothing(), nil
	}
	return metav1.LabelSelectorAsSelector(pool.Spec.Selector)
}

func emptySelector(s *metav1.LabelSelector) bool {
	return s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0
}

// CheckPool says what of a VirtualMachinePool Cocoon refuses, apart from its machines; see PoolTemplate.
func CheckPool(pool *poolv1.VirtualMachinePool) (errs field.ErrorList) {
	spec, at := &pool.Spec, field.NewPath("spec")
	if n := spec.Replicas; n != nil && *n < 0 {
		errs = append(errs, field.Invalid(at.Child("replicas"), *n, "must be at least 0"))
	}
	if emptySelector(spec.Selector) {
		errs = append(errs, field.Required(at.Child("selector"), "name a label of the template"))
	}
	errs = append(errs, metavalidation.ValidateLabelSelector(spec.Selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	if t, of := spec.VirtualMachineTemplate, at.Child("virtualMachineTemplate"); t == nil {
		errs = append(errs, field.Required(of, ""))
	} else {
		of = of.Child("metadata", "labels")
		errs = append(errs, metavalidation.ValidateLabels(t.ObjectMeta.Labels, of)...)
		if s, err := PoolSelector(pool); err == nil && !s.Matches(labels.Set(t.ObjectMeta.Labels)) && len(errs) == 0 {
			errs = append(errs, field.Invalid(of, t.ObjectMeta.Labels, "do not match spec.selector; add its labels"))
		}
	}
	if spec.MaxUnavailable != nil {
		if n, err := intstr.GetScaledValueFromIntOrPercent(spec.MaxUnavailable, 100, true); err != nil || n < 1 || spec.MaxUnavailable.Type == intstr.String && n > 100 {
			errs = append(errs, field.Invalid(at.Child("maxUnavailable"), spec.MaxUnavailable.String(), "must be a number of at least 1, or from 1% to 100%"))
		}
	}
	if spec.Autohealing != nil {
		errs = append(errs, field.Forbidden(at.Child("autohealing"), "a machine that fails keeps its disks; delete it to get a new one with its name"))
	}
	errs = append(errs, checkScaleIn(spec.ScaleInStrategy, at.Child("scaleInStrategy"))...)
	if s, of := spec.UpdateStrategy, at.Child("updateStrategy"); s != nil {
		errs = append(errs, oneStrategy(of, s.Unmanaged != nil, s.Opportunistic != nil, s.Proactive != nil)...)
		if s.Proactive != nil {
			errs = append(errs, checkSelection(s.Proactive.SelectionPolicy, of.Child("proactive", "selectionPolicy"))...)
		}
	}
	return errs
}

func checkScaleIn(s *poolv1.VirtualMachinePoolScaleInStrategy, at *field.Path) (errs field.ErrorList) {
	if s == nil {
		return nil
	}
	errs = oneStrategy(at, s.Unmanaged != nil, s.Opportunistic != nil, s.Proactive != nil)
	keeps := func(state *poolv1.StatePreservation, of *field.Path) {
		if state != nil && *state != poolv1.StatePreservationDisabled {
			errs = append(errs, field.NotSupported(of.Child("statePreservation"), *state, []poolv1.StatePreservation{poolv1.StatePreservationDisabled}))
		}
	}
	if o := s.Opportunistic; o != nil {
		keeps(o.StatePreservation, at.Child("opportunistic"))
	}
	if p := s.Proactive; p != nil {
		keeps(p.StatePreservation, at.Child("proactive"))
		errs = append(errs, checkSelection(p.SelectionPolicy, at.Child("proactive", "selectionPolicy"))...)
	}
	return errs
}

func oneStrategy(at *field.Path, given ...bool) field.ErrorList {
	n := 0
	for _, is := range given {
		if is {
			n++
		}
	}
	if n > 1 {
		return field.ErrorList{field.Forbidden(at, "use only one of unmanaged, opportunistic and proactive")}
	}
	return nil
}

var sortPolicies = []poolv1.VirtualMachinePoolSortPolicy{
	poolv1.VirtualMachinePoolSortPolicyAscendingOrder, poolv1.VirtualMachinePoolSortPolicyDescendingOrder,
	poolv1.VirtualMachinePoolSortPolicyNewest, poolv1.VirtualMachinePoolSortPolicyOldest, poolv1.VirtualMachinePoolSortPolicyRandom,
}

func checkSelection(s *poolv1.VirtualMachinePoolSelectionPolicy, at *field.Path) (errs field.ErrorList) {
	if s == nil {
		return nil
	}
	if s.SortPolicy != nil {
		c := &check{}
		only(c, at.Child("sortPolicy"), *s.SortPolicy, sortPolicies...)
		errs = append(errs, c.errs...)
	}
	if s.Selectors != nil {
		of := at.Child("selectors")
		errs = append(errs, metavalidation.ValidateLabelSelector(s.Selectors.LabelSelector, metavalidation.LabelSelectorValidationOptions{}, of.Child("labelSelector"))...)
		if s.Selectors.NodeSelectorRequirementMatcher != nil {
			errs = append(errs, field.Forbidden(of.Child("nodeSelectorRequirementMatcher"), "all machines of a pool have the node selector of its template; use labelSelector"))
		}
	}
	return errs
}

// PoolTemplate returns a machine of the pool as its template has it, for checks. Preconditions: there is a template.
func PoolTemplate(pool *poolv1.VirtualMachinePool) *v1.VirtualMachine {
	t := pool.Spec.VirtualMachineTemplate.DeepCopy()
	return &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: pool.Namespace, Name: pool.Name, Labels: t.ObjectMeta.Labels, Annotations: t.ObjectMeta.Annotations}, Spec: t.Spec}
}

// InPool makes what a check says of PoolTemplate name the fields of the pool.
func InPool(errs field.ErrorList, warnings []string) (field.ErrorList, []string) {
	const in = "spec.virtualMachineTemplate."
	for _, e := range errs {
		e.Field = in + e.Field
	}
	for i := range warnings {
		warnings[i] = in + warnings[i]
	}
	return errs, warnings
}

// Revision names what the machines of a pool are made from. Preconditions: there is a template.
func Revision(pool *poolv1.VirtualMachinePool) string {
	data, err := json.Marshal([]any{pool.Spec.VirtualMachineTemplate, pool.Spec.NameGeneration})
	if err != nil {
		panic(fmt.Sprintf("kubevirt: template of a pool: %v", err)) // it has been read from JSON
	}
	sum := sha256.Sum256(data)
	const longest = 40 // of the name; a label has at most 63 characters
	return strings.TrimRight(pool.Name[:min(len(pool.Name), longest)], ".-") + "-" + hex.EncodeToString(sum[:])[:10]
}

// MachineName is the name of a machine of a pool.
func MachineName(pool *poolv1.VirtualMachinePool, ordinal int) string {
	return pool.Name + "-" + strconv.Itoa(ordinal)
}

// Ordinal returns the ordinal of a machine of a pool, -1 if the name has none.
func Ordinal(pool *poolv1.VirtualMachinePool, machine string) int {
	text, _ := strings.CutPrefix(machine, pool.Name+"-")
	n, err := strconv.Atoi(text)
	if err != nil || MachineName(pool, n) != machine {
		return -1
	}
	return n
}

// PoolMachine returns the machine of a pool with the ordinal. It has its finalizer from the start, which saves a write. Preconditions: the pool
// is not refused.
func PoolMachine(pool *poolv1.VirtualMachinePool, ordinal int) *v1.VirtualMachine {
	vm := PoolTemplate(pool)
	vm.Name = MachineName(pool, ordinal)
	vm.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pool, PoolKind)}
	vm.Finalizers = []string{v1.VirtualMachineControllerFinalizer}
	revision := Revision(pool)
	labelled := func(m map[string]string) map[string]string {
		if m = maps.Clone(m); m == nil {
			m = map[string]string{}
		}
		m[v1.VirtualMachinePoolRevisionName] = revision
		return m
	}
	vm.Labels, vm.Spec.Template.ObjectMeta.Labels = labelled(vm.Labels), labelled(vm.Spec.Template.ObjectMeta.Labels)
	appendOrdinal(&vm.Spec, pool.Spec.NameGeneration, "-"+strconv.Itoa(ordinal))
	return vm
}

// appendOrdinal gives a machine DataVolumes of its own and, if asked for, ConfigMaps and Secrets.
func appendOrdinal(spec *v1.VirtualMachineSpec, names *poolv1.VirtualMachinePoolNameGeneration, suffix string) {
	own := map[string]bool{}
	for i := range spec.DataVolumeTemplates {
		own[spec.DataVolumeTemplates[i].Name] = true
		spec.DataVolumeTemplates[i].Name += suffix
	}
	names = cmp.Or(names, &poolv1.VirtualMachinePoolNameGeneration{})
	is := func(b *bool) bool { return b != nil && *b }
	configMaps, secrets := is(names.AppendIndexToConfigMapRefs), is(names.AppendIndexToSecretRefs)
	for i := range spec.Template.Spec.Volumes {
		v := &spec.Template.Spec.Volumes[i].VolumeSource
		switch {
		case v.PersistentVolumeClaim != nil && own[v.PersistentVolumeClaim.ClaimName]:
			v.PersistentVolumeClaim.ClaimName += suffix
		case v.DataVolume != nil && own[v.DataVolume.Name]:
			v.DataVolume.Name += suffix
		case v.ConfigMap != nil && configMaps:
			v.ConfigMap.Name += suffix
		case v.Secret != nil && secrets:
			v.Secret.SecretName += suffix
		case v.CloudInitNoCloud != nil && secrets:
			appendTo(suffix, v.CloudInitNoCloud.UserDataSecretRef, v.CloudInitNoCloud.NetworkDataSecretRef)
		case v.CloudInitConfigDrive != nil && secrets:
			appendTo(suffix, v.CloudInitConfigDrive.UserDataSecretRef, v.CloudInitConfigDrive.NetworkDataSecretRef)
		}
	}
}

func appendTo(suffix string, refs ...*corev1.LocalObjectReference) {
	for _, r := range refs {
		if r != nil {
			r.Name += suffix
		}
	}
}

// KeepIdentity gives next the UUID and the serial number that vm has, because the guest knows them.
func KeepIdentity(vm, next *v1.VirtualMachine) {
	if vm.Spec.Template == nil || vm.Spec.Template.Spec.Domain.Firmware == nil {
		return
	}
	was, d := vm.Spec.Template.Spec.Domain.Firmware, &next.Spec.Template.Spec.Domain
	if d.Firmware == nil && (was.UUID != "" || was.Serial != "") {
		d.Firmware = &v1.Firmware{}
	}
	if was.UUID != "" {
		d.Firmware.UUID = was.UUID
	}
	if was.Serial != "" {
		d.Firmware.Serial = was.Serial
	}
}
