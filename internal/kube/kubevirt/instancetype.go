package kubevirt

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	api "kubevirt.io/api/instancetype"
	"kubevirt.io/api/instancetype/v1beta1"

	"cocoonstack.io/cocoon/internal/vm"
)

// Kinds of instancetypes and preferences.
const (
	KindInstancetype        = "VirtualMachineInstancetype"
	KindClusterInstancetype = "VirtualMachineClusterInstancetype"
	KindPreference          = "VirtualMachinePreference"
	KindClusterPreference   = "VirtualMachineClusterPreference"
)

// Base is what a VirtualMachine builds on. Both parts are nil in a machine that gives all itself.
type Base struct {
	Instancetype *Part[v1beta1.VirtualMachineInstancetypeSpec]
	Preference   *Part[v1beta1.VirtualMachinePreferenceSpec]
	// Replaces reports that the memory of the template only counts if no instancetype is found, because the machine says
	// inferFromVolumeFailurePolicy: Ignore.
	Replaces bool
}

// Part is an object on which a machine builds.
type Part[S any] struct {
	Kind string
	Name string
	Spec S

	unknown bool
}

// Unknown stands for an instancetype that does not exist yet: with it, Unfold says what conflicts with any, and checks no requirements.
func Unknown(kind, name string) *Part[v1beta1.VirtualMachineInstancetypeSpec] {
	p := &Part[v1beta1.VirtualMachineInstancetypeSpec]{Kind: kind, Name: name, unknown: true}
	p.Spec.CPU.Guest, p.Spec.Memory.Guest = 1, resource.MustParse("1Gi")
	return p
}

// InstancetypeKind returns the kind of an instancetype from the ways in which a machine may write it; "" if it is none.
func InstancetypeKind(kind string) string {
	switch strings.ToLower(kind) {
	case api.SingularResourceName, api.PluralResourceName:
		return KindInstancetype
	case "", api.ClusterSingularResourceName, api.ClusterPluralResourceName:
		return KindClusterInstancetype
	}
	return ""
}

// PreferenceKind is InstancetypeKind for preferences.
func PreferenceKind(kind string) string {
	switch strings.ToLower(kind) {
	case api.SingularPreferenceResourceName, api.PluralPreferenceResourceName:
		return KindPreference
	case "", api.ClusterSingularPreferenceResourceName, api.ClusterPluralPreferenceResourceName:
		return KindClusterPreference
	}
	return ""
}

// Annotate notes on an instance which instancetype and preference its machine has.
func (b Base) Annotate(o *metav1.ObjectMeta) {
	if p := b.Instancetype; p != nil {
		key := v1.ClusterInstancetypeAnnotation
		if p.Kind == KindInstancetype {
			key = v1.InstancetypeAnnotation
		}
		metav1.SetMetaDataAnnotation(o, key, p.Name)
	}
	if p := b.Preference; p != nil {
		key := v1.ClusterPreferenceAnnotation
		if p.Kind == KindPreference {
			key = v1.PreferenceAnnotation
		}
		metav1.SetMetaDataAnnotation(o, key, p.Name)
	}
}

var (
	atInstancetype = field.NewPath("spec", "instancetype")
	atPreference   = field.NewPath("spec", "preference")
	atTemplate     = field.NewPath("spec", "template")
	atDomain       = atTemplate.Child("spec", "domain")
)

// Unfold returns vm with everything of base in its template, and without its references to it. vm does not change. The errors are
// conflicts of the template with the instancetype, what Cocoon refuses of it, and requirements of the preference that are not met; the
// warnings name what of base has no effect. Preconditions: vm has a template.
func Unfold(vm *v1.VirtualMachine, base Base) (whole *v1.VirtualMachine, errs field.ErrorList, warnings []string) {
	whole = vm.DeepCopy()
	whole.Spec.Instancetype, whole.Spec.Preference = nil, nil
	whole.Status.InstancetypeRef, whole.Status.PreferenceRef = nil, nil
	errs = checkReferences(&vm.Spec)
	u := &unfolding{base: base, spec: &whole.Spec.Template.Spec, meta: &whole.Spec.Template.ObjectMeta}
	if base.Instancetype != nil {
		if base.Replaces {
			u.spec.Domain.Memory = nil
		}
		u.instancetype(&base.Instancetype.Spec)
	}
	if base.Preference != nil {
		u.preference(&base.Preference.Spec)
	}
	return whole, append(errs, u.errs...), u.warnings
}

// checkReferences checks how a machine names its instancetype and its preference.
func checkReferences(s *v1.VirtualMachineSpec) (errs field.ErrorList) {
	if m := s.Instancetype; m != nil {
		errs = append(errs, checkReference(m, atInstancetype, InstancetypeKind(m.Kind), KindInstancetype, KindClusterInstancetype)...)
	}
	if m := s.Preference; m != nil {
		errs = append(errs, checkReference(m, atPreference, PreferenceKind(m.Kind), KindPreference, KindClusterPreference)...)
	}
	return errs
}

func checkReference(m v1.Matcher, at *field.Path, kind string, kinds ...string) (errs field.ErrorList) {
	if kind == "" {
		errs = append(errs, field.NotSupported(at.Child("kind"), m.GetKind(), kinds))
	}
	volume := m.GetInferFromVolume()
	switch {
	case m.GetName() == "" && volume == "":
		errs = append(errs, field.Required(at.Child("name"), "give name or inferFromVolume"))
	case m.GetName() != "" && volume != "":
		errs = append(errs, field.Forbidden(at.Child("name"), "the volume of inferFromVolume says the name; remove one of the two"))
	}
	if volume != "" && m.GetKind() != "" {
		errs = append(errs, field.Forbidden(at.Child("kind"), "the volume of inferFromVolume says the kind; remove one of the two"))
	}
	policies := []v1.InferFromVolumeFailurePolicy{v1.RejectInferFromVolumeFailure, v1.IgnoreInferFromVolumeFailure}
	if p := m.GetInferFromVolumeFailurePolicy(); p != nil && !slices.Contains(policies, *p) {
		errs = append(errs, field.NotSupported(at.Child("inferFromVolumeFailurePolicy"), *p, policies))
	}
	return errs
}

// unfolding fills the template of a machine.
type unfolding struct {
	base     Base
	spec     *v1.VirtualMachineInstanceSpec
	meta     *metav1.ObjectMeta
	errs     field.ErrorList
	warnings []string
}

// part returns the path of the instancetype or the preference whose reference is at.
func part(at *field.Path, name string) *field.Path { return at.Key(name) }

// conflict refuses a field of the template that the instancetype says.
func (u *unfolding) conflict(when bool, at *field.Path) {
	if when {
		u.errs = append(u.errs, field.Forbidden(at, fmt.Sprintf("conflicts with the instancetype %s, which sets it; remove the field", u.base.Instancetype.Name)))
	}
}

func (u *unfolding) instancetype(t *v1beta1.VirtualMachineInstancetypeSpec) {
	at := part(atInstancetype, u.base.Instancetype.Name)
	errs, warnings := instancetypeRules.judge(t, at)
	u.errs, u.warnings = append(u.errs, errs...), append(u.warnings, warnings...)
	u.conflict(t.NodeSelector != nil && u.spec.NodeSelector != nil, atTemplate.Child("spec", "nodeSelector"))
	u.conflict(t.SchedulerName != "" && u.spec.SchedulerName != "", atTemplate.Child("spec", "schedulerName"))
	if t.NodeSelector != nil {
		u.spec.NodeSelector = maps.Clone(t.NodeSelector)
	}
	if t.SchedulerName != "" {
		u.spec.SchedulerName = t.SchedulerName
	}
	u.cpu(&t.CPU, at.Child("cpu"))
	u.memory(&t.Memory)
	for _, key := range slices.Sorted(maps.Keys(t.Annotations)) {
		old, ok := u.meta.Annotations[key]
		u.conflict(ok && old != t.Annotations[key], atTemplate.Child("metadata", "annotations").Key(key))
		metav1.SetMetaDataAnnotation(u.meta, key, t.Annotations[key])
	}
}

func (u *unfolding) cpu(t *v1beta1.CPUInstancetype, at *field.Path) {
	d := &u.spec.Domain
	for what, list := range map[string]corev1.ResourceList{"limits": d.Resources.Limits, "requests": d.Resources.Requests} {
		_, ok := list[corev1.ResourceCPU]
		u.conflict(ok, atDomain.Child("resources", what, "cpu"))
	}
	if d.CPU == nil {
		d.CPU = &v1.CPU{}
	}
	u.conflict(d.CPU.Sockets != 0, atDomain.Child("cpu", "sockets"))
	u.conflict(d.CPU.Cores != 0, atDomain.Child("cpu", "cores"))
	u.conflict(d.CPU.Threads != 0, atDomain.Child("cpu", "threads"))
	u.conflict(d.CPU.Model != "" && t.Model != nil, atDomain.Child("cpu", "model"))
	if t.Model != nil {
		if err := (vm.CPU{Model: *t.Model}).Validate(); err != nil {
			u.errs = append(u.errs, field.Invalid(at.Child("model"), *t.Model, err.Error()))
		} else {
			d.CPU.Model = *t.Model
		}
	}
	for name, yes := range map[string]*bool{"dedicatedCPUPlacement": t.DedicatedCPUPlacement, "isolateEmulatorThread": t.IsolateEmulatorThread} {
		c := check{}
		c.flag(at.Child(name), yes, true, "a VM cannot have CPUs of its own")
		u.errs = append(u.errs, c.errs...)
	}
	var preference *v1beta1.VirtualMachinePreferenceSpec
	if u.base.Preference != nil {
		preference = &u.base.Preference.Spec
	}
	u.conflict(d.CPU.MaxSockets != 0 && t.MaxSockets != nil, atDomain.Child("cpu", "maxSockets"))
	if t.MaxSockets != nil {
		d.CPU.MaxSockets = *t.MaxSockets
	}
	var why string
	d.CPU.Sockets, d.CPU.Cores, d.CPU.Threads, why = topology(t.Guest, preference)
	if why != "" {
		u.errs = append(u.errs, field.Invalid(at.Child("guest"), t.Guest, why))
	}
}

func (u *unfolding) memory(t *v1beta1.MemoryInstancetype) {
	d := &u.spec.Domain
	for what, list := range map[string]corev1.ResourceList{"limits": d.Resources.Limits, "requests": d.Resources.Requests} {
		_, ok := list[corev1.ResourceMemory]
		u.conflict(ok, atDomain.Child("resources", what, "memory"))
	}
	if d.Memory == nil {
		d.Memory = &v1.Memory{}
	}
	u.conflict(d.Memory.Guest != nil, atDomain.Child("memory", "guest"))
	u.conflict(d.Memory.MaxGuest != nil && t.MaxGuest != nil, atDomain.Child("memory", "maxGuest"))
	u.conflict(d.Memory.Hugepages != nil && t.Hugepages != nil, atDomain.Child("memory", "hugepages"))
	guest := t.Guest.DeepCopy()
	d.Memory.Guest = &guest
	if t.MaxGuest != nil {
		most := t.MaxGuest.DeepCopy()
		d.Memory.MaxGuest = &most
	}
	if t.Hugepages != nil {
		d.Memory.Hugepages = t.Hugepages.DeepCopy()
	}
	if p := min(max(int64(t.OvercommitPercent), 0), 100); p > 0 {
		d.Resources.Requests = maps.Clone(d.Resources.Requests)
		if d.Resources.Requests == nil {
			d.Resources.Requests = corev1.ResourceList{}
		}
		d.Resources.Requests[corev1.ResourceMemory] = *resource.NewQuantity(guest.Value()/100*(100-p)+guest.Value()%100*(100-p)/100, guest.Format)
	}
}

// attribute says of errors about values that the instancetype gave that they are its values.
func (b Base) attribute(errs field.ErrorList) field.ErrorList {
	if b.Instancetype == nil {
		return errs
	}
	at := part(atInstancetype, b.Instancetype.Name)
	for _, e := range errs {
		switch e.Field {
		case atDomain.Child("memory", "guest").String():
			e.Field = at.Child("memory", "guest").String()
		case atDomain.Child("memory", "hugepages", "pageSize").String():
			e.Field = at.Child("memory", "hugepages", "pageSize").String()
		case atDomain.Child("memory", "maxGuest").String():
			e.Field = at.Child("memory", "maxGuest").String()
		case atDomain.Child("cpu", "maxSockets").String():
			e.Field = at.Child("cpu", "maxSockets").String()
		case atDomain.Child("cpu").String():
			e.Field = at.Child("cpu", "guest").String()
		}
	}
	return errs
}
