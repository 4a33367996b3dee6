package podvolumes

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// Claim implements convert.Source. As the kubelet does, it compares the claim with its PersistentVolume, because both can be changed.
func (o *Objects) Claim(ctx context.Context, pod *corev1.Pod, name string, ephemeral bool) (convert.Disk, error) {
	claim, err := o.api.Client.CoreV1().PersistentVolumeClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q not found", name)
	}
	if err != nil {
		return convert.Disk{}, classify(err)
	}
	switch {
	case ephemeral && !metav1.IsControlledBy(claim, pod):
		return convert.Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q was not made for the pod; delete the claim or rename the pod", name)
	case claim.DeletionTimestamp != nil:
		return convert.Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q is being deleted", name)
	case claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "":
		return convert.Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q is not bound", name)
	}
	pv, err := o.api.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return convert.Disk{}, classify(err)
	}
	if ref := pv.Spec.ClaimRef; ref == nil || ref.UID != claim.UID {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q, which persistentvolumeclaim %q names, belongs to another claim", pv.Name, name)
	}
	csi := pv.Spec.CSI
	if csi == nil || csi.Driver != contract.VolumeDriver {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is not of driver %s, and a VM can have no other", pv.Name, name, contract.VolumeDriver)
	}
	return convert.Disk{
		ID: csi.VolumeHandle, FSType: csi.FSType,
		Device:   pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock,
		ReadOnly: csi.ReadOnly || !slices.ContainsFunc(pv.Spec.AccessModes, writes),
	}, nil
}

// writes reports whether mode lets pods write.
func writes(mode corev1.PersistentVolumeAccessMode) bool { return mode != corev1.ReadOnlyMany }
