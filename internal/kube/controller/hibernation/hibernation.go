// Package hibernation hibernates and wakes the VM of a CocoonHibernation's pod.
//
// The request is an annotation on the pod. The node hibernates the VM and reports that, and the registry confirms that it has
// the state. Several owners may request that a VM hibernates, for example a suspended CocoonSet. The VM wakes when no owner
// requests it any more.
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

// fieldOwner is the field owner of this controller's annotations on pods.
const fieldOwner = "cocoonhibernation"

// The time limit of a transition is a base plus a share for each GiB of memory and disk, at the rate of a slow network. After
// that the phase is Failed, but the node keeps retrying, and the transition may still succeed.
const (
	hibernateBase = 3 * time.Minute
	wakeBase      = 5 * time.Minute
	perGiB        = 20 * time.Second
	registryPause = 5 * time.Second
	confirmPause  = 2 * time.Second
)

// Reconciler reconciles CocoonHibernations. All fields are required except Registry. Without a registry, no object becomes
// Hibernated.
type Reconciler struct {
	Client   client.Client
	Live     client.Reader // bypasses the cache
	Registry controller.Registry
	Events   events.EventRecorder
	Now      func() time.Time
	// Observe is called with the duration of each completed transition.
	Observe func(desire v1.Desire, took time.Duration)
}

// Setup adds the reconciler to m, with that many concurrent workers. A status write triggers a reconciliation too, because an
// earlier reconciliation that did not see the write yet may have skipped its work.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	byPod := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}} // a CocoonHibernation has the name of its pod
	})
	return ctrl.NewControllerManagedBy(m).Named("cocoonhibernation").
		For(&v1.CocoonHibernation{}).
		Watches(&corev1.Pod{}, byPod, builder.WithPredicates(controller.PodChanged())).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile does one reconciliation of one CocoonHibernation.
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
		r.emitEvent(h, status, failed)
		h.Status = status
		if err := r.Client.Status().Update(ctx, h); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(fmt.Errorf("write status: %w", err))
		}
	}
	return ctrl.Result{RequeueAfter: again}, nil
}

// step brings the pod closer to the desired state and returns the progress.
func (r *Reconciler) step(ctx context.Context, h *v1.CocoonHibernation, pod *corev1.Pod) (v1.CocoonHibernationStatus, time.Duration, error) {
	s := *h.Status.DeepCopy()
	if s.ObservedGeneration != h.Generation { // a new request starts its own time limit
		s.Since = nil
	}
	s.ObservedGeneration = h.Generation
	if pod == nil || pod.DeletionTimestamp != nil {
		r.phase(&s, h, v1.HibernationPending, "the pod "+h.Spec.PodRef.Name+" does not exist")
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
			r.phase(&s, h, v1.HibernationHibernating, "the VM is hibernated on its node, but the manager has no registry to confirm that the state is saved; set EPOCH_URL of the manager")
			return s, 0, nil
		}
		pause := confirmPause
		there, err := r.Registry.Has(ctx, controller.VM{Namespace: h.Namespace, Name: s.VMName}, contract.HibernateSnapshotTag)
		if there {
			r.phase(&s, h, v1.HibernationHibernated, "")
			return s, 0, nil
		}
		text = "the hibernated state is not in the registry yet"
		if err != nil {
			text, pause = "the hibernated state cannot be looked up in the registry: "+err.Error(), registryPause
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
		r.phase(&s, h, v1.HibernationPending, "the VM stays hibernated: its CocoonSet is suspended, or its hibernate annotation was set by hand")
	default:
		r.phase(&s, h, r.inTime(&s, pod, v1.HibernationWaking, wakeBase), life.Message)
		return s, r.left(&s, pod, wakeBase), nil
	}
	return s, 0, nil
}

// phase sets the condition, the phase and, for a transition, when it began.
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
	default: // hibernating or waking
	}
	meta.SetStatusCondition(&s.Conditions, c)
}

// inTime returns transition, or Failed when the transition has exceeded its time limit.
func (r *Reconciler) inTime(s *v1.CocoonHibernationStatus, pod *corev1.Pod, transition v1.HibernationPhase, base time.Duration) v1.HibernationPhase {
	began := s.Since != nil && (s.Phase == transition || s.Phase == v1.HibernationFailed)
	if began && r.Now().Sub(s.Since.Time) > budget(pod, base) {
		return v1.HibernationFailed
	}
	return transition
}

// left returns the delay until the next check of a running transition, if nothing changes before.
func (r *Reconciler) left(s *v1.CocoonHibernationStatus, pod *corev1.Pod, base time.Duration) time.Duration {
	if s.Since == nil || s.Phase == v1.HibernationFailed {
		return 0
	}
	return max(time.Second, s.Since.Add(budget(pod, base)).Sub(r.Now())+time.Second)
}

// budget returns the time limit of a transition. It grows with the amount of data to transfer.
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

// emitEvent emits an Event when a phase is reached. failed says that the VM has failed permanently.
func (r *Reconciler) emitEvent(h *v1.CocoonHibernation, s v1.CocoonHibernationStatus, failed bool) {
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
		say(corev1.EventTypeNormal, "Hibernated", "VM %s is hibernated; its state is in the registry", s.VMName)
	case v1.HibernationActive:
		if h.Status.Phase == "" {
			return // it was not hibernated
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
		say(corev1.EventTypeWarning, reason, "VM %s did not finish in time; its node retries: %s", s.VMName, text)
		return
	default:
		return
	}
	if r.Observe != nil && took > 0 {
		r.Observe(h.Spec.Desire, took)
	}
}

// finish withdraws the request. The VM wakes unless another owner requests that it hibernates. The node that wakes the VM
// removes its state from the registry.
func (r *Reconciler) finish(ctx context.Context, h *v1.CocoonHibernation, pod *corev1.Pod) error {
	if !controllerutil.ContainsFinalizer(h, v1.FinalizerHibernation) {
		return nil
	}
	if pod == nil || !controller.Marked(pod, fieldOwner) { // the cache may be stale, and there is no later check
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
