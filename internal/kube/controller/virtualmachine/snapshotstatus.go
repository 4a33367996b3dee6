package virtualmachine

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// snapshotStatuses says of each volume of the machine whether a snapshot of the machine has it. What is known of a claim that can be kept is not looked
// for again. Without a template, nothing is known.
func (r *Reconciler) snapshotStatuses(ctx context.Context, vm *v1.VirtualMachine, template *v1.VirtualMachineInstanceTemplateSpec) (all []v1.VolumeSnapshotStatus, err error) {
	if template == nil || vm.DeletionTimestamp != nil {
		return vm.Status.VolumeSnapshotStatuses, nil
	}
	for i := range template.Spec.Volumes {
		v := &template.Spec.Volumes[i]
		s := v1.VolumeSnapshotStatus{Name: v.Name, Enabled: true}
		if name := kubevirt.ClaimOf(v); name == "" {
			s.Enabled, s.Reason = false, fmt.Sprintf("Snapshot is not supported for this volumeSource type [%s]", v.Name)
		} else if kubevirt.Shareable(&template.Spec, v.Name) {
			s.Enabled, s.Reason = false, fmt.Sprintf("Snapshot is not supported for a disk that is shareable [%s]", v.Name)
		} else if !slices.Contains(vm.Status.VolumeSnapshotStatuses, s) {
			if s.Reason, err = r.noSnapshot(ctx, vm.Namespace, name, v.Name); err != nil {
				return nil, err
			}
			s.Enabled = s.Reason == ""
		}
		all = append(all, s)
	}
	return all, nil
}

// noSnapshot returns why no snapshot has the claim of a volume; "": one has it.
func (r *Reconciler) noSnapshot(ctx context.Context, namespace, name, volume string) (string, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, claim); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return "", fmt.Errorf("read PersistentVolumeClaim %s: %w", name, err)
		}
		return fmt.Sprintf("PVC not found [%s]", name), nil
	}
	class := ""
	if c := claim.Spec.StorageClassName; c != nil {
		class = *c
	}
	has, why, err := r.Classes.Of(ctx, class)
	if err != nil || has {
		return "", err
	}
	return cmp.Or(why, fmt.Sprintf("No VolumeSnapshotClass: Volume snapshots are not configured for this StorageClass [%s] [%s]", class, volume)), nil
}
