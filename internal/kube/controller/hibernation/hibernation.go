// Package hibernation puts the VM of a CocoonHibernation's pod to sleep and wakes it.
//
// The wish is an annotation on the pod, the node does the work and says so, and the registry confirms it. Several may
// wish that a VM sleeps, a suspended CocoonSet too: it wakes when nobody wishes it any more.
package hibernation

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// fieldOwner is who the marks on pods belong to.
const fieldOwner = "cocoonhibernation"

// How long a transition may take before it is called failed: a base, and more for each GiB of memory and disk, at the
// pace of a slow network. A failed one goes on being tried by the node, and may still come to a good end.
const (
	hibernateBase = 3 * time.Minute
	wakeBase      = 5 * time.Minute
	perGiB        = 20 * time.Second
	registryPause = 5 * time.Second
	confirmPause  = 2 * time.Second
)

// Reconciler makes CocoonHibernations true. All fields are needed but Registry: without one nothing is ever Hibernated.
type Reconciler struct {
	Client   client.Client
	Live     client.Reader // past the cache
	Registry controller.Registry
	Events   events.EventRecorder
	Now      func() time.Time
	// Observe is told how long each transition took that came to its end.
	Observe func(desire v1.Desire, took time.Duration)
}

// Setup adds the reconciler to m, with so many turns at a time. A write of a status brings a turn too: one that did not know
// of it yet may have done nothing because of it.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	byPod := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}} // one is called like its pod
	})
	return ctrl.NewControllerManagedBy(m).Named("cocoonhibernation").
		For(&v1.CocoonHibernation{}).
		Watches(&corev1.Pod{}, byPod, builder.WithPredicates(controller.PodChanged())).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile takes one turn with one CocoonHibernation.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	h := &v1.CocoonHibernation{}
	if err := r.Client.Get(ctx, req.NamespacedName, h); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	pod := &corev1.Pod{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: h.Namespace, Name: h.Spec.PodRef.Name}, pod); apierrors.IsNotFound(err) {
		pod = nil
	} else if err != nil {
		return ctrl.Result{}, fmt.Errorf("get pod: %w", err)
	}
	if h.DeletionTimestamp != nil {
		return ctrl.Result{}, r.finish(ctx, h, pod)
	}
	if !controllerutil.ContainsFinalizer(h, v1.FinalizerHibernation) {
		before := h.DeepCopy()
		controllerutil.AddFinalizer(h, v1.FinalizerHibernation)
		if err := r.Client.Patch(ctx, h, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(fmt.Errorf("add finalizer: %w", err))
		}
	}
	status, again, err := r.step(ctx, h, pod)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !apiequality.Semantic.DeepEqual(h.Status, status) {
		failed := false
		if pod != nil {
			_, failed = controller.Failed(pod)
		}
		r.tell(h, status, failed)
		h.Status = status
		if err := r.Client.Status().Update(ctx, h); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(fmt.Errorf("write status: %w", err))
		}
	}
	return ctrl.Result{RequeueAfter: again}, nil
}

// step brings the pod nearer to what is wanted and says how far it is.
func (r *Reconciler) step(ctx context.Context, h *v1.CocoonHibernation, pod *corev1.Pod) (v1.CocoonHibernationStatus, time.Duration, error) {
	s := *h.Status.DeepCopy()
	if s.ObservedGeneration != h.Generation { // another wish has a time of its own
		s.Since = nil
	}
	s.ObservedGeneration = h.Generation
	if pod == nil || pod.DeletionTimestamp != nil {
		r.phase(&s, h, v1.HibernationPending, "the pod "+h.Spec.PodRef.Name+" is not there")
		return s, 0, nil
	}
	s.VMName = convert.VMName(pod)
	sleep := h.Spec.Desire == v1.DesireHibernate
	if sleep != controller.Marked(pod, fieldOwner) {
		if err := controller.Mark(ctx, r.Client, fieldOwner, pod, sleep, ""); err != nil {
			return s, 0, fmt.Errorf("mark pod %s: %w", pod.Name, err)
		}
	}
	if sleep {
		return r.sleeping(ctx, h, s, pod)
	}
	return r.waking(h, s, pod)
}

func (r *Reconciler) sleeping(ctx context.Context, h *v1.CocoonHibernation, s v1.CocoonHibernationStatus, pod *corev1.Pod) (v1.CocoonHibernationStatus, time.Duration, error) {
	if why, failed := controller.Failed(pod); failed {
		r.phase(&s, h, v1.HibernationFailed, "the VM failed: "+why)
		return s, 0, nil
	}
	text := controller.Life(pod).Message
	if contract.Hibernate(pod.Annotations) && controller.Hibernated(pod) {
		if r.Registry == nil {
			r.phase(&s, h, v1.HibernationHibernating, "the VM sleeps on its node; there is no registry that could confirm it")
			return s, 0, nil
		}
		pause := confirmPause
		there, err := r.Registry.Has(ctx, controller.VM{Namespace: h.Namespace, Name: s.VMName}, contract.HibernateSnapshotTag)
		if there {
			r.phase(&s, h, v1.HibernationHibernated, "")
			return s, 0, nil
		}
		text = "the registry does not have it yet"
		if err != nil {
			text, pause = "the registry cannot confirm it: "+err.Error(), registryPause
		}
		r.phase(&s, h, r.inTime(&s, pod, v1.HibernationHibernating, hibernateBase), text)
		return s, pause, nil
	}
	r.phase(&s, h, r.inTime(&s, pod, v1.HibernationHibernating, hibernateBase), text)
	return s, r.left(&s, pod, hibernateBase), nil
}

func (r *Reconciler) waking(h *v1.CocoonHibernation, s v1.CocoonHibernationStatus, pod *corev1.Pod) (v1.CocoonHibernationStatus, time.Duration, error) {
	life := controller.Life(pod)
	why, failed := controller.Failed(pod)
	switch {
	case failed:
		r.phase(&s, h, v1.HibernationFailed, "the VM failed: "+why)
	case controller.Awake(pod), life.State == "" && controller.Ready(pod):
		r.phase(&s, h, v1.HibernationActive, "")
	case contract.Hibernate(pod.Annotations) && !controller.Marked(pod, fieldOwner):
		r.phase(&s, h, v1.HibernationPending, "somebody else wishes that it hibernates: its set is suspended, or it was annotated by hand")
	default:
		r.phase(&s, h, r.inTime(&s, pod, v1.HibernationWaking, wakeBase), life.Message)
		return s, r.left(&s, pod, wakeBase), nil
	}
	return s, 0, nil
}

// phase sets the phase, when it began where it is one that passes, and the condition.
func (r *Reconciler) phase(s *v1.CocoonHibernationStatus, h *v1.CocoonHibernation, phase v1.HibernationPhase, text string) {
	transition := phase == v1.HibernationHibernating || phase == v1.HibernationWaking
	if transition && (s.Phase != phase || s.Since == nil) {
		s.Since = &metav1.Time{Time: r.Now().Truncate(time.Second)}
	}
	if !transition && phase != v1.HibernationFailed {
		s.Since = nil
	}
	s.Phase = phase
	c := metav1.Condition{Type: v1.ConditionReady, Status: metav1.ConditionFalse, Reason: "Pending", Message: text, ObservedGeneration: h.Generation, LastTransitionTime: metav1.Time{Time: r.Now()}}
	switch phase {
	case v1.HibernationHibernated, v1.HibernationActive:
		c.Status, c.Reason = metav1.ConditionTrue, "Done"
	case v1.HibernationFailed:
		c.Reason = "Failed"
	default: // on the way
	}
	meta.SetStatusCondition(&s.Conditions, c)
}

// inTime is the phase of a transition, or Failed when it takes too long.
func (r *Reconciler) inTime(s *v1.CocoonHibernationStatus, pod *corev1.Pod, transition v1.HibernationPhase, base time.Duration) v1.HibernationPhase {
	began := s.Since != nil && (s.Phase == transition || s.Phase == v1.HibernationFailed)
	if began && r.Now().Sub(s.Since.Time) > budget(pod, base) {
		return v1.HibernationFailed
	}
	return transition
}

// left is when a transition in flight is to be looked at again although nothing changed.
func (r *Reconciler) left(s *v1.CocoonHibernationStatus, pod *corev1.Pod, base time.Duration) time.Duration {
	if s.Since == nil || s.Phase == v1.HibernationFailed {
		return 0
	}
	return max(time.Second, s.Since.Add(budget(pod, base)).Sub(r.Now())+time.Second)
}

// budget grows with what there is to carry.
func budget(pod *corev1.Pod, base time.Duration) time.Duration {
	var bytes int64
	for _, c := range pod.Spec.Containers {
		for _, name := range []corev1.ResourceName{corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			limit, request := c.Resources.Limits[name], c.Resources.Requests[name]
			bytes += max(limit.Value(), request.Value())
		}
	}
	return base + time.Duration(bytes>>30)*perGiB
}

// tell makes an Event of a phase that was reached. failed says that the VM has, and will not get there.
func (r *Reconciler) tell(h *v1.CocoonHibernation, s v1.CocoonHibernationStatus, failed bool) {
	if h.Status.Phase == s.Phase {
		return
	}
	say := func(kind, reason, format string, args ...any) {
		r.Events.Eventf(h, nil, kind, reason, "Reconcile", format, args...)
	}
	took := time.Duration(0)
	if h.Status.Since != nil {
		took = r.Now().Sub(h.Status.Since.Time)
	}
	switch s.Phase {
	case v1.HibernationHibernated:
		say(corev1.EventTypeNormal, "Hibernated", "VM %s hibernates; its state is in the registry", s.VMName)
	case v1.HibernationActive:
		if h.Status.Phase == "" {
			return // it was never asleep
		}
		say(corev1.EventTypeNormal, "WokenActive", "VM %s is awake", s.VMName)
	case v1.HibernationFailed:
		text := ""
		if c := meta.FindStatusCondition(s.Conditions, v1.ConditionReady); c != nil {
			text = c.Message
		}
		if failed {
			say(corev1.EventTypeWarning, "PodLifecycleFailed", "VM %s: %s", s.VMName, text)
			return
		}
		reason := "WakeTimedOut"
		if h.Spec.Desire == v1.DesireHibernate {
			reason = "HibernateTimedOut"
		}
		say(corev1.EventTypeWarning, reason, "VM %s did not get there in time; its node goes on trying: %s", s.VMName, text)
		return
	default:
		return
	}
	if r.Observe != nil && took > 0 {
		r.Observe(h.Spec.Desire, took)
	}
}

// finish takes back the wish. The VM wakes unless somebody else wishes that it sleeps; the node that wakes it clears the
// registry.
func (r *Reconciler) finish(ctx context.Context, h *v1.CocoonHibernation, pod *corev1.Pod) error {
	if !controllerutil.ContainsFinalizer(h, v1.FinalizerHibernation) {
		return nil
	}
	if pod == nil || !controller.Marked(pod, fieldOwner) { // the cache may be late, and nobody looks again
		pod = &corev1.Pod{}
		if err := r.Live.Get(ctx, client.ObjectKey{Namespace: h.Namespace, Name: h.Spec.PodRef.Name}, pod); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("get pod: %w", err)
		}
	}
	if controller.Marked(pod, fieldOwner) {
		if err := controller.Mark(ctx, r.Client, fieldOwner, pod, false, ""); err != nil {
			return fmt.Errorf("mark pod %s: %w", pod.Name, err)
		}
	}
	before := h.DeepCopy()
	controllerutil.RemoveFinalizer(h, v1.FinalizerHibernation)
	return controller.IgnoreStale(r.Client.Patch(ctx, h, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}
