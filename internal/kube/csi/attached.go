package csi

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// attachTime is how long one attempt to publish waits for a volume to be attached.
const attachTime = 20 * time.Second

// attached waits until a volume is attached to this machine, and returns what the driver told then. The attach-detach controller of the
// cluster makes the VolumeAttachment, and the driver's attacher attaches.
// Errors: FailedPrecondition if that takes longer or has failed.
func (p *Plugins) attached(ctx context.Context, driver, handle string) (map[string]string, error) {
	name := attachmentName(handle, driver, p.Name)
	deadline := time.Now().Add(attachTime)
	for retries := pauses.Growing(100*time.Millisecond, 2*time.Second, 0); ; {
		a, err := p.Client.StorageV1().VolumeAttachments().Get(ctx, name, metav1.GetOptions{})
		var why error
		switch {
		case apierrors.IsNotFound(err), apierrors.IsForbidden(err): // a node may read only those of itself
			why = errdefs.Preconditionf("volume %s of CSI driver %s is not attached to node %s yet: there is no VolumeAttachment %s", handle, driver, p.Name, name)
		case err != nil:
			why = errdefs.Unavailablef("read VolumeAttachment %s: %w", name, err)
		case a.DeletionTimestamp != nil:
			why = errdefs.Preconditionf("volume %s of CSI driver %s is being detached from node %s", handle, driver, p.Name)
		case a.Status.Attached && a.Spec.Attacher == driver && a.Spec.NodeName == p.Name:
			return a.Status.AttachmentMetadata, nil
		default:
			why = waitingFor(a)
		}
		if time.Now().After(deadline) || !pauses.Sleep(ctx, nil, retries.Step(), false) {
			return nil, why
		}
	}
}

// attachmentName is the name of the VolumeAttachment, as the attach-detach controller forms it.
func attachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// waitingFor returns the error for a volume whose attachment is not complete.
func waitingFor(a *storagev1.VolumeAttachment) error {
	if e := a.Status.AttachError; e != nil {
		return errdefs.Preconditionf("AttachVolume.Attach failed: VolumeAttachment %s: %s", a.Name, e.Message)
	}
	return errdefs.Preconditionf("VolumeAttachment %s: CSI driver %s has not attached the volume to node %s yet; is its attacher running?", a.Name, a.Spec.Attacher, a.Spec.NodeName)
}
