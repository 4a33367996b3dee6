// Package upload looks after claims whose disk is uploaded: it says on the claim that an upload may begin, or why not, chooses a node for a volume that must
// not wait for a pod, and removes from the registry what no volume needs any more.
//
// It takes no uploads, and makes no claims.
package upload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/claimnode"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

const (
	lookAgain  = 30 * time.Second // until there may be a storage class or a node with room
	sweepEvery = 10 * time.Minute // for claims that were deleted while no manager ran
)

// reasonFailed is the reason of the Event by which virtctl knows that it waits in vain.
const reasonFailed = "ProvisioningFailed"

// Reconciler reconciles such claims. All fields are required except Registry.
type Reconciler struct {
	Client   client.Client
	Live     client.Reader // without a cache
	Events   events.EventRecorder
	Registry upload.Registry // nil: there is none
	Journal  upload.Journal
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	asks := predicate.NewPredicateFuncs(func(o client.Object) bool { return asks(o) })
	return errors.Join(
		ctrl.NewControllerManagedBy(m).Named("upload").For(&corev1.PersistentVolumeClaim{}, builder.WithPredicates(asks)).
			WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).Complete(r),
		m.Add(manager.RunnableFunc(r.run)))
}

func asks(o client.Object) bool {
	_, ok := o.GetAnnotations()[contract.KeyUploadTarget]
	return ok
}

// Reconcile brings one claim a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	claim := &corev1.PersistentVolumeClaim{}
	err := r.Live.Get(ctx, req.NamespacedName, claim)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("read claim %s: %w", req, err)
	}
	var again time.Duration
	switch {
	case err != nil:
		claim = nil
	case claim.DeletionTimestamp == nil && asks(claim) && claim.Annotations[contract.KeyVolumeUpload] != "":
		again, err = r.choose(ctx, claim)
	case claim.DeletionTimestamp == nil && asks(claim):
		again, err = r.offer(ctx, claim)
	}
	if controller.IgnoreStale(err) != nil && claim != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: again}, r.sweep(ctx, req.NamespacedName, claim)
}

// offer says on the claim that it can take an upload, or in an Event why not.
func (r *Reconciler) offer(ctx context.Context, claim *corev1.PersistentVolumeClaim) (again time.Duration, err error) {
	why := upload.Refusal(claim)
	if why == "" && r.Registry == nil {
		why = upload.NoRegistry
	}
	if why == "" {
		if why, err = r.class(ctx, claim); err != nil {
			return 0, err
		}
		if why != "" {
			again = lookAgain
		}
	}
	if why == "" {
		return 0, r.tell(ctx, claim, "true", corev1.PodRunning)
	}
	if claim.Annotations[upload.AnnPhase] != string(corev1.PodFailed) {
		r.Events.Eventf(claim, nil, corev1.EventTypeWarning, reasonFailed, "Upload", "%s", why)
	}
	return again, r.tell(ctx, claim, "false", corev1.PodFailed)
}

// class says why the storage class of a claim has no volumes for uploads; "": it has.
func (r *Reconciler) class(ctx context.Context, claim *corev1.PersistentVolumeClaim) (why string, err error) {
	name := claim.Spec.StorageClassName
	if name == nil || *name == "" {
		return fmt.Sprintf("PersistentVolumeClaim %s has no storage class; give it one of provisioner %s, or make such a class the default", claim.Name, contract.VolumeDriver), nil
	}
	class := &storagev1.StorageClass{}
	switch err := r.Live.Get(ctx, client.ObjectKey{Name: *name}, class); {
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("the storage class %s of PersistentVolumeClaim %s does not exist; create it", *name, claim.Name), nil
	case err != nil:
		return "", fmt.Errorf("get storageclass %s: %w", *name, err)
	case class.Provisioner != contract.VolumeDriver:
		return fmt.Sprintf("storage class %s has its volumes from %s, and only nodes of Cocoon take uploads; use a class of provisioner %s", *name, class.Provisioner, contract.VolumeDriver), nil
	}
	return "", nil
}

// tell writes the annotations for which virtctl waits, unless the claim has them.
func (r *Reconciler) tell(ctx context.Context, claim *corev1.PersistentVolumeClaim, ready string, phase corev1.PodPhase) error {
	if claim.Annotations[upload.AnnReady] == ready && claim.Annotations[upload.AnnPhase] == string(phase) {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": claim.UID, "resourceVersion": claim.ResourceVersion, "annotations": map[string]any{upload.AnnReady: ready, upload.AnnPhase: string(phase)},
	}})
	if err == nil {
		err = r.Client.Patch(ctx, claim, client.RawPatch(types.MergePatchType, body))
	}
	if err != nil {
		return fmt.Errorf("say on claim %s/%s whether an upload may begin: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// choose chooses a node for a volume that must not wait for its first pod. For the claim of a DataVolume its controller does.
func (r *Reconciler) choose(ctx context.Context, claim *corev1.PersistentVolumeClaim) (again time.Duration, err error) {
	_, now := claim.Annotations[kubevirt.ImmediateBinding]
	if !now || claim.Spec.VolumeName != "" || claimnode.Of(claim) != "" {
		return 0, nil
	}
	node, err := claimnode.Roomiest(ctx, r.Live, r.Client, claim)
	if err != nil || node == "" {
		return lookAgain, err
	}
	return 0, claimnode.Choose(ctx, r.Client, claim, node, nil)
}

// sweep removes what was uploaded for claims of that name and is needed no more. claim is the one that exists, nil if none does.
func (r *Reconciler) sweep(ctx context.Context, name types.NamespacedName, claim *corev1.PersistentVolumeClaim) error {
	if r.Registry == nil {
		return nil
	}
	all, err := r.Journal.List(ctx)
	if err != nil {
		return err
	}
	for _, e := range all {
		if e.Namespace != name.Namespace || e.Name != name.Name || needed(e, claim) {
			continue
		}
		if err := r.Registry.Remove(ctx, contract.UploadRepository(e.Namespace, string(e.UID)), e.Digest); err != nil {
			return fmt.Errorf("remove from the registry what was uploaded for claim %s: %w", name, err)
		}
		if err := r.Journal.Drop(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// needed reports whether a volume may still be made of an upload, or the upload is in progress.
func needed(e upload.Entry, claim *corev1.PersistentVolumeClaim) bool {
	if claim == nil || claim.UID != e.UID || claim.Spec.VolumeName != "" {
		return false
	}
	digest := claim.Annotations[contract.KeyVolumeUpload]
	return digest == "" || digest == e.Digest
}

// run reconciles each claim that the journal names, from time to time: nobody tells of claims that were deleted while no manager ran.
func (r *Reconciler) run(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		r.sweepAll(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (r *Reconciler) sweepAll(ctx context.Context) {
	all, err := r.Journal.List(ctx)
	if err != nil {
		log.FromContext(ctx).Error(err, "uploads that are needed no more were not removed")
		return
	}
	seen := map[types.NamespacedName]bool{}
	for _, e := range all {
		name := types.NamespacedName{Namespace: e.Namespace, Name: e.Name}
		if seen[name] {
			continue
		}
		seen[name] = true
		if _, err := r.Reconcile(ctx, reconcile.Request{NamespacedName: name}); err != nil {
			log.FromContext(ctx).Error(err, "an upload that is needed no more was not removed", "claim", name.String())
		}
	}
}
