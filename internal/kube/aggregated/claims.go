package aggregated

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/claimnode"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// prepare refuses a claim that the VM cannot have. The node checks what only the node knows. A claim may wait for its first pod; then prepare
// chooses the node of the VM for its volume, because the scheduler sees no pod with the claim.
func (s *Server) prepare(ctx context.Context, x volumes, name string) error {
	claim := &corev1.PersistentVolumeClaim{}
	err := s.opts.Client.Get(ctx, types.NamespacedName{Namespace: x.Namespace, Name: name}, claim)
	switch {
	case apierrors.IsNotFound(err): // not 404: it is not the VM that is missing
		return conflict(x.target, "PersistentVolumeClaim %s does not exist in namespace %s", name, x.Namespace)
	case err != nil:
		return fmt.Errorf("get persistentvolumeclaim %s/%s: %w", x.Namespace, name, err)
	case claim.DeletionTimestamp != nil:
		return conflict(x.target, "PersistentVolumeClaim %s is being deleted", name)
	case claim.Status.Phase == corev1.ClaimLost:
		return conflict(x.target, "PersistentVolumeClaim %s has lost its volume", name)
	case x.pod == nil:
		return nil
	}
	if err := s.free(ctx, x, claim); err != nil {
		return err
	}
	class, err := s.class(ctx, x, claim)
	if err != nil || !claimnode.Waits(claim, class) {
		return err
	}
	switch node := claimnode.Of(claim); node {
	case x.pod.Spec.NodeName:
		return nil
	case "":
	default:
		return conflict(x.target, "the volume of PersistentVolumeClaim %s is made on node %s, and the VM runs on node %s", name, node, x.pod.Spec.NodeName)
	}
	return claimnode.Choose(ctx, s.opts.Client, claim, x.pod.Spec.NodeName, x.dry)
}

// class returns the storage class of a claim, nil if it has none that exists. It refuses one whose volumes cannot be plugged.
func (s *Server) class(ctx context.Context, x volumes, claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, error) {
	name := claim.Spec.StorageClassName
	if name == nil || *name == "" {
		return nil, nil
	}
	class := &storagev1.StorageClass{}
	err := s.opts.Client.Get(ctx, types.NamespacedName{Name: *name}, class)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get storageclass %s: %w", *name, err)
	case class.Provisioner != contract.VolumeDriver:
		return nil, conflict(x.target, "PersistentVolumeClaim %s is of storage class %s, and only volumes of provisioner %s can be added to a VM that runs; stop the VM first", claim.Name, class.Name, contract.VolumeDriver)
	}
	return class, nil
}

// free refuses a claim that another pod has, unless nobody can write to it.
func (s *Server) free(ctx context.Context, x volumes, claim *corev1.PersistentVolumeClaim) error {
	if !slices.ContainsFunc(claim.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool { return m != corev1.ReadOnlyMany }) {
		return nil
	}
	var list corev1.PodList
	if err := s.opts.Client.List(ctx, &list, client.InNamespace(x.Namespace)); err != nil {
		return fmt.Errorf("list pods of namespace %s: %w", x.Namespace, err)
	}
	for _, pod := range list.Items {
		if pod.UID != x.pod.UID && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed && usesClaim(&pod, claim.Name) {
			return conflict(x.target, "PersistentVolumeClaim %s is used by pod %s", claim.Name, pod.Name)
		}
	}
	return nil
}

// usesClaim reports whether pod has a claim, or is to have it.
func usesClaim(pod *corev1.Pod, claim string) bool {
	asks, _ := contract.ParseVolumes(pod.Annotations)
	for _, c := range asks {
		if c == claim {
			return true
		}
	}
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return convert.ClaimName(pod, &v) == claim })
}
