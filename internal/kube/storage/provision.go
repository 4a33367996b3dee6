package storage

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	store "cocoonstack.io/cocoon/internal/volume"
)

// provisioner makes and removes the volumes of claims. The library calls it; a call may be repeated after any failure.
type provisioner struct{ *Storage }

func (s *Storage) provisioner() *provisioner { return &provisioner{s} }

var (
	_ controller.Qualifier        = (*provisioner)(nil)
	_ controller.DeletionGuard    = (*provisioner)(nil)
	_ controller.BlockProvisioner = (*provisioner)(nil)
)

// SupportsBlock implements controller.BlockProvisioner.
func (*provisioner) SupportsBlock(context.Context) bool { return true }

// ShouldProvision implements controller.Qualifier: the scheduler has chosen this node for the claim's pod, and a disk that is to be uploaded is there.
func (p *provisioner) ShouldProvision(_ context.Context, claim *corev1.PersistentVolumeClaim) bool {
	return claim.Annotations[volume.AnnSelectedNode] == p.Node && (!uploaded(claim) || claim.Annotations[contract.KeyVolumeUpload] != "")
}

// uploaded reports whether the content of the claim's volume is uploaded.
func uploaded(claim *corev1.PersistentVolumeClaim) bool {
	_, ok := claim.Annotations[contract.KeyUploadTarget]
	return ok
}

// ShouldDelete implements controller.DeletionGuard.
func (p *provisioner) ShouldDelete(_ context.Context, pv *corev1.PersistentVolume) bool {
	return p.mine(pv) != nil
}

// Provision implements controller.Provisioner. The volume has the name of its PersistentVolume, so that a repeated call finds it.
func (p *provisioner) Provision(ctx context.Context, o controller.ProvisionOptions) (*corev1.PersistentVolume, controller.ProvisioningState, error) {
	if err := check(o); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	v, err := p.create(behalf(ctx, o.PVC.Namespace), o)
	switch {
	case errdefs.Is(err, errdefs.ResourceExhausted), errdefs.Is(err, errdefs.Unsupported) && o.StorageClass.Parameters[contract.ParamKind] != "": // another node may have what this one lacks
		return nil, controller.ProvisioningReschedule, fmt.Errorf("node %s: %w", p.Node, err)
	case err != nil:
		return nil, controller.ProvisioningFinished, fmt.Errorf("node %s: %w", p.Node, err)
	}
	p.poke()
	p.Log.Info("volume made for a claim", "volume", v.ID, "claim", o.PVC.Namespace+"/"+o.PVC.Name, "size", v.Size)
	return p.volume(o, v), controller.ProvisioningFinished, nil
}

// check returns an InvalidArgument error if the claim or its class asks for something that a volume of a node cannot be.
func check(o controller.ProvisionOptions) error {
	for _, name := range slices.Sorted(maps.Keys(o.StorageClass.Parameters)) {
		value := o.StorageClass.Parameters[name]
		switch {
		case name == contract.ParamKind: // the store says which kinds it has
		case name != contract.ParamFSType:
			return errdefs.Invalidf("storage class %s has the parameter %s, which is not known; only %s and %s are", o.StorageClass.Name, name, contract.ParamFSType, contract.ParamKind)
		case value != "" && value != "ext4" && value != "xfs":
			return errdefs.Invalidf("storage class %s asks for the file system %q; use ext4 or xfs", o.StorageClass.Name, value)
		}
	}
	switch claim := o.PVC; {
	case len(o.StorageClass.MountOptions) > 0:
		return errdefs.Invalidf("storage class %s has mount options (%s), which guests do not apply; remove them", o.StorageClass.Name, strings.Join(o.StorageClass.MountOptions, ","))
	case claim.Spec.DataSource == nil && claim.Spec.DataSourceRef != nil: // an empty volume would not be what the claim asks for
		return errdefs.Invalidf("claim %s asks by dataSourceRef for the content of a %s of another namespace, and volumes are copied within their namespace only", claim.Name, claim.Spec.DataSourceRef.Kind)
	case claim.Spec.DataSource != nil && claim.Annotations[contract.KeyVolumeImage] != "":
		return errdefs.Invalidf("claim %s asks for the content of an image by the annotation %s and for that of a %s by dataSource; remove one of them", claim.Name, contract.KeyVolumeImage, claim.Spec.DataSource.Kind)
	case uploaded(claim) && (claim.Spec.DataSource != nil || claim.Annotations[contract.KeyVolumeImage] != ""):
		return errdefs.Invalidf("claim %s asks for a disk that is uploaded by the annotation %s and for other content; make a claim that asks for one of them", claim.Name, contract.KeyUploadTarget)
	case claim.Spec.Selector != nil:
		return errdefs.Invalidf("claim %s selects volumes by label, and a new volume has none; remove the selector", claim.Name)
	case slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteMany):
		return errdefs.Invalidf("claim %s asks for the access mode ReadWriteMany; a volume is on one node, where VMs share it with ReadWriteOnce if each of them says so (shareable), so use ReadWriteOnce or ReadWriteOncePod", claim.Name)
	}
	return nil
}

// create returns the volume of a claim. If an earlier call has made it, it is that one.
func (p *provisioner) create(ctx context.Context, o controller.ProvisionOptions) (store.Volume, error) {
	want := o.PVC.Spec.Resources.Requests[corev1.ResourceStorage]
	size, err := store.RoundSize(max(want.Value(), store.MinSize))
	if err != nil {
		return store.Volume{}, err
	}
	spec := store.Spec{Kind: o.StorageClass.Parameters[contract.ParamKind], Name: o.PVName, Size: size, Labels: map[string]string{contract.KeyVolumeClaim: string(o.PVC.UID)}}
	v, err := p.from(ctx, o.PVC, spec)
	if !errdefs.IsAlreadyExists(err) {
		return v, err
	}
	v, err = p.Volumes.Get(ctx, o.PVName)
	if err == nil && (v.Labels[contract.KeyVolumeClaim] != string(o.PVC.UID) || v.Size < size) {
		return v, errdefs.Preconditionf("volume %s exists already and was not made for this claim; rename or remove it (`cocoon volume rm`)", o.PVName)
	}
	return v, err
}

// from makes a volume with the content that the claim asks for.
func (p *provisioner) from(ctx context.Context, claim *corev1.PersistentVolumeClaim, spec store.Spec) (store.Volume, error) {
	source := claim.Spec.DataSource
	switch {
	case uploaded(claim):
		if p.Uploads == nil {
			return store.Volume{}, errdefs.Preconditionf("the disk that was uploaded for claim %s is in the registry, and this node has none; set EPOCH_URL of the node", claim.Name)
		}
		from, err := p.Uploads(claim.Namespace, string(claim.UID), claim.Annotations[contract.KeyVolumeUpload])
		if err != nil {
			return store.Volume{}, fmt.Errorf("find the disk that was uploaded for claim %s: %w", claim.Name, err)
		}
		return p.fill(ctx, claim, spec, from, "what was uploaded")
	case claim.Annotations[contract.KeyVolumeImage] != "":
		from := image.PullRequest{Name: claim.Annotations[contract.KeyVolumeImage], Policy: image.PullAlways}
		return p.fill(ctx, claim, spec, from, "image "+show(from.Name))
	case source == nil:
		return p.Volumes.Create(ctx, spec)
	case source.Kind == "PersistentVolumeClaim" && (source.APIGroup == nil || *source.APIGroup == ""):
		handle, err := p.handleOf(claim.Namespace, source.Name)
		if err != nil {
			return store.Volume{}, err
		}
		return p.Volumes.Clone(ctx, handle, spec)
	case isSnapshot(source) && p.Snapshots != nil:
		return p.restore(ctx, claim.Namespace, source.Name, spec)
	}
	return store.Volume{}, errdefs.Unsupportedf("claim %s asks for the content of a %s, which this node cannot copy; use a PersistentVolumeClaim or VolumeSnapshot", claim.Name, source.Kind)
}

// handleOf returns the volume of another claim of namespace. Errors: FailedPrecondition if it has none on this node.
func (p *provisioner) handleOf(namespace, name string) (string, error) {
	source, err := p.claims.PersistentVolumeClaims(namespace).Get(name)
	if err != nil || source.Status.Phase != corev1.ClaimBound {
		return "", errdefs.Preconditionf("the source, claim %s, does not exist or has no volume yet", name)
	}
	pv, err := p.volumes.Get(source.Spec.VolumeName)
	if err != nil || pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != source.UID || p.mine(pv) == nil {
		return "", errdefs.Preconditionf("the source, claim %s, is not on this node; a copy can be made only on the node that has its source, so run the pod there", name)
	}
	return pv.Spec.CSI.VolumeHandle, nil
}

// volume returns the PersistentVolume for v.
func (p *provisioner) volume(o controller.ProvisionOptions, v store.Volume) *corev1.PersistentVolume {
	fsType := o.StorageClass.Parameters[contract.ParamFSType]
	if o.PVC.Spec.VolumeMode != nil && *o.PVC.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		fsType = ""
	}
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: o.PVName},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *o.StorageClass.ReclaimPolicy,
			AccessModes:                   o.PVC.Spec.AccessModes,
			VolumeMode:                    o.PVC.Spec.VolumeMode,
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(v.Size, resource.BinarySI)},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: contract.VolumeDriver, VolumeHandle: string(v.ID), FSType: fsType, VolumeAttributes: map[string]string{attributeNode: p.Node},
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{p.Node}}},
			}}}},
		},
	}
}

// Delete implements controller.Provisioner.
func (p *provisioner) Delete(ctx context.Context, pv *corev1.PersistentVolume) error {
	csi := p.mine(pv)
	if csi == nil {
		return &controller.IgnoredError{Reason: "it is not a volume of node " + p.Node}
	}
	if pv.Spec.ClaimRef == nil {
		return errdefs.Preconditionf("persistentvolume %s names no claim, so the owner of its volume is not known; remove the volume with `cocoon volume rm %s` on node %s", pv.Name, csi.VolumeHandle, p.Node)
	}
	if err := p.Volumes.Delete(behalf(ctx, pv.Spec.ClaimRef.Namespace), csi.VolumeHandle); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	p.poke()
	return nil
}
