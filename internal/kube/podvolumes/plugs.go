package podvolumes

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// Plug returns the volume of a claim of pod's namespace that no volume of pod names, for pod's running VM, as a disk.
// Errors: as for Unnamed; FailedPrecondition for a claim that a pod would mount.
func (v *Volumes) Plug(ctx context.Context, pod *corev1.Pod, name string) (vm.VolumeUse, error) {
	use, pv, err := v.unnamed(ctx, pod, name)
	if err != nil {
		return use, err
	}
	if block := pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock; !block && !convert.IsInstance(pod) {
		return vm.VolumeUse{}, errdefs.Preconditionf("persistentvolumeclaim %q has volumeMode Filesystem, and a volume that is plugged into a pod's VM is a disk that nothing mounts; use volumeMode Block", name)
	}
	return use, nil
}

// Unnamed returns the volume of a claim of pod's namespace that no volume of pod names. Only volumes of nodes of ours can be used so.
// Errors: FailedPrecondition if pod cannot use it, or if there is no such claim.
func (v *Volumes) Unnamed(ctx context.Context, pod *corev1.Pod, name string) (vm.VolumeUse, error) {
	use, _, err := v.unnamed(ctx, pod, name)
	return use, err
}

func (v *Volumes) unnamed(ctx context.Context, pod *corev1.Pod, name string) (use vm.VolumeUse, pv *corev1.PersistentVolume, err error) {
	if slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return convert.ClaimName(pod, &v) == name }) {
		return use, nil, errdefs.Preconditionf("the pod has persistentvolumeclaim %q since it was created", name)
	}
	claim, err := v.from.listed(ctx, pod.Namespace, name)
	if err != nil {
		return use, nil, err
	}
	if pv, err = v.from.volumeOf(ctx, claim); err != nil {
		return use, nil, err
	}
	csi := pv.Spec.CSI
	if csi == nil || csi.Driver != contract.VolumeDriver {
		return use, nil, errdefs.Preconditionf("persistentvolume %q of persistentvolumeclaim %q is not of driver %s, and no other volume can be plugged into a VM that runs; give it to the VM before it starts", pv.Name, name, contract.VolumeDriver)
	}
	if err := v.from.here(ctx, pod, pv, name); err != nil {
		return use, nil, err
	}
	return vm.VolumeUse{Ref: csi.VolumeHandle, ReadOnly: csi.ReadOnly || !slices.ContainsFunc(pv.Spec.AccessModes, writes)}, pv, nil
}

// listed returns a claim by a list of that name: the API server lets a node get only claims that the specs of its pods name.
func (s source) listed(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	list, err := s.api.Client.CoreV1().PersistentVolumeClaims(namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()})
	if err != nil {
		return nil, classify(err)
	}
	for i := range list.Items { // a fake server may ignore the field selector
		if list.Items[i].Name == name {
			return &list.Items[i], nil
		}
	}
	return nil, absent(name)
}
