// Package datavolume makes the claim of each DataVolume, and tells in the status what became of its volume.
//
// The node that makes the volume puts the content on it, as for any claim. The controller transfers nothing.
package datavolume

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/tools/events"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/claimnode"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

const (
	lookAgain    = 5 * time.Second  // while the volume is being made: Events of the claim do not bring the DataVolume back
	waitForClass = 30 * time.Second // until there may be a storage class or a source
	defaultClass = "storageclass.kubernetes.io/is-default-class"
)

// Reconciler reconciles DataVolumes. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("datavolume").
		For(&v1beta1.DataVolume{}).
		Owns(&corev1.PersistentVolumeClaim{}).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile brings one DataVolume a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	dv := &v1beta1.DataVolume{}
	if err := r.Client.Get(ctx, req.NamespacedName, dv); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if dv.DeletionTimestamp != nil { // its claim goes with it
		return reconcile.Result{}, nil
	}
	x := seen{dv: dv, now: r.Now()}
	if errs := kubevirt.CheckDataVolume(&dv.Spec, dv.Namespace, field.NewPath("spec")); len(errs) > 0 {
		x.refusal = errs.ToAggregate().Error()
		return reconcile.Result{}, r.write(ctx, x)
	}
	if err := r.find(ctx, &x); err != nil {
		return reconcile.Result{}, err
	}
	if x.claim == nil && !complete(&dv.Status) {
		return r.create(ctx, x)
	}
	if x.claim == nil || !x.mine || x.claim.Status.Phase != corev1.ClaimPending {
		return reconcile.Result{}, r.write(ctx, x)
	}
	if err := r.class(ctx, &x); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.choose(ctx, &x); err != nil {
		return reconcile.Result{}, controller.IgnoreStale(err)
	}
	if err := r.attempts(ctx, &x); err != nil {
		return reconcile.Result{}, err
	}
	wait := lookAgain
	if x.awaited() {
		wait = waitForClass // a change of the claim brings the DataVolume back
	} else if claimnode.Waits(x.claim, x.class) && claimnode.Of(x.claim) == "" {
		wait = 0
		if x.note != "" {
			wait = waitForClass
		}
	}
	return reconcile.Result{RequeueAfter: wait}, r.write(ctx, x)
}

// find looks for the claim of a DataVolume. Whether there is none decides about a creation, so it is asked of the API server.
func (r *Reconciler) find(ctx context.Context, x *seen) error {
	claim := &corev1.PersistentVolumeClaim{}
	err := r.Live.Get(ctx, client.ObjectKeyFromObject(x.dv), claim)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the claim of DataVolume %s: %w", x.dv.Name, err)
	}
	x.claim, x.mine = claim, metav1.IsControlledBy(claim, x.dv)
	return nil
}

// create creates the claim. Its storage class is named in it: what was decided about the class holds for the claim, too.
func (r *Reconciler) create(ctx context.Context, x seen) (reconcile.Result, error) {
	claim := kubevirt.Claim(x.dv)
	class, err := r.classFor(ctx, claim)
	if err != nil {
		return reconcile.Result{}, err
	}
	switch {
	case class == nil && filled(&x.dv.Spec):
		return r.later(ctx, x, ReasonPending, "there is no storage class for the volume, and no default one")
	case class != nil && class.Provisioner != contract.VolumeDriver && filled(&x.dv.Spec):
		x.refusal = fmt.Sprintf("storage class %s has its volumes from %s, and only nodes of Cocoon import disks; use a class of provisioner %s", class.Name, class.Provisioner, contract.VolumeDriver)
		return reconcile.Result{}, r.write(ctx, x)
	case class != nil:
		claim.Spec.StorageClassName = &class.Name
	}
	if why, err := r.size(ctx, x.dv, claim); err != nil || why != "" {
		if err == nil {
			return r.later(ctx, x, ReasonPending, why)
		}
		return reconcile.Result{}, err
	}
	switch err := r.Client.Create(ctx, claim); {
	case err == nil:
		x.claim, x.mine = claim, true
		return reconcile.Result{RequeueAfter: lookAgain}, r.write(ctx, x)
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // a quota, a policy
		return r.later(ctx, x, ReasonError, fmt.Sprintf("the API server refuses the claim: %s", err))
	default: // also one that has just been created: the next look finds whose it is
		return reconcile.Result{}, fmt.Errorf("create the claim of DataVolume %s: %w", x.dv.Name, err)
	}
}

// filled reports whether a node puts a disk on the volume, which only nodes of Cocoon do.
func filled(s *v1beta1.DataVolumeSpec) bool {
	return kubevirt.Imported(s) != "" || kubevirt.Uploaded(s)
}

// later tells why there is no claim yet.
func (r *Reconciler) later(ctx context.Context, x seen, reason, why string) (reconcile.Result, error) {
	s := state{status: *x.dv.Status.DeepCopy(), now: x.now}
	s.status.Progress = unknown
	s.phase(v1beta1.Pending, reason, why)
	return reconcile.Result{RequeueAfter: waitForClass}, r.save(ctx, x.dv, s.status)
}

// classFor returns the storage class that a claim names, or the default one; nil if there is none.
func (r *Reconciler) classFor(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, error) {
	if name := claim.Spec.StorageClassName; name != nil {
		if *name == "" {
			return nil, nil
		}
		class := &storagev1.StorageClass{}
		if err := r.Live.Get(ctx, client.ObjectKey{Name: *name}, class); err != nil {
			if apierrors.IsNotFound(err) {
				return nil, nil
			}
			return nil, fmt.Errorf("get storageclass %s: %w", *name, err)
		}
		return class, nil
	}
	all := &storagev1.StorageClassList{}
	if err := r.Live.List(ctx, all); err != nil {
		return nil, fmt.Errorf("list storage classes: %w", err)
	}
	var found *storagev1.StorageClass
	for i := range all.Items { // the newest, as the API server chooses
		c := &all.Items[i]
		if c.Annotations[defaultClass] == "true" && (found == nil || c.CreationTimestamp.After(found.CreationTimestamp.Time)) {
			found = c
		}
	}
	return found, nil
}

// class finds the storage class of the claim.
func (r *Reconciler) class(ctx context.Context, x *seen) (err error) {
	if x.claim.Spec.StorageClassName != nil {
		x.class, err = r.classFor(ctx, x.claim)
	}
	return err
}

// size gives a copy that asks for no size that of its source. why says why it is not known.
func (r *Reconciler) size(ctx context.Context, dv *v1beta1.DataVolume, claim *corev1.PersistentVolumeClaim) (why string, err error) {
	if size := claim.Spec.Resources.Requests[corev1.ResourceStorage]; size.Sign() > 0 {
		return "", nil
	}
	source := &corev1.PersistentVolumeClaim{}
	name := dv.Spec.Source.PVC.Name // only such a copy may ask for no size
	switch err := r.Live.Get(ctx, client.ObjectKey{Namespace: dv.Namespace, Name: name}, source); {
	case apierrors.IsNotFound(err):
		return "the source, claim " + name + ", does not exist", nil
	case err != nil:
		return "", fmt.Errorf("read claim %s: %w", name, err)
	}
	size, ok := source.Status.Capacity[corev1.ResourceStorage]
	if !ok {
		return "the source, claim " + name + ", has no volume yet", nil
	}
	if claim.Spec.Resources.Requests == nil {
		claim.Spec.Resources.Requests = corev1.ResourceList{}
	}
	claim.Spec.Resources.Requests[corev1.ResourceStorage] = size
	return "", nil
}

// choose chooses a node for a volume that must not wait for its first pod.
func (r *Reconciler) choose(ctx context.Context, x *seen) error {
	if _, now := x.dv.Annotations[kubevirt.ImmediateBinding]; !now || x.awaited() || !claimnode.Waits(x.claim, x.class) || claimnode.Of(x.claim) != "" || x.class.Provisioner != contract.VolumeDriver {
		return nil
	}
	node, err := r.node(ctx, x)
	if err != nil || node == "" {
		return err
	}
	return claimnode.Choose(ctx, r.Client, x.claim, node, nil)
}

// node returns the node for a volume: that of the source of a copy, or else one with room. It notes why there is none.
func (r *Reconciler) node(ctx context.Context, x *seen) (string, error) {
	switch s := x.dv.Spec.Source; {
	case s.Snapshot != nil:
		x.note = "a copy of a snapshot is made on the node of the first pod that uses the claim"
		return "", nil
	case s.PVC != nil:
		source := &corev1.PersistentVolumeClaim{}
		if err := r.Live.Get(ctx, client.ObjectKey{Namespace: x.dv.Namespace, Name: s.PVC.Name}, source); client.IgnoreNotFound(err) != nil {
			return "", fmt.Errorf("read claim %s: %w", s.PVC.Name, err)
		}
		if claimnode.Of(source) == "" { // also if it does not exist
			x.note = "the source, claim " + s.PVC.Name + ", has no volume on a node yet"
		}
		return claimnode.Of(source), nil
	}
	node, err := claimnode.Roomiest(ctx, r.Live, r.Client, x.claim)
	if err == nil && node == "" {
		x.note = "no node that is ready tells of enough room for the volume"
	}
	return node, err
}

// attempts reads the Events of the claim.
func (r *Reconciler) attempts(ctx context.Context, x *seen) error {
	all := &corev1.EventList{}
	if err := r.Live.List(ctx, all, client.InNamespace(x.claim.Namespace), client.MatchingFields{"involvedObject.uid": string(x.claim.UID)}); err != nil {
		return fmt.Errorf("list the events of the claim of DataVolume %s: %w", x.dv.Name, err)
	}
	x.attempts(all.Items)
	return nil
}

// write writes the status, and an Event when the volume is complete, cannot be made, or could not.
func (r *Reconciler) write(ctx context.Context, x seen) error {
	was, is := x.dv.Status.DeepCopy(), decide(x)
	if err := r.save(ctx, x.dv, is); err != nil {
		return err
	}
	why := message(&is, v1beta1.DataVolumeRunning)
	switch {
	case was.Phase != is.Phase && is.Phase == v1beta1.Succeeded:
		r.Events.Eventf(x.dv, nil, corev1.EventTypeNormal, string(is.Phase), "Make", "the volume of claim %s is complete", is.ClaimName)
	case is.Phase == v1beta1.Failed && (was.Phase != is.Phase || why != message(was, v1beta1.DataVolumeRunning)), x.claim != nil && !x.mine && why != message(was, v1beta1.DataVolumeRunning):
		r.Events.Eventf(x.dv, nil, corev1.EventTypeWarning, string(v1beta1.Failed), "Make", "%s", why)
	}
	return nil
}

// save writes the status if it is new. A conflict is no error: the change that caused it starts another reconciliation.
func (r *Reconciler) save(ctx context.Context, dv *v1beta1.DataVolume, s v1beta1.DataVolumeStatus) error {
	if apiequality.Semantic.DeepEqual(dv.Status, s) {
		return nil
	}
	next := dv.DeepCopy()
	next.Status = s
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of DataVolume %s: %w", dv.Name, err)
	}
	return nil
}
