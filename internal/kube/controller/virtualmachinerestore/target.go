package virtualmachinerestore

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// lastRestore is KubeVirt's annotation of what a restore has made or changed.
const lastRestore = "restore.kubevirt.io/lastRestoreUID"

// mark is the value of lastRestore.
func mark(r *v1beta1.VirtualMachineRestore) string { return r.Name + "-" + string(r.UID) }

// Annotations of a claim that say how its volume was made begin with these. A new claim has its own.
var ofVolumes = []string{"pv.kubernetes.io", "volume.beta.kubernetes.io", "volume.kubernetes.io", "cdi.kubevirt.io", "k8s.io/CloneRequest", "k8s.io/CloneOf", "restore.kubevirt.io"}

// volumes returns what becomes of the volumes of a content. Names depend on the restore only.
func volumes(r *v1beta1.VirtualMachineRestore, content *v1beta1.VirtualMachineSnapshotContent) (all []v1beta1.VolumeRestore) {
	for _, b := range content.Spec.VolumeBackups {
		if b.VolumeSnapshotName == nil {
			continue
		}
		all = append(all, v1beta1.VolumeRestore{VolumeName: b.VolumeName, PersistentVolumeClaimName: claimName(r, b.VolumeName), VolumeSnapshotName: *b.VolumeSnapshotName})
	}
	return all
}

func claimName(r *v1beta1.VirtualMachineRestore, volume string) string {
	if o := override(r, volume); o != nil && o.RestoreName != "" {
		return o.RestoreName
	}
	if p := r.Spec.VolumeRestorePolicy; p != nil && *p == v1beta1.VolumeRestorePolicyPrefixTargetName {
		return r.Spec.Target.Name + "-" + volume
	}
	return "restore-" + string(r.UID) + "-" + volume
}

func override(r *v1beta1.VirtualMachineRestore, volume string) *v1beta1.VolumeRestoreOverride {
	for i := range r.Spec.VolumeRestoreOverrides {
		if o := &r.Spec.VolumeRestoreOverrides[i]; o.VolumeName == volume {
			return o
		}
	}
	return nil
}

// claim returns the claim that is made of a volume of the snapshot. owner, if not nil, is the machine with which it goes.
func claim(r *v1beta1.VirtualMachineRestore, b *v1beta1.VolumeBackup, size *corev1.PersistentVolumeClaimSpec, owner *v1.VirtualMachine) *corev1.PersistentVolumeClaim {
	was := &b.PersistentVolumeClaim
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: claimName(r, b.VolumeName), Namespace: r.Namespace, Labels: maps.Clone(was.Labels), Annotations: maps.Clone(was.Annotations)},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: was.Spec.AccessModes, Resources: size.Resources, StorageClassName: was.Spec.StorageClassName, VolumeMode: was.Spec.VolumeMode,
			DataSource: &corev1.TypedLocalObjectReference{APIGroup: new(volumesnapshotv1.GroupName), Kind: "VolumeSnapshot", Name: *b.VolumeSnapshotName},
		},
	}
	maps.DeleteFunc(c.Annotations, func(key, _ string) bool {
		return slices.ContainsFunc(ofVolumes, func(p string) bool { return strings.HasPrefix(key, p) })
	})
	if o := override(r, b.VolumeName); o != nil {
		for k, v := range o.Labels {
			metav1.SetMetaDataLabel(&c.ObjectMeta, k, v)
		}
		for k, v := range o.Annotations {
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, k, v)
		}
	}
	metav1.SetMetaDataAnnotation(&c.ObjectMeta, lastRestore, mark(r))
	if p := r.Spec.VolumeOwnershipPolicy; owner != nil && (p == nil || *p != v1beta1.VolumeOwnershipPolicyNone) {
		c.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, v1.VirtualMachineGroupVersionKind)}
	}
	return c
}

// restoredSpec returns the spec of the snapshot with the new claims, and with the machine's own copies of its instancetype and its preference.
func restoredSpec(r *v1beta1.VirtualMachineRestore, content *v1beta1.VirtualMachineSnapshotContent) v1.VirtualMachineSpec {
	spec := *content.Spec.Source.VirtualMachine.Spec.DeepCopy()
	gone := map[string]bool{}
	for _, n := range volumes(r, content) {
		for i := range spec.Template.Spec.Volumes {
			v := &spec.Template.Spec.Volumes[i]
			if v.Name != n.VolumeName || kubevirt.ClaimOf(v) == "" {
				continue
			}
			if v.DataVolume != nil { // the claim is restored, not what had filled it
				gone[v.DataVolume.Name] = true
				v.VolumeSource = v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{}}
			}
			v.PersistentVolumeClaim.ClaimName = n.PersistentVolumeClaimName
		}
	}
	spec.DataVolumeTemplates = slices.DeleteFunc(spec.DataVolumeTemplates, func(t v1.DataVolumeTemplateSpec) bool { return gone[t.Name] })
	if m := spec.Instancetype; m != nil && m.RevisionName != "" {
		m.RevisionName = copyName(r, "instancetype")
	}
	if m := spec.Preference; m != nil && m.RevisionName != "" {
		m.RevisionName = copyName(r, "preference")
	}
	return spec
}

func copyName(r *v1beta1.VirtualMachineRestore, of string) string {
	return "vmrestore-" + string(r.UID) + "-" + of
}

// changed returns the target with the spec of the snapshot. It starts and stops as before.
func changed(r *v1beta1.VirtualMachineRestore, target *v1.VirtualMachine, content *v1beta1.VirtualMachineSnapshotContent) *v1.VirtualMachine {
	next := target.DeepCopy()
	next.Spec = restoredSpec(r, content)
	next.Spec.Running, next.Spec.RunStrategy = target.Spec.Running, target.Spec.RunStrategy
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, lastRestore, mark(r))
	return next
}

// created returns a new machine with the spec of the snapshot, which is stopped. Errors: Invalid if the patches do not fit.
func created(r *v1beta1.VirtualMachineRestore, content *v1beta1.VirtualMachineSnapshotContent) (*v1.VirtualMachine, error) {
	from := content.Spec.Source.VirtualMachine
	halted := v1.RunStrategyHalted
	vm := &v1.VirtualMachine{
		ObjectMeta: metav1.ObjectMeta{Labels: maps.Clone(from.Labels), Annotations: maps.Clone(from.Annotations)},
		Spec:       restoredSpec(r, content),
	}
	vm.Spec.Running, vm.Spec.RunStrategy = nil, &halted
	delete(vm.Annotations, "kubectl.kubernetes.io/last-applied-configuration") // of another object
	vm, err := patched(vm, r.Spec.Patches)
	if err != nil {
		return nil, err
	}
	vm.Name, vm.Namespace = r.Spec.Target.Name, r.Namespace
	metav1.SetMetaDataAnnotation(&vm.ObjectMeta, lastRestore, mark(r))
	return vm, nil
}

// patched applies JSON patches to a machine: operations on its labels, its annotations and its spec.
func patched(vm *v1.VirtualMachine, patches []string) (*v1.VirtualMachine, error) {
	if len(patches) == 0 {
		return vm, nil
	}
	text, err := json.Marshal(vm)
	if err != nil {
		return nil, fmt.Errorf("encode VirtualMachine %s: %w", vm.Name, err)
	}
	for i, p := range patches {
		at := fmt.Sprintf("spec.patches[%d]", i)
		operation, err := jsonpatch.DecodePatch([]byte("[" + p + "]"))
		if err != nil {
			return nil, errdefs.Invalidf("%s is no operation of a JSON patch: %w", at, err)
		}
		for _, o := range operation {
			path, err := o.Path()
			if err != nil || !strings.HasPrefix(path, "/spec/") && !strings.HasPrefix(path, "/metadata/labels") && !strings.HasPrefix(path, "/metadata/annotations") {
				return nil, errdefs.Invalidf("%s must have a path below /spec/, /metadata/labels or /metadata/annotations", at)
			}
		}
		if text, err = operation.Apply(text); err != nil {
			return nil, errdefs.Invalidf("%s does not fit the machine: %w", at, err)
		}
	}
	out := &v1.VirtualMachine{}
	if err := json.Unmarshal(text, out); err != nil {
		return nil, errdefs.Invalidf("with spec.patches the machine cannot be read: %w", err)
	}
	return out, nil
}

// check says what of a restore can never be done, "" if nothing.
func check(r *v1beta1.VirtualMachineRestore, content *v1beta1.VirtualMachineSnapshotContent) string {
	names := map[string]bool{}
	for _, v := range volumes(r, content) {
		if why := validation.IsDNS1123Subdomain(v.PersistentVolumeClaimName); len(why) > 0 {
			return fmt.Sprintf("%q cannot be the name of the claim of volume %s: %s", v.PersistentVolumeClaimName, v.VolumeName, why[0])
		}
		if names[v.PersistentVolumeClaimName] {
			return fmt.Sprintf("two volumes would have the claim %s; change spec.volumeRestoreOverrides", v.PersistentVolumeClaimName)
		}
		names[v.PersistentVolumeClaimName] = true
	}
	for i, o := range r.Spec.VolumeRestoreOverrides {
		if !slices.ContainsFunc(content.Spec.VolumeBackups, func(b v1beta1.VolumeBackup) bool { return b.VolumeName == o.VolumeName }) {
			return fmt.Sprintf("spec.volumeRestoreOverrides[%d].volumeName: the snapshot has no volume %q", i, o.VolumeName)
		}
	}
	if m := content.Spec.Source.VirtualMachine; m == nil || m.Spec.Template == nil {
		return "the snapshot has no machine with a template"
	}
	return ""
}
