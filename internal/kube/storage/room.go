package storage

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// RoomNamespace is the namespace of the CSIStorageCapacity objects of all nodes.
const RoomNamespace = metav1.NamespaceSystem

const (
	labelNode  = "volume.cocoonstack.io/node" // of a CSIStorageCapacity
	roomPeriod = time.Minute                  // between two looks at the room
)

func (s *Storage) poke() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// announce tells the scheduler that the node has volumes, and how much room there is, until ctx ends.
func (s *Storage) announce(ctx context.Context) {
	retries, complaint := pauses.Growing(retryFirst, roomPeriod, pauses.Many), ""
	var told map[string]int64 // bytes, by storage class; nil: not known
	for {
		var node *corev1.Node
		node, err := s.Client.CoreV1().Nodes().Get(ctx, s.Node, metav1.GetOptions{})
		if err == nil {
			err = errors.Join(s.sayDriver(ctx, node), s.sayRoom(ctx, node, &told))
		}
		wait := roomPeriod
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			retries, complaint = pauses.Growing(retryFirst, roomPeriod, pauses.Many), ""
		default:
			if complaint != err.Error() {
				complaint = err.Error()
				s.Log.Warn("scheduler not told of the room for volumes", "err", err)
			}
			wait = retries.Step()
		}
		if !pauses.Sleep(ctx, s.changed, wait, false) || !pauses.Sleep(ctx, nil, settle, false) {
			return
		}
	}
}

// settle is how long changes are gathered before they are told.
const settle = time.Second

// ownedBy makes an object go with its node.
func ownedBy(node *corev1.Node) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
}

// sayDriver makes the CSINode of this node name our volumes.
func (s *Storage) sayDriver(ctx context.Context, node *corev1.Node) error {
	driver := storagev1.CSINodeDriver{Name: contract.VolumeDriver, NodeID: s.Node, TopologyKeys: []string{corev1.LabelHostname}}
	return csi.Announce(ctx, s.Client, node, func(name string) bool { return name != driver.Name }, []storagev1.CSINodeDriver{driver})
}

// sayRoom writes the room of this node for each storage class that has volumes of nodes. told is what it has written.
func (s *Storage) sayRoom(ctx context.Context, node *corev1.Node, told *map[string]int64) error {
	classes, err := s.classes.List(labels.Everything())
	if err != nil {
		return err
	}
	want := map[string]int64{} // a class that is not in it has no volumes here, as the scheduler understands it
	for _, c := range classes {
		if !ours(c) {
			continue
		}
		free, ok, err := s.Free(ctx, c.Parameters[contract.ParamKind])
		if err != nil {
			return fmt.Errorf("look for the room of storage class %s: %w", c.Name, err)
		}
		if ok {
			want[c.Name] = max(free, 0)
		}
	}
	if *told != nil && maps.Equal(*told, want) {
		return nil
	}
	*told = nil
	if err := s.writeRoom(ctx, node, want); err != nil {
		return fmt.Errorf("write the room for volumes: %w", err)
	}
	*told = want
	return nil
}

// writeRoom makes the CSIStorageCapacity objects of this node say want, which has bytes by storage class.
func (s *Storage) writeRoom(ctx context.Context, node *corev1.Node, want map[string]int64) error {
	rooms := s.Client.StorageV1().CSIStorageCapacities(RoomNamespace)
	list, err := rooms.List(ctx, metav1.ListOptions{LabelSelector: labels.Set{labelNode: s.Node}.String()})
	if err != nil {
		return err
	}
	var errs []error
	missing := maps.Clone(want)
	for i := range list.Items {
		c := &list.Items[i]
		room, wanted := want[c.StorageClassName]
		delete(missing, c.StorageClassName)
		switch {
		case !wanted:
			err = rooms.Delete(ctx, c.Name, metav1.DeleteOptions{})
		case c.Capacity == nil || c.Capacity.Value() != room:
			c.Capacity = resource.NewQuantity(room, resource.BinarySI)
			_, err = rooms.Update(ctx, c, metav1.UpdateOptions{})
		}
		if !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
		err = nil
	}
	for class, room := range missing {
		_, err := rooms.Create(ctx, &storagev1.CSIStorageCapacity{
			ObjectMeta:       metav1.ObjectMeta{Name: roomName(s.Node, class), Labels: map[string]string{labelNode: s.Node}, OwnerReferences: ownedBy(node)},
			NodeTopology:     &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelHostname: s.Node}},
			StorageClassName: class,
			Capacity:         resource.NewQuantity(room, resource.BinarySI),
		}, metav1.CreateOptions{})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// roomName is the name of the object with the room of a node for a class. Names of both may be too long to be joined.
func roomName(node, class string) string {
	sum := sha256.Sum256([]byte(node + "\x00" + class))
	return fmt.Sprintf("volume-cocoonstack-io-%x", sum[:16])
}
