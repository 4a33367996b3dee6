// Package snapshotclass finds the VolumeSnapshotClass by which snapshots of claims are taken.
package snapshotclass

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

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

// memory is how long a Memo keeps what it has read.
const memory = time.Minute

// Memo is Of for those who ask again and again. It says what was true within the last minute.
type Memo struct {
	From client.Reader
	Now  func() time.Time

	mu sync.Mutex
	of map[string]read
}

// read is what Of has said.
type read struct {
	has      bool
	obstacle string
	at       time.Time
}

// Of reports whether there is a VolumeSnapshotClass for claims of a storage class. obstacle says why it is not known which.
func (m *Memo) Of(ctx context.Context, storageClass string) (has bool, obstacle string, err error) {
	now := m.Now()
	m.mu.Lock()
	was, known := m.of[storageClass]
	m.mu.Unlock()
	if known && now.Sub(was.at) < memory {
		return was.has, was.obstacle, nil
	}
	is := read{at: now}
	if _, is.has, is.obstacle, err = Of(ctx, m.From, &storageClass); err != nil {
		return false, "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.of, func(_ string, r read) bool { return now.Sub(r.at) >= memory })
	if m.of == nil {
		m.of = map[string]read{}
	}
	m.of[storageClass] = is
	return is.has, is.obstacle, nil
}
