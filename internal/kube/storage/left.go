package storage

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/volume"
)

const eventLeft = "VolumeLeft"

// tellLeft tells of the volumes made before the time since that nobody in the cluster knows: their claim is gone, and no
// PersistentVolume has their name. One that was retained is such a volume, and so is one whose node died before it wrote the
// PersistentVolume, if the claim was deleted meanwhile. They look the same, so they stay until the operator removes them.
func (s *Storage) tellLeft(ctx context.Context, since time.Time) error {
	all, err := s.Volumes.List(ctx)
	if err != nil {
		return err
	}
	claims, err := s.claims.List(labels.Everything())
	if err != nil {
		return err
	}
	alive := sets.New[string]()
	for _, c := range claims {
		alive.Insert(string(c.UID))
	}
	var left []volume.Volume
	for _, v := range all {
		claim := v.Labels[contract.KeyVolumeClaim]
		if claim == "" || alive.Has(claim) || !v.CreatedAt.Before(since) {
			continue
		}
		if _, err := s.volumes.Get(v.Name); apierrors.IsNotFound(err) {
			left = append(left, v)
		} else if err != nil {
			return err
		}
	}
	if len(left) == 0 {
		return nil
	}
	node, err := s.Client.CoreV1().Nodes().Get(ctx, s.Node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, v := range left {
		s.Log.Warn("volume kept that no claim and no PersistentVolume has", "volume", v.Name, "namespace", v.Owner.Namespace, "claim_uid", v.Labels[contract.KeyVolumeClaim])
		s.Events.Eventf(node, corev1.EventTypeWarning, eventLeft,
			"Volume %s of namespace %s has neither a claim nor a PersistentVolume any more, and is kept; `cocoon volume rm %s` on node %s removes it", v.Name, v.Owner.Namespace, v.Name, s.Node)
	}
	return nil
}
