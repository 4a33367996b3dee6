// Package snapshotclass finds the VolumeSnapshotClass by which snapshots of claims are taken.
package snapshotclass

import (
	"context"
	"fmt"
	"slices"
	"strings"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// NoAPI says that nobody can take a snapshot of any claim.
const NoAPI = "the cluster has no API of volume snapshots (snapshot.storage.k8s.io/v1); install it with its snapshot-controller"

// standard marks the VolumeSnapshotClass of a driver that has several.
const standard = "snapshot.storage.kubernetes.io/is-default-class"

// Of returns the VolumeSnapshotClass for claims of a storage class. has is false if there is none. obstacle says why it is not known which.
func Of(ctx context.Context, from client.Reader, storageClass *string) (name string, has bool, obstacle string, err error) {
	if storageClass == nil || *storageClass == "" {
		return "", false, "", nil
	}
	class := &storagev1.StorageClass{}
	if err := from.Get(ctx, client.ObjectKey{Name: *storageClass}, class); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return "", false, "", fmt.Errorf("read StorageClass %s: %w", *storageClass, err)
		}
		return "", false, "", nil
	}
	all := &volumesnapshotv1.VolumeSnapshotClassList{}
	if err := from.List(ctx, all); meta.IsNoMatchError(err) {
		return "", false, NoAPI, nil
	} else if err != nil {
		return "", false, "", fmt.Errorf("list VolumeSnapshotClasses: %w", err)
	}
	var names, defaults []string
	for _, c := range all.Items {
		if c.Driver != class.Provisioner {
			continue
		}
		names = append(names, c.Name)
		if c.Annotations[standard] == "true" {
			defaults = append(defaults, c.Name)
		}
	}
	switch {
	case len(names) == 0:
		return "", false, "", nil
	case len(defaults) == 1:
		return defaults[0], true, "", nil
	case len(names) == 1:
		return names[0], true, "", nil
	}
	slices.Sort(names)
	return "", false, fmt.Sprintf("the driver %s has the VolumeSnapshotClasses %s; give one of them the annotation %s: \"true\"", class.Provisioner, strings.Join(names, ", "), standard), nil
}
