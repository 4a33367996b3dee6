package podvolumes

import (
	"context"
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/vm"
)

// Disk implements convert.Source.
func (s source) Disk(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) (convert.Disk, error) {
	if v.CSI == nil {
		return s.claim(ctx, pod, v)
	}
	if s.Plugins == nil {
		return convert.Disk{}, noPlugins(v.CSI.Driver)
	}
	return s.Plugins.Inline(ctx, pod, v, s.ask())
}

func (s source) ask() csi.Ask { return csi.Ask{Token: s.tokens.fresh, Renew: s.renew} }

// noPlugins is the error for a volume of a driver on a node that has none.
func noPlugins(driver string) error {
	return errdefs.Preconditionf("the volume is of CSI driver %s, and this node has no CSI drivers; start cocoond with --csi-plugins", driver)
}

// claim returns the disk of the claim that volume v of pod has. As the kubelet does, it compares the claim with its PersistentVolume,
// because both can be changed.
func (s source) claim(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) (convert.Disk, error) {
	name, ephemeral := convert.ClaimName(pod, v), v.Ephemeral != nil
	claim, err := s.api.Client.CoreV1().PersistentVolumeClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return convert.Disk{}, absent(name)
	}
	if err != nil {
		return convert.Disk{}, classify(err)
	}
	if ephemeral && !metav1.IsControlledBy(claim, pod) {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q was not made for the pod; delete the claim or rename the pod", name)
	}
	pv, err := s.volumeOf(ctx, claim)
	if err != nil {
		return convert.Disk{}, err
	}
	readOnly := !slices.ContainsFunc(pv.Spec.AccessModes, writes)
	if pv.Spec.HostPath != nil || pv.Spec.Local != nil {
		return s.folder(ctx, pod, pv, name, readOnly)
	}
	if pv.Spec.NFS != nil {
		return s.exported(ctx, pod, pv, name, readOnly)
	}
	csi := pv.Spec.CSI
	switch {
	case csi == nil:
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is not of a CSI driver, nor of kind local, hostPath or nfs, and a VM can have no other", pv.Name, name)
	case csi.Driver != contract.VolumeDriver && s.Plugins == nil:
		return convert.Disk{}, fmt.Errorf("persistentvolume %q of persistentvolumeclaim %q: %w", pv.Name, name, noPlugins(csi.Driver))
	case csi.Driver != contract.VolumeDriver:
		if err := s.here(ctx, pod, pv, name); err != nil {
			return convert.Disk{}, err
		}
		return s.Plugins.Persistent(ctx, pod, v.Name, pv, readOnly || v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ReadOnly, s.ask())
	}
	return convert.Disk{
		ID: csi.VolumeHandle, FSType: csi.FSType,
		Device:   pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock,
		ReadOnly: csi.ReadOnly || readOnly,
	}, nil
}

func absent(claim string) error {
	return errdefs.Preconditionf("persistentvolumeclaim %q not found", claim)
}

// volumeOf returns the PersistentVolume that claim is bound to. Errors: FailedPrecondition if there is none that can be used.
func (s source) volumeOf(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*corev1.PersistentVolume, error) {
	switch {
	case claim.DeletionTimestamp != nil:
		return nil, errdefs.Preconditionf("persistentvolumeclaim %q is being deleted", claim.Name)
	case claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "":
		return nil, errdefs.Preconditionf("persistentvolumeclaim %q is not bound", claim.Name)
	}
	pv, err := s.api.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return nil, classify(err)
	}
	if ref := pv.Spec.ClaimRef; ref == nil || ref.UID != claim.UID {
		return nil, errdefs.Preconditionf("persistentvolume %q, which persistentvolumeclaim %q names, belongs to another claim", pv.Name, claim.Name)
	}
	return pv, nil
}

// folder returns the folder of the node that pv names. The engine compares it with those that the node's operator allows. Whoever binds
// a pod to a node by its name is not bound by the scheduler's choice, so the affinity of pv is compared here, as the kubelet does.
func (s source) folder(ctx context.Context, pod *corev1.Pod, pv *corev1.PersistentVolume, claim string, readOnly bool) (convert.Disk, error) {
	if pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is a block device of the node, which a VM cannot have in this way; use a claim of driver %s", pv.Name, claim, contract.VolumeDriver)
	}
	if err := s.here(ctx, pod, pv, claim); err != nil {
		return convert.Disk{}, err
	}
	if l := pv.Spec.Local; l != nil {
		return convert.Disk{Dir: &vm.HostDir{Path: path.Clean(l.Path)}, ReadOnly: readOnly, Group: true}, nil
	}
	dir, why := convert.HostDir(pv.Spec.HostPath)
	if why == "" && dir.File {
		why = "it is a file of the node, and a claim is a folder; use the hostPath in the pod"
	}
	if why != "" {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q: %s", pv.Name, claim, why)
	}
	return convert.Disk{Dir: &dir, ReadOnly: readOnly}, nil
}

// exported returns the folder of an NFS server that pv names.
func (s source) exported(ctx context.Context, pod *corev1.Pod, pv *corev1.PersistentVolume, claim string, readOnly bool) (convert.Disk, error) {
	if pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		return convert.Disk{}, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is a folder of an NFS server, which cannot be a block device; use volumeMode %s", pv.Name, claim, corev1.PersistentVolumeFilesystem)
	}
	if err := s.here(ctx, pod, pv, claim); err != nil {
		return convert.Disk{}, err
	}
	folder := convert.NFS(pv.Spec.NFS, pv.Spec.MountOptions)
	if err := folder.Validate(); err != nil {
		return convert.Disk{}, errdefs.As(errdefs.FailedPrecondition, fmt.Errorf("persistentvolume %q of persistentvolumeclaim %q: %w", pv.Name, claim, err))
	}
	return convert.Disk{NFS: &folder, ReadOnly: readOnly}, nil
}

// here returns a FailedPrecondition error if pv, which claim has, cannot be used on the node of pod.
func (s source) here(ctx context.Context, pod *corev1.Pod, pv *corev1.PersistentVolume, claim string) error {
	if pv.Spec.NodeAffinity == nil {
		return nil
	}
	node, err := s.api.Client.CoreV1().Nodes().Get(ctx, pod.Spec.NodeName, metav1.GetOptions{})
	if err != nil {
		return classify(err)
	}
	if err := volume.CheckNodeAffinity(pv, node.Labels); err != nil {
		return errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is on another node: %w", pv.Name, claim, err)
	}
	return nil
}

// writes reports whether mode lets pods write.
func writes(mode corev1.PersistentVolumeAccessMode) bool { return mode != corev1.ReadOnlyMany }
