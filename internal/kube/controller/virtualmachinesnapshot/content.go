package virtualmachinesnapshot

import (
	"context"
	"fmt"
	"maps"
	"slices"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/snapshotclass"
)

// Labels that KubeVirt puts on VolumeSnapshots.
const (
	labelSource    = "snapshot.kubevirt.io/source-vm-name"
	labelNamespace = "snapshot.kubevirt.io/source-vm-namespace"
)

// contentName returns the name of the content of a snapshot.
func contentName(snapshot *v1beta1.VirtualMachineSnapshot) string {
	return "vmsnapshot-content-" + string(snapshot.UID)
}

// look reads what there is of a snapshot. Nothing of it comes from a cache but the snapshot: a snapshot that is in progress is rare, and what it
// decides must be true.
func (r *Reconciler) look(ctx context.Context, snapshot *v1beta1.VirtualMachineSnapshot) (seen, error) {
	x := seen{snapshot: snapshot, now: r.Now()}
	done := snapshot.Status != nil && snapshot.Status.Phase == v1beta1.Succeeded && snapshot.Status.ReadyToUse != nil && *snapshot.Status.ReadyToUse
	key := client.ObjectKey{Namespace: snapshot.Namespace, Name: snapshot.Spec.Source.Name}
	from := r.Live
	if done { // most are, and are looked at again whenever the manager starts
		from = r.Client
	}
	vm := &v1.VirtualMachine{}
	if ok, err := get(ctx, from, key, vm); err != nil {
		return x, err
	} else if ok {
		x.vm = vm
	}
	if done && !x.locked() {
		x.content = &v1beta1.VirtualMachineSnapshotContent{Status: &v1beta1.VirtualMachineSnapshotContentStatus{CreationTime: snapshot.Status.CreationTime}}
		return x, nil
	}
	content := &v1beta1.VirtualMachineSnapshotContent{}
	if ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: snapshot.Namespace, Name: contentName(snapshot)}, content); err != nil {
		return x, err
	} else if ok {
		x.content = content
	}
	if x.vm != nil {
		vmi := &v1.VirtualMachineInstance{}
		if ok, err := get(ctx, r.Live, key, vmi); err != nil {
			return x, err
		} else if ok && metav1.IsControlledBy(vmi, vm) {
			x.vmi = vmi
		}
	}
	var err error
	switch {
	case x.content != nil:
		x.taken, x.obstacle, err = r.volumeSnapshots(ctx, x.content)
	case x.vm != nil && (snapshot.Status == nil || snapshot.Status.Phase != v1beta1.Succeeded && snapshot.Status.Phase != v1beta1.Failed):
		x.volumes, x.obstacle, err = r.volumes(ctx, vm)
	}
	return x, err
}

// get reads an object, which may not exist.
func get(ctx context.Context, from client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	err := from.Get(ctx, key, into)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read %T %s: %w", into, key, err)
	}
	return err == nil, nil
}

// volumeSnapshots returns what exists for each volume of a content.
func (r *Reconciler) volumeSnapshots(ctx context.Context, content *v1beta1.VirtualMachineSnapshotContent) (all []*volumesnapshotv1.VolumeSnapshot, obstacle string, err error) {
	for _, b := range content.Spec.VolumeBackups {
		if b.VolumeSnapshotName == nil {
			continue
		}
		v := &volumesnapshotv1.VolumeSnapshot{}
		ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: content.Namespace, Name: *b.VolumeSnapshotName}, v)
		switch {
		case meta.IsNoMatchError(err):
			all = append(all, nil)
			obstacle = snapshotclass.NoAPI
		case err != nil:
			return nil, "", err
		case !ok:
			all = append(all, nil)
		case !metav1.IsControlledBy(v, content):
			all = append(all, nil)
			obstacle = fmt.Sprintf("the VolumeSnapshot %s exists and is not of this snapshot; delete it", v.Name)
		default:
			all = append(all, v)
		}
	}
	return all, obstacle, nil
}

// volumes returns the volumes of a machine. obstacle says why a snapshot of them cannot be taken now.
func (r *Reconciler) volumes(ctx context.Context, vm *v1.VirtualMachine) (all []volume, obstacle string, err error) {
	if vm.Spec.Template == nil {
		return nil, "", nil
	}
	for i := range vm.Spec.Template.Spec.Volumes {
		v := volume{name: vm.Spec.Template.Spec.Volumes[i].Name}
		name := kubevirt.ClaimOf(&vm.Spec.Template.Spec.Volumes[i])
		if v.excluded = name != "" && kubevirt.Shareable(&vm.Spec.Template.Spec, v.name); v.excluded || name == "" {
			all = append(all, v)
			continue
		}
		claim := &corev1.PersistentVolumeClaim{}
		ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: vm.Namespace, Name: name}, claim)
		switch {
		case err != nil:
			return nil, "", err
		case !ok:
			return nil, fmt.Sprintf("the claim %s of volume %s does not exist; create it", name, v.name), nil
		case claim.DeletionTimestamp != nil:
			return nil, fmt.Sprintf("the claim %s of volume %s is being deleted", name, v.name), nil
		case claim.Status.Phase != corev1.ClaimBound:
			return nil, fmt.Sprintf("the claim %s of volume %s is not bound; start the machine once", name, v.name), nil
		}
		if _, has, why, err := snapshotclass.Of(ctx, r.Live, claim.Spec.StorageClassName); err != nil || why != "" {
			return nil, why, err
		} else if has {
			v.claim = claim
		} else {
			v.excluded = true
		}
		all = append(all, v)
	}
	return all, "", nil
}

// begin creates the content.
func (r *Reconciler) begin(ctx context.Context, x *seen) error {
	content := &v1beta1.VirtualMachineSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{
			Name: contentName(x.snapshot), Namespace: x.snapshot.Namespace,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(x.snapshot, v1beta1.SchemeGroupVersion.WithKind("VirtualMachineSnapshot"))},
		},
		Spec: v1beta1.VirtualMachineSnapshotContentSpec{
			VirtualMachineSnapshotName: &x.snapshot.Name,
			Source:                     v1beta1.SourceSpec{VirtualMachine: machine(x.vm, x.snapshot)},
		},
	}
	for _, v := range x.volumes {
		if v.claim == nil {
			continue
		}
		content.Spec.VolumeBackups = append(content.Spec.VolumeBackups, v1beta1.VolumeBackup{
			VolumeName: v.name, VolumeSnapshotName: ptr("vmsnapshot-" + string(x.snapshot.UID) + "-volume-" + v.name),
			PersistentVolumeClaim: v1beta1.PersistentVolumeClaim{ObjectMeta: described(v.claim.ObjectMeta), Spec: *v.claim.Spec.DeepCopy()},
		})
	}
	if err := r.Client.Create(ctx, content); err != nil { // one that exists already is of an earlier try, and the next look sees it
		return fmt.Errorf("create VirtualMachineSnapshotContent %s: %w", content.Name, err)
	}
	r.Events.Eventf(x.snapshot, content, corev1.EventTypeNormal, ReasonContent, "Snapshot", "created the content %s", content.Name)
	return nil
}

// described returns what of an object's metadata a snapshot keeps.
func described(o metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: o.Name, Namespace: o.Namespace, UID: o.UID, ResourceVersion: o.ResourceVersion, Generation: o.Generation, Labels: maps.Clone(o.Labels), Annotations: maps.Clone(o.Annotations)}
}

// machine returns what of a machine its snapshot keeps. It names the snapshot's own copies of the instancetype and the preference.
func machine(vm *v1.VirtualMachine, snapshot *v1beta1.VirtualMachineSnapshot) *v1beta1.VirtualMachine {
	kept := &v1beta1.VirtualMachine{ObjectMeta: described(vm.ObjectMeta), Spec: *vm.Spec.DeepCopy()}
	if from := revision(vm.Spec.Instancetype, vm.Status.InstancetypeRef); from != "" {
		kept.Spec.Instancetype.RevisionName = copyName(snapshot, "instancetype")
	}
	if from := preferenceRevision(vm); from != "" {
		kept.Spec.Preference.RevisionName = copyName(snapshot, "preference")
	}
	return kept
}

func copyName(snapshot *v1beta1.VirtualMachineSnapshot, of string) string {
	return "vmsnapshot-" + string(snapshot.UID) + "-" + of
}

// revision returns the name of the ControllerRevision with the machine's copy of its instancetype, "" if it has none.
func revision(m *v1.InstancetypeMatcher, has *v1.InstancetypeStatusRef) string {
	switch {
	case m == nil:
		return ""
	case m.RevisionName != "":
		return m.RevisionName
	case has != nil && has.ControllerRevisionRef != nil:
		return has.ControllerRevisionRef.Name
	}
	return ""
}

func preferenceRevision(vm *v1.VirtualMachine) string {
	if p := vm.Spec.Preference; p != nil {
		return revision(&v1.InstancetypeMatcher{RevisionName: p.RevisionName}, vm.Status.PreferenceRef)
	}
	return ""
}

// take makes the copies of the instancetype and the preference, and creates the VolumeSnapshots that are missing.
func (r *Reconciler) take(ctx context.Context, x *seen, s *step) error {
	if err := r.copies(ctx, x); err != nil {
		return err
	}
	if x.freezes() {
		if err := r.Guests.Freeze(ctx, x.pod(), x.freezeTime()); err != nil {
			s.do, s.wait = nothing, freezePause
			s.err(fmt.Sprintf("the file systems of the guest cannot be frozen, so a snapshot of several disks would be of different instants; stop the machine first: %s", err), x.now)
			s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "In error state", x.now)
			return nil
		}
	}
	s.err("", x.now)
	s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Source locked and operation in progress", x.now)
	for i, b := range x.content.Spec.VolumeBackups {
		if i >= len(x.taken) || x.taken[i] != nil {
			continue
		}
		class, _, _, err := snapshotclass.Of(ctx, r.Live, b.PersistentVolumeClaim.Spec.StorageClassName)
		if err != nil {
			return err
		}
		v := &volumesnapshotv1.VolumeSnapshot{
			ObjectMeta: metav1.ObjectMeta{
				Name: *b.VolumeSnapshotName, Namespace: x.content.Namespace,
				Labels:          map[string]string{labelSource: kubevirt.ID(x.vm.Name), labelNamespace: x.vm.Namespace},
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(x.content, v1beta1.SchemeGroupVersion.WithKind("VirtualMachineSnapshotContent"))},
			},
			Spec: volumesnapshotv1.VolumeSnapshotSpec{Source: volumesnapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: ptr(b.PersistentVolumeClaim.Name)}},
		}
		if class != "" { // else the driver's default
			v.Spec.VolumeSnapshotClassName = &class
		}
		if err := r.Client.Create(ctx, v); apierrors.IsAlreadyExists(err) {
			continue // of an earlier try, or of somebody else, whose it stays
		} else if err != nil {
			return fmt.Errorf("create VolumeSnapshot %s: %w", v.Name, err)
		}
		r.Events.Eventf(x.snapshot, v, corev1.EventTypeNormal, ReasonVolumeSnapshot, "Snapshot", "created the VolumeSnapshot %s of claim %s", v.Name, b.PersistentVolumeClaim.Name)
	}
	return nil
}

// copies makes the content's copies of what the machine builds on. They go with the content.
func (r *Reconciler) copies(ctx context.Context, x *seen) error {
	kept := x.content.Spec.Source.VirtualMachine
	names := map[string]string{}
	if m := kept.Spec.Instancetype; m != nil && m.RevisionName == copyName(x.snapshot, "instancetype") {
		names[m.RevisionName] = revision(x.vm.Spec.Instancetype, x.vm.Status.InstancetypeRef)
	}
	if m := kept.Spec.Preference; m != nil && m.RevisionName == copyName(x.snapshot, "preference") {
		names[m.RevisionName] = preferenceRevision(x.vm)
	}
	for to, from := range names {
		if ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: x.vm.Namespace, Name: to}, &appsv1.ControllerRevision{}); err != nil {
			return err
		} else if ok {
			continue // of an earlier try
		}
		is := &appsv1.ControllerRevision{}
		if ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: x.vm.Namespace, Name: from}, is); err != nil {
			return err
		} else if !ok {
			return errdefs.Preconditionf("the ControllerRevision %s of VirtualMachine %s does not exist", from, x.vm.Name)
		}
		kept := &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{
				Name: to, Namespace: x.vm.Namespace, Labels: maps.Clone(is.Labels),
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(x.content, v1beta1.SchemeGroupVersion.WithKind("VirtualMachineSnapshotContent"))},
			},
			Data: is.Data, Revision: is.Revision,
		}
		if err := r.Client.Create(ctx, kept); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("copy ControllerRevision %s to %s: %w", from, to, err)
		}
	}
	return nil
}

// finish notes that all volumes are kept. A content that is to outlive its snapshot is set free before anybody can see that.
func (r *Reconciler) finish(ctx context.Context, x *seen, s *step) error {
	content := x.content
	if x.together() && (content.Status == nil || content.Status.CreationTime == nil) && !r.thaw(ctx, x) && !has(x.snapshot.Status, v1beta1.VMSnapshotQuiesceTimeoutIndication) {
		s.status = *x.snapshot.Status.DeepCopy() // the snapshot says so before its content says that it is whole
		s.indication(v1beta1.VMSnapshotQuiesceTimeoutIndication)
		return nil
	}
	if len(content.Spec.VolumeBackups) == 0 && x.vm != nil { // nothing was taken
		if err := r.copies(ctx, x); err != nil {
			return err
		}
	}
	if retains(x.snapshot) && metav1.IsControlledBy(content, x.snapshot) {
		free := content.DeepCopy()
		free.OwnerReferences = slices.DeleteFunc(free.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == x.snapshot.UID })
		if err := r.Client.Patch(ctx, free, client.MergeFromWithOptions(content, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("let VirtualMachineSnapshotContent %s outlive its snapshot: %w", content.Name, err)
		}
		content = free
	}
	return r.writeContent(ctx, content, s.content)
}
