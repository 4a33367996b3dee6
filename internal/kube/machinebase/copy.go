package machinebase

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	v1 "kubevirt.io/api/core/v1"
	api "kubevirt.io/api/instancetype"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Label is on all copies. Its value is the kind of what is copied.
const Label = api.ControllerRevisionObjectKindLabel

// Capture makes the copies that vm lacks, and returns what its status says of them; nil for a part that it has not. The name of a copy depends
// on the machine, the object and the object's generation: it makes no second one when it is repeated.
// Errors: Conflict if a ControllerRevision of somebody else has the name; else of the API server. Preconditions: nothing is missing.
func (f Finder) Capture(ctx context.Context, to client.Writer, vm *v1.VirtualMachine, found Found) (instancetype, preference *v1.InstancetypeStatusRef, err error) {
	if instancetype, err = f.capture(ctx, to, vm, found.instancetype); err != nil {
		return nil, nil, err
	}
	preference, err = f.capture(ctx, to, vm, found.preference)
	return instancetype, preference, err
}

func (f Finder) capture(ctx context.Context, to client.Writer, vm *v1.VirtualMachine, s source) (*v1.InstancetypeStatusRef, error) {
	if s.object == nil {
		return s.ref, nil
	}
	revision, err := revisionOf(vm, s.object)
	if err != nil {
		return nil, err
	}
	ref := s.ref.DeepCopy()
	ref.ControllerRevisionRef = &v1.ControllerRevisionRef{Name: revision.Name}
	err = to.Create(ctx, revision)
	if !apierrors.IsAlreadyExists(err) {
		if err != nil {
			err = fmt.Errorf("copy %s %s for VirtualMachine %s: %w", s.ref.Kind, s.ref.Name, vm.Name, err)
		}
		return ref, err
	}
	there := &appsv1.ControllerRevision{}
	if err := f.Live.Get(ctx, client.ObjectKeyFromObject(revision), there); err != nil {
		return nil, fmt.Errorf("read ControllerRevision %s: %w", revision.Name, err)
	}
	has, err := decode(there)
	if err != nil || !metav1.IsControlledBy(there, vm) || !apiequality.Semantic.DeepEqual(has, bare(s.object)) {
		return nil, errdefs.Conflictf("the ControllerRevision %s exists and is not the copy that VirtualMachine %s made; delete it", revision.Name, vm.Name)
	}
	return ref, nil
}

// bare returns o without what the API server and others have noted on it.
func bare(o client.Object) client.Object {
	kind := o.GetObjectKind().GroupVersionKind().Kind
	out := newObject(kind)
	if spec := instancetypeSpec(o); spec != nil {
		spec.DeepCopyInto(instancetypeSpec(out))
	} else {
		preferenceSpec(o).DeepCopyInto(preferenceSpec(out))
	}
	out.GetObjectKind().SetGroupVersionKind(v1beta1.SchemeGroupVersion.WithKind(kind))
	out.SetName(o.GetName())
	out.SetNamespace(o.GetNamespace())
	out.SetUID(o.GetUID())
	out.SetGeneration(o.GetGeneration())
	return out
}

// revisionOf returns the copy of an instancetype or a preference, as KubeVirt has it.
func revisionOf(vm *v1.VirtualMachine, o client.Object) (*appsv1.ControllerRevision, error) {
	kind := o.GetObjectKind().GroupVersionKind().Kind
	data, err := json.Marshal(bare(o))
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kind, o.GetName(), err)
	}
	generation := fmt.Sprint(o.GetGeneration())
	sum := sha256.Sum256([]byte(strings.Join([]string{string(vm.UID), string(o.GetUID()), generation}, "/")))
	begin := vm.Name + "-" + o.GetName()
	begin = strings.TrimRight(begin[:min(len(begin), 200)], ".-")
	return &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Name: begin + "-" + v1beta1.SchemeGroupVersion.Version + "-" + hex.EncodeToString(sum[:])[:16], Namespace: vm.Namespace,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(vm, v1.VirtualMachineGroupVersionKind)},
			Labels: map[string]string{
				api.ControllerRevisionObjectGenerationLabel: generation,
				Label:                                    kind,
				api.ControllerRevisionObjectNameLabel:    kubevirt.ID(o.GetName()), // a label is shorter than some names
				api.ControllerRevisionObjectUIDLabel:     string(o.GetUID()),
				api.ControllerRevisionObjectVersionLabel: v1beta1.SchemeGroupVersion.Version,
			},
		},
		Data: runtime.RawExtension{Raw: data},
	}, nil
}

// decode returns the object of which a revision is a copy. Errors: Invalid if it is none of ours.
func decode(r *appsv1.ControllerRevision) (client.Object, error) {
	var meta metav1.TypeMeta
	if err := json.Unmarshal(r.Data.Raw, &meta); err != nil {
		return nil, errdefs.Invalidf("it cannot be read: %w", err)
	}
	o := newObject(meta.Kind)
	if o == nil || meta.APIVersion != v1beta1.SchemeGroupVersion.String() {
		return nil, errdefs.Invalidf("it is no copy of an instancetype or a preference in %s", v1beta1.SchemeGroupVersion)
	}
	if err := json.Unmarshal(r.Data.Raw, o); err != nil {
		return nil, errdefs.Invalidf("it cannot be read: %w", err)
	}
	return o, nil
}
