// Package machinebase finds the instancetype and the preference of a VirtualMachine, and keeps a copy of each in a ControllerRevision of
// the machine. So a later change of them does not change the machine.
//
// It only finds and copies; package kubevirt says what a machine becomes with them.
package machinebase

import (
	"cmp"
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	api "kubevirt.io/api/instancetype"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Reasons for which nothing is found, of the condition Failure of a machine.
const (
	ReasonInstancetype = "FailedFindInstancetype"
	ReasonPreference   = "FailedFindPreference"
)

// Finder finds what machines build on.
type Finder struct {
	Client client.Reader // may be cached
	Live   client.Reader // without a cache
}

// Missing says what of a machine's base is not found.
type Missing struct {
	Reason  string
	Message string
	At      *field.Path // in the machine
	Later   bool        // it may still be created; else the machine must change
}

// String returns the message with its path.
func (m Missing) String() string { return m.At.String() + ": " + m.Message }

// Found is what a machine builds on.
type Found struct {
	// Base has kubevirt.Unknown in place of an instancetype that is missing, and no preference if that is missing.
	Base    kubevirt.Base
	Missing []Missing

	instancetype, preference source
}

// source is where a part comes from.
type source struct {
	ref    *v1.InstancetypeStatusRef // for the status of the machine; nil: the machine has no such part
	object client.Object             // what is to be copied; nil: ref names the copy
}

// Find returns what vm builds on: the copies that it has, else the objects that it names. Errors: of the API server only.
func (f Finder) Find(ctx context.Context, vm *v1.VirtualMachine) (found Found, err error) {
	if m := vm.Spec.Instancetype; m != nil {
		if found.Base.Instancetype, found.instancetype, err = find(ctx, f, lookup[v1beta1.VirtualMachineInstancetypeSpec]{
			vm: vm, at: field.NewPath("spec", "instancetype"), matcher: m, status: vm.Status.InstancetypeRef, reason: ReasonInstancetype,
			kind: kubevirt.InstancetypeKind, spec: instancetypeSpec, nameLabel: api.DefaultInstancetypeLabel, kindLabel: api.DefaultInstancetypeKindLabel,
		}, &found.Missing); err != nil {
			return Found{}, err
		}
		found.Base.Replaces = found.Base.Instancetype != nil && m.InferFromVolume != "" && ignores(m)
		if found.instancetype.ref == nil && len(found.Missing) > 0 {
			kind, name := kubevirt.InstancetypeKind(m.Kind), cmp.Or(m.Name, m.InferFromVolume)
			found.Base.Instancetype = kubevirt.Unknown(kind, name)
			found.Base.Replaces = ignores(m)
		}
	}
	if m := vm.Spec.Preference; m != nil {
		found.Base.Preference, found.preference, err = find(ctx, f, lookup[v1beta1.VirtualMachinePreferenceSpec]{
			vm: vm, at: field.NewPath("spec", "preference"), matcher: m, status: vm.Status.PreferenceRef, reason: ReasonPreference,
			kind: kubevirt.PreferenceKind, spec: preferenceSpec, nameLabel: api.DefaultPreferenceLabel, kindLabel: api.DefaultPreferenceKindLabel,
		}, &found.Missing)
	}
	return found, err
}

// lookup is what find needs to know of a part.
type lookup[S any] struct {
	vm      *v1.VirtualMachine
	at      *field.Path // of the reference
	matcher v1.Matcher
	status  *v1.InstancetypeStatusRef // what the machine has
	reason  string
	kind    func(string) string    // the name of the kind, "" if it is none
	spec    func(client.Object) *S // of an object; nil if it is of another kind

	nameLabel, kindLabel string // of a claim, for inferFromVolume
}

// find finds one part of a machine's base. It is nil if it is missing, or if it may be.
func find[S any](ctx context.Context, f Finder, l lookup[S], missing *[]Missing) (*kubevirt.Part[S], source, error) {
	m := l.matcher
	ref := &v1.InstancetypeStatusRef{Name: m.GetName(), Kind: l.kind(m.GetKind()), InferFromVolume: m.GetInferFromVolume(), InferFromVolumeFailurePolicy: m.GetInferFromVolumeFailurePolicy()}
	miss := func(at *field.Path, format string, args ...any) (*kubevirt.Part[S], source, error) {
		*missing = append(*missing, Missing{Reason: l.reason, Message: fmt.Sprintf(format, args...), At: at})
		return nil, source{}, nil
	}
	wait := func(format string, args ...any) (*kubevirt.Part[S], source, error) {
		*missing = append(*missing, Missing{Reason: l.reason, Message: fmt.Sprintf(format, args...), At: l.at, Later: true})
		return nil, source{}, nil
	}
	if ref.Kind == "" || (ref.Name == "") == (ref.InferFromVolume == "") {
		return wait("it names nothing that can be found") // kubevirt.CheckMachine says what must change
	}
	copied := m.GetRevisionName()
	if copied == "" && l.status != nil && l.status.ControllerRevisionRef != nil && same(ref, l.status) {
		copied = l.status.ControllerRevisionRef.Name
		ref.Name, ref.Kind = l.status.Name, l.status.Kind
	}
	if copied != "" {
		ref.ControllerRevisionRef = &v1.ControllerRevisionRef{Name: copied}
		revision := &appsv1.ControllerRevision{}
		if ok, err := f.get(ctx, client.ObjectKey{Namespace: l.vm.Namespace, Name: copied}, revision); err != nil {
			return nil, source{}, err
		} else if !ok {
			return wait("the ControllerRevision %s, which is the machine's copy, does not exist; name another object, or set revisionName to a copy that exists", copied)
		}
		o, err := decode(revision)
		if err != nil {
			return miss(l.at.Child("revisionName"), "the ControllerRevision %s: %v", copied, err)
		}
		kind := o.GetObjectKind().GroupVersionKind().Kind
		spec := l.spec(o)
		if spec == nil || ref.Name != "" && (ref.Name != o.GetName() || ref.Kind != kind) {
			return miss(l.at.Child("revisionName"), "the ControllerRevision %s is a copy of %s %s; change revisionName with the name", copied, kind, o.GetName())
		}
		ref.Name, ref.Kind = o.GetName(), kind
		return &kubevirt.Part[S]{Kind: kind, Name: o.GetName(), Spec: *spec}, source{ref: ref}, nil
	}
	if ref.InferFromVolume != "" {
		at := l.at.Child("inferFromVolume")
		labels, why, later, err := f.labels(ctx, l.vm, ref.InferFromVolume)
		if err != nil {
			return nil, source{}, err
		}
		if why == "" && labels[l.nameLabel] == "" {
			why = fmt.Sprintf("the claim of volume %s has no label %s", ref.InferFromVolume, l.nameLabel)
		}
		switch {
		case why == "":
		case later:
			return wait("%s", why)
		case ignores(m):
			return nil, source{}, nil
		default:
			return miss(at, "%s; give a name, or set inferFromVolumeFailurePolicy to %s", why, v1.IgnoreInferFromVolumeFailure)
		}
		if ref.Name, ref.Kind = labels[l.nameLabel], l.kind(labels[l.kindLabel]); ref.Kind == "" {
			return miss(at, "the label %s of the claim of volume %s is %q, which is no kind of it", l.kindLabel, ref.InferFromVolume, labels[l.kindLabel])
		}
	}
	o, key := newObject(ref.Kind), client.ObjectKey{Name: ref.Name}
	if o == nil {
		return nil, source{}, fmt.Errorf("the kind %s is not served", ref.Kind)
	}
	if namespaced(ref.Kind) {
		key.Namespace = l.vm.Namespace
	}
	if ok, err := f.get(ctx, key, o); err != nil {
		return nil, source{}, err
	} else if !ok {
		return wait("the %s %s does not exist; create it", ref.Kind, ref.Name)
	}
	o.GetObjectKind().SetGroupVersionKind(v1beta1.SchemeGroupVersion.WithKind(ref.Kind))
	return &kubevirt.Part[S]{Kind: ref.Kind, Name: ref.Name, Spec: *l.spec(o)}, source{ref: ref, object: o}, nil
}

// same reports whether the status is about what the machine names.
func same(named, has *v1.InstancetypeStatusRef) bool {
	if named.InferFromVolume != has.InferFromVolume {
		return false
	}
	return named.InferFromVolume != "" || named.Name == has.Name && named.Kind == has.Kind
}

func ignores(m v1.Matcher) bool {
	p := m.GetInferFromVolumeFailurePolicy()
	return p != nil && *p == v1.IgnoreInferFromVolumeFailure
}

// labels returns the labels of the claim of a volume. why says why there are none; wait: because the claim does not exist yet.
func (f Finder) labels(ctx context.Context, vm *v1.VirtualMachine, volume string) (labels map[string]string, why string, wait bool, err error) {
	if vm.Spec.Template == nil {
		return nil, "the machine has no template", false, nil
	}
	for _, v := range vm.Spec.Template.Spec.Volumes {
		if v.Name != volume {
			continue
		}
		name := kubevirt.ClaimOf(&v)
		if name == "" {
			return nil, fmt.Sprintf("volume %s is neither a dataVolume nor a persistentVolumeClaim, whose labels would say it", volume), false, nil
		}
		if t := template(vm, &v); t != nil { // its claim is made only after the machine has its instancetype
			if t.Spec.Source == nil || t.Spec.Source.PVC == nil || len(t.Labels) > 0 {
				return t.Labels, "", false, nil
			}
			name = t.Spec.Source.PVC.Name
		}
		claim, key := &corev1.PersistentVolumeClaim{}, client.ObjectKey{Namespace: vm.Namespace, Name: name}
		err := f.Live.Get(ctx, key, claim)
		if apierrors.IsNotFound(err) {
			return nil, fmt.Sprintf("the claim %s of volume %s does not exist; create it", key.Name, volume), true, nil
		}
		if err != nil {
			err = fmt.Errorf("read the claim %s of VirtualMachine %s: %w", key, vm.Name, err)
		}
		return claim.Labels, "", false, err
	}
	return nil, fmt.Sprintf("the machine has no volume %s", volume), false, nil
}

// template returns the template of the DataVolume that v is, nil if vm has none.
func template(vm *v1.VirtualMachine, v *v1.Volume) *v1.DataVolumeTemplateSpec {
	for i := range vm.Spec.DataVolumeTemplates {
		if t := &vm.Spec.DataVolumeTemplates[i]; v.DataVolume != nil && v.DataVolume.Name == t.Name {
			return t
		}
	}
	return nil
}

// get reads an object; a cache may not have heard of one that was just created.
func (f Finder) get(ctx context.Context, key client.ObjectKey, into client.Object) (bool, error) {
	for _, from := range []client.Reader{f.Client, f.Live} {
		err := from.Get(ctx, key, into)
		if err == nil {
			return true, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("read %T %s: %w", into, key, err)
		}
	}
	return false, nil
}

// namespaced reports whether objects of the kind have a namespace.
func namespaced(kind string) bool {
	return kind == kubevirt.KindInstancetype || kind == kubevirt.KindPreference
}

func newObject(kind string) client.Object {
	switch kind {
	case kubevirt.KindInstancetype:
		return &v1beta1.VirtualMachineInstancetype{}
	case kubevirt.KindClusterInstancetype:
		return &v1beta1.VirtualMachineClusterInstancetype{}
	case kubevirt.KindPreference:
		return &v1beta1.VirtualMachinePreference{}
	case kubevirt.KindClusterPreference:
		return &v1beta1.VirtualMachineClusterPreference{}
	}
	return nil
}

func instancetypeSpec(o client.Object) *v1beta1.VirtualMachineInstancetypeSpec {
	switch o := o.(type) {
	case *v1beta1.VirtualMachineInstancetype:
		return &o.Spec
	case *v1beta1.VirtualMachineClusterInstancetype:
		return &o.Spec
	}
	return nil
}

func preferenceSpec(o client.Object) *v1beta1.VirtualMachinePreferenceSpec {
	switch o := o.(type) {
	case *v1beta1.VirtualMachinePreference:
		return &o.Spec
	case *v1beta1.VirtualMachineClusterPreference:
		return &o.Spec
	}
	return nil
}
