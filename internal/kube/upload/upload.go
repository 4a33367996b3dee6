// Package upload takes disks for claims over HTTP, as CDI's upload proxy does for `virtctl image-upload`: it gives tokens for uploads, passes what is
// uploaded to the registry, and writes to the claim where it is.
//
// It keeps nothing, neither in memory nor on a disk, so an upload may go to any manager. It makes no volume: the node that makes the volume of the claim
// fetches the disk from the registry.
package upload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Annotations of a claim, with CDI's meaning. virtctl reads and writes them.
const (
	AnnReady       = "cdi.kubevirt.io/storage.pod.ready"
	AnnPhase       = "cdi.kubevirt.io/storage.pod.phase"
	AnnContentType = "cdi.kubevirt.io/storage.contentType"
)

// Registry stores what is uploaded.
type Registry interface {
	// Put reads a disk to its end and stores it as an image in repo. The disk may be compressed, and has at most size bytes as a guest sees it. before is called
	// with the digest of the image before the registry has it.
	// Errors: those of body and before, unchanged; InvalidArgument, DataLoss and Unsupported about the disk; ResourceExhausted, FailedPrecondition and Unavailable
	// about the registry.
	Put(ctx context.Context, repo string, body io.Reader, size int64, before func(digest string) error) (digest string, err error)
	// Remove removes an image. One that does not exist is no error.
	Remove(ctx context.Context, repo, digest string) error
}

// Options configure a Service. All are required except Registry.
type Options struct {
	Client   client.Client          // its reads must not be cached
	Registry Registry               // nil: there is none, and uploads are refused
	Key      func() ([]byte, error) // with which tokens are signed; the same in all managers
	Journal  Journal
	Now      func() time.Time
	Log      *slog.Logger
}

// Service takes uploads. Several may run at a time.
type Service struct {
	Options

	mu    sync.Mutex
	all   int
	count map[string]int // uploads in progress, by namespace
}

// How many uploads a manager takes at a time.
const (
	mostAll          = 32
	mostPerNamespace = 4
)

// New returns a service.
func New(o Options) *Service { return &Service{Options: o, count: map[string]int{}} }

// NoRegistry is why nothing can be uploaded to a cluster without a registry.
const NoRegistry = "an upload is kept in the registry until a node makes the volume, and the manager has no registry; set EPOCH_URL of the manager and the nodes (cocoon up --with epoch,manager), or use a DataVolume with the source http or registry"

// Token returns a token for an upload to a claim. Whoever asks must have the right to.
// Errors: NotFound, FailedPrecondition, Unavailable.
func (s *Service) Token(ctx context.Context, namespace, name string) (string, error) {
	claim, err := s.claim(ctx, Claim{Namespace: namespace, Name: name})
	if err != nil {
		return "", err
	}
	key, err := s.Key()
	if err != nil {
		return "", fmt.Errorf("sign a token: %w", err)
	}
	return sign(key, Claim{namespace, name, claim.UID}, s.Now().Add(Life))
}

// claim returns the claim, if it can take an upload. Without a UID it may be any of that name.
// Errors: NotFound, FailedPrecondition.
func (s *Service) claim(ctx context.Context, of Claim) (*corev1.PersistentVolumeClaim, error) {
	c := &corev1.PersistentVolumeClaim{}
	err := s.Client.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Name}, c)
	switch {
	case apierrors.IsNotFound(err) || err == nil && of.UID != "" && c.UID != of.UID:
		return nil, errdefs.NotFoundf("PersistentVolumeClaim %s does not exist any more", of)
	case err != nil:
		return nil, errdefs.Unavailablef("read PersistentVolumeClaim %s: %w", of, err)
	case s.Registry == nil:
		return nil, errdefs.Preconditionf(NoRegistry)
	}
	if why := Refusal(c); why != "" {
		return nil, errdefs.Preconditionf("%s", why)
	}
	if c.Annotations[contract.KeyVolumeUpload] != "" {
		return nil, errdefs.Preconditionf("a disk was uploaded for PersistentVolumeClaim %s already; make another claim for another disk", of)
	}
	return c, nil
}

// Refusal returns why a claim can take no upload; "": it can, or has taken one.
func Refusal(c *corev1.PersistentVolumeClaim) string {
	_, asks := c.Annotations[contract.KeyUploadTarget]
	switch {
	case c.DeletionTimestamp != nil:
		return fmt.Sprintf("PersistentVolumeClaim %s is being deleted", c.Name)
	case !asks:
		return fmt.Sprintf("PersistentVolumeClaim %s does not ask for an upload; it needs the annotation %s, as `virtctl image-upload` writes it", c.Name, contract.KeyUploadTarget)
	case c.Annotations[AnnContentType] != "" && c.Annotations[AnnContentType] != "kubevirt":
		return fmt.Sprintf("PersistentVolumeClaim %s asks for the content type %s, and only disks of machines can be uploaded; use --image-path", c.Name, c.Annotations[AnnContentType])
	case c.Spec.VolumeName != "":
		return fmt.Sprintf("PersistentVolumeClaim %s has its volume already, and an upload never replaces what is on a volume; make another claim", c.Name)
	case c.Spec.DataSource != nil || c.Spec.DataSourceRef != nil || c.Annotations[contract.KeyVolumeImage] != "":
		return fmt.Sprintf("PersistentVolumeClaim %s asks for other content than an upload; make another claim", c.Name)
	}
	return ""
}

// begin counts one more upload of a namespace.
// Errors: ResourceExhausted.
func (s *Service) begin(namespace string) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.all >= mostAll:
		return nil, errdefs.Exhaustedf("the manager takes %d other uploads; try again later", s.all)
	case s.count[namespace] >= mostPerNamespace:
		return nil, errdefs.Exhaustedf("the manager takes %d other uploads of namespace %s; try again later", s.count[namespace], namespace)
	}
	s.all++
	s.count[namespace]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all--
		if s.count[namespace]--; s.count[namespace] == 0 {
			delete(s.count, namespace)
		}
	}, nil
}

// take stores what is uploaded for a claim. The journal names it before the registry has it, so whatever is left of an upload that was cut off is removed
// one day; the claim names it when the registry has all of it. Preconditions: the claim can take an upload.
func (s *Service) take(ctx context.Context, of Claim, size int64, body io.Reader) error {
	digest, err := s.Registry.Put(ctx, contract.UploadRepository(of.Namespace, string(of.UID)), body, size, func(digest string) error {
		return s.Journal.Add(ctx, Entry{of, digest})
	})
	if err != nil {
		return err
	}
	if err := s.settle(ctx, of, digest); err != nil {
		// If the claim was deleted meanwhile, the journal may have dropped the image before the registry had it.
		return errors.Join(err, s.Journal.Add(context.WithoutCancel(ctx), Entry{of, digest}))
	}
	return nil
}

// settleAttempts is how often the claim is written when others write it at the same time.
const settleAttempts = 5

// settle writes to the claim what was uploaded for it.
func (s *Service) settle(ctx context.Context, of Claim, digest string) error {
	for attempt := 1; ; attempt++ {
		c, err := s.claim(ctx, of) // another upload may have been faster
		if err != nil {
			return err
		}
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{
			"uid": c.UID, "resourceVersion": c.ResourceVersion,
			"annotations": map[string]any{contract.KeyVolumeUpload: digest, AnnReady: "false", AnnPhase: string(corev1.PodSucceeded)},
		}})
		if err == nil {
			err = s.Client.Patch(ctx, c, client.RawPatch(types.MergePatchType, body))
		}
		switch {
		case err == nil:
			return nil
		case apierrors.IsConflict(err) && attempt < settleAttempts:
		default:
			return errdefs.Unavailablef("write to PersistentVolumeClaim %s what was uploaded: %w; upload it again", of, err)
		}
	}
}

// Size returns the bytes that the volume of a claim will have.
func Size(c *corev1.PersistentVolumeClaim) int64 {
	size := c.Spec.Resources.Requests[corev1.ResourceStorage]
	return size.Value()
}
