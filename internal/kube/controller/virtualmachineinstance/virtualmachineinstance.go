// Package virtualmachineinstance makes the pod of each VirtualMachineInstance, and tells in the instance's status what became of it.
//
// A node of ours runs the pod as a VM. The controller knows nothing of nodes: what a VM is like is in its pod (ADR 23).
package virtualmachineinstance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Reasons of Events.
const (
	ReasonDeleted  = "SuccessfulDelete"
	ReasonRefused  = "FailedCreate"
	ReasonOccupied = "NameTaken" // a pod of somebody else has the name
	ReasonIgnored  = "FieldsIgnored"
	ReasonPaused   = "Paused"
	ReasonResized  = "Resized"
	ReasonUnpaused = "Unpaused"

	ReasonConnected    = "InterfacesAttached"
	ReasonDisconnected = "InterfacesDetached"
)

// claimPause is the time after which an instance looks again for a claim that does not exist.
const claimPause = 15 * time.Second

// Reconciler reconciles VirtualMachineInstances. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachineinstance").
		For(&v1.VirtualMachineInstance{}).
		Owns(&corev1.Pod{}).
		Watches(&v1beta1.DataVolume{}, handler.EnqueueRequestsFromMapFunc(r.waiting)).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile brings one instance a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	vmi := &v1.VirtualMachineInstance{}
	if err := r.Client.Get(ctx, req.NamespacedName, vmi); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	pod, err := r.pod(ctx, vmi)
	if err != nil {
		return reconcile.Result{}, err
	}
	if vmi.DeletionTimestamp != nil {
		return reconcile.Result{}, r.remove(ctx, vmi, pod)
	}
	if vmi.IsFinal() {
		return reconcile.Result{}, nil
	}
	if pod != nil {
		return r.observe(ctx, vmi, pod)
	}
	if vmi.Status.Phase != v1.VmPhaseUnset && vmi.Status.Phase != v1.Pending {
		return reconcile.Result{}, r.write(ctx, vmi, kubevirt.Fail(vmi, kubevirt.ReasonPodGone, "the pod of the VM was deleted", r.Now()))
	}
	if errs, _ := kubevirt.CheckInstance(vmi); len(errs) > 0 {
		r.Events.Eventf(vmi, nil, corev1.EventTypeWarning, ReasonRefused, "Create", "%s", errs.ToAggregate().Error())
		return reconcile.Result{}, r.write(ctx, vmi, kubevirt.Fail(vmi, kubevirt.ReasonNotSupported, errs.ToAggregate().Error(), r.Now()))
	}
	copied, why, err := r.claims(ctx, vmi)
	if err != nil || why != "" {
		if err == nil {
			err = r.write(ctx, vmi, kubevirt.Wait(vmi, kubevirt.ReasonNoClaim, why, r.Now()), v1.VirtualMachineInstanceFinalizer)
		}
		return reconcile.Result{RequeueAfter: claimPause}, err
	}
	return r.create(ctx, vmi, copied)
}

// claims returns the claims that the instance has copies of, by the names of its volumes. why says for which claim of those, or of its DataVolumes,
// it waits; "": all exist. Its pod waits until they are bound.
func (r *Reconciler) claims(ctx context.Context, vmi *v1.VirtualMachineInstance) (copied map[string]*corev1.PersistentVolumeClaim, why string, err error) {
	copied = map[string]*corev1.PersistentVolumeClaim{}
	for _, v := range vmi.Spec.Volumes {
		name := kubevirt.CopiedClaim(&v)
		if v.DataVolume != nil {
			name = v.DataVolume.Name
		}
		if name == "" {
			continue
		}
		claim := &corev1.PersistentVolumeClaim{}
		err := r.Live.Get(ctx, client.ObjectKey{Namespace: vmi.Namespace, Name: name}, claim)
		switch {
		case apierrors.IsNotFound(err) && v.DataVolume != nil:
			return nil, fmt.Sprintf("volume %s: the DataVolume %s has no claim yet", v.Name, name), nil
		case apierrors.IsNotFound(err):
			return nil, fmt.Sprintf("volume %s: the claim %s does not exist; create it", v.Name, name), nil
		case err != nil:
			return nil, "", fmt.Errorf("read the claim of volume %s of VirtualMachineInstance %s: %w", v.Name, vmi.Name, err)
		case v.DataVolume == nil:
			copied[v.Name] = claim
		}
	}
	return copied, "", nil
}

// waiting returns the instances without a pod that have a DataVolume.
func (r *Reconciler) waiting(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	all := &v1.VirtualMachineInstanceList{}
	if r.Client.List(ctx, all, client.InNamespace(o.GetNamespace()), client.UnsafeDisableDeepCopy) != nil {
		return nil // there is no API server behind the list that could fail
	}
	for i := range all.Items {
		if vmi := &all.Items[i]; (vmi.Status.Phase == v1.VmPhaseUnset || vmi.Status.Phase == v1.Pending) && kubevirt.HasDataVolume(&vmi.Spec, o.GetName()) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(vmi)})
		}
	}
	return requests
}

// silence returns how long nothing is told of a pod with which the instance gets the status s; 0: it is told now. What is wrong is told at once, and
// so is the end of the pod: an instance that has told of no pod gets another one.
func (r *Reconciler) silence(vmi *v1.VirtualMachineInstance, pod *corev1.Pod, s v1.VirtualMachineInstanceStatus) time.Duration {
	wrong := func(c v1.VirtualMachineInstanceCondition) bool {
		return c.Type == v1.VirtualMachineInstanceSynchronized || c.Type == v1.VirtualMachineInstanceConditionType(corev1.PodScheduled)
	}
	if vmi.Status.Phase != v1.Pending || pod.DeletionTimestamp != nil || s.Phase != v1.Scheduling && s.Phase != v1.Scheduled || slices.ContainsFunc(s.Conditions, wrong) {
		return 0
	}
	return max(0, vmi.CreationTimestamp.Add(kubevirt.Quiet).Sub(r.Now()))
}

// observe writes what has become of the pod.
func (r *Reconciler) observe(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod) (reconcile.Result, error) {
	s := kubevirt.Observe(vmi, pod, r.Now())
	if err := r.resize(ctx, vmi, pod, &s); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.dump(ctx, vmi, pod); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.connect(ctx, vmi, pod, s.Phase); err != nil {
		return reconcile.Result{}, err
	}
	if rest := r.silence(vmi, pod, s); rest > 0 {
		return reconcile.Result{RequeueAfter: rest}, nil
	}
	if err := r.write(ctx, vmi, s); err != nil {
		return reconcile.Result{}, err
	}
	next := *vmi
	next.Status = s
	was, is := kubevirt.Condition(vmi, v1.VirtualMachineInstancePaused), kubevirt.Condition(&next, v1.VirtualMachineInstancePaused)
	switch {
	case was == nil && is != nil:
		r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonPaused, "Pause", "the guest is paused")
	case was != nil && is == nil && s.Phase == v1.Running:
		r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonUnpaused, "Unpause", "the guest runs")
	}
	got, gave := kubevirt.InterfaceChanges(vmi.Status.Interfaces, s.Interfaces)
	if got != "" {
		r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonConnected, "Hotplug", "the guest has the new interfaces %s", got)
	}
	if gave != "" {
		r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonDisconnected, "Hotplug", "the guest has given back the interfaces %s", gave)
	}
	for _, c := range kubevirt.VolumeChanges(vmi.Status.VolumeStatus, s.VolumeStatus) {
		kind := corev1.EventTypeNormal
		if c.Failed {
			kind = corev1.EventTypeWarning
		}
		r.Events.Eventf(vmi, pod, kind, c.Reason, "Hotplug", "%s", c.Text)
	}
	return reconcile.Result{}, nil
}

// resize gives the pod the resources for the size that the instance has now. The node gives the guest what is new. A refusal of the API server is
// in the status.
func (r *Reconciler) resize(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod, s *v1.VirtualMachineInstanceStatus) error {
	want := kubevirt.Resized(vmi, pod)
	if want == nil || s.Phase != v1.Running {
		return nil
	}
	next := pod.DeepCopy()
	next.Spec.Containers[0].Resources = *want
	err := r.Client.SubResource("resize").Patch(ctx, next, client.StrategicMergeFrom(pod, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) { // a quota, a class of service that would change
		kubevirt.NotResized(s, "the API server refuses to resize the pod: "+err.Error(), r.Now())
		return nil
	}
	if err != nil {
		return controller.IgnoreStale(err)
	}
	r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonResized, "Resize", "the pod %s is to have %s CPUs and %s of memory", pod.Name, want.Requests.Cpu(), want.Limits.Memory())
	return nil
}

// dump asks the node of the pod for the memory that the status of vmi asks for. The node does each request once.
func (r *Reconciler) dump(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod) error {
	ask, same := kubevirt.DumpRequest(vmi, pod)
	if same {
		return nil
	}
	next := pod.DeepCopy()
	if delete(next.Annotations, contract.KeyMemoryDump); ask != "" {
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, contract.KeyMemoryDump, ask)
	}
	return controller.IgnoreStale(r.Client.Patch(ctx, next, client.MergeFromWithOptions(pod, client.MergeFromWithOptimisticLock{})))
}

// connect tells the pod which networks the instance has now. The node attaches and detaches the VM.
func (r *Reconciler) connect(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod, phase v1.VirtualMachineInstancePhase) error {
	want := kubevirt.Connected(vmi, pod)
	if want == nil || phase != v1.Running {
		return nil
	}
	next := pod.DeepCopy()
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	for key, value := range want {
		if value == "" {
			delete(next.Annotations, key)
		} else {
			next.Annotations[key] = value
		}
	}
	return controller.IgnoreStale(r.Client.Patch(ctx, next, client.MergeFromWithOptions(pod, client.MergeFromWithOptimisticLock{})))
}

// pod returns the pod of vmi, nil if it does not exist. The cache may not have heard of a pod that was just created, so what is not in
// it is looked for at the API server, once the instance says that it has a pod.
func (r *Reconciler) pod(ctx context.Context, vmi *v1.VirtualMachineInstance) (*corev1.Pod, error) {
	readers := []client.Reader{r.Client}
	if vmi.Status.Phase != v1.VmPhaseUnset && vmi.Status.Phase != v1.Pending {
		readers = append(readers, r.Live)
	}
	for _, from := range readers {
		pod := &corev1.Pod{}
		err := from.Get(ctx, client.ObjectKey{Namespace: vmi.Namespace, Name: kubevirt.PodName(vmi)}, pod)
		if err == nil && metav1.IsControlledBy(pod, vmi) {
			return pod, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read pod of VirtualMachineInstance %s: %w", vmi.Name, err)
		}
	}
	return nil, nil
}

// create creates the Secret and the pod of an instance that is not refused, after the instance has the finalizer that keeps it until its pod is gone.
func (r *Reconciler) create(ctx context.Context, vmi *v1.VirtualMachineInstance, copied map[string]*corev1.PersistentVolumeClaim) (reconcile.Result, error) {
	_, warnings := kubevirt.CheckInstance(vmi)
	if !controllerutil.ContainsFinalizer(vmi, v1.VirtualMachineInstanceFinalizer) {
		s := *vmi.Status.DeepCopy()
		kubevirt.SetPhase(&s, v1.Pending, r.Now())
		return reconcile.Result{}, r.write(ctx, vmi, s, v1.VirtualMachineInstanceFinalizer) // the change brings the instance back
	}
	if seed := kubevirt.Seed(vmi); seed != nil {
		// A controller that could read Secrets could read those of everybody, so this one can only create them. The name depends on
		// the UID of the instance: a Secret that exists is of an earlier try.
		if err := r.Client.Create(ctx, seed); err != nil && !apierrors.IsAlreadyExists(err) {
			return reconcile.Result{}, fmt.Errorf("create the Secret of VirtualMachineInstance %s: %w", vmi.Name, err)
		}
	}
	want := kubevirt.Pod(vmi)
	kubevirt.SizeCopies(want, copied)
	pod, err := r.makePod(ctx, vmi, want)
	if err != nil {
		return reconcile.Result{}, err
	}
	if len(warnings) > 0 {
		r.Events.Eventf(vmi, pod, corev1.EventTypeWarning, ReasonIgnored, "Create", "%s", strings.Join(warnings, "; "))
	}
	return r.observe(ctx, vmi, pod)
}

// makePod creates the pod, and returns what the API server has. One that exists already is of an earlier try, or of somebody else, who keeps it.
func (r *Reconciler) makePod(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod) (*corev1.Pod, error) {
	err := r.Client.Create(ctx, pod)
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) { // a quota, a policy
		r.Events.Eventf(vmi, nil, corev1.EventTypeWarning, ReasonRefused, "Create", "the API server refuses the pod %s: %s", pod.Name, err.Error())
	}
	if !apierrors.IsAlreadyExists(err) {
		return pod, err
	}
	there := &corev1.Pod{}
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(pod), there); err != nil {
		return nil, fmt.Errorf("read pod of VirtualMachineInstance %s: %w", vmi.Name, err)
	}
	if !metav1.IsControlledBy(there, vmi) {
		r.Events.Eventf(vmi, nil, corev1.EventTypeWarning, ReasonOccupied, "Create", "the pod %s exists and is not of this instance; delete it", pod.Name)
		return nil, fmt.Errorf("pod %s exists and is not of VirtualMachineInstance %s", pod.Name, vmi.Name)
	}
	return there, nil
}

// remove deletes the pod, and lets the instance go when the pod is gone. The Secret goes with the instance.
func (r *Reconciler) remove(ctx context.Context, vmi *v1.VirtualMachineInstance, pod *corev1.Pod) error {
	if !controllerutil.ContainsFinalizer(vmi, v1.VirtualMachineInstanceFinalizer) {
		return nil
	}
	if pod == nil { // a pod that the cache has not heard of would be left behind
		live := &corev1.Pod{}
		err := r.Live.Get(ctx, client.ObjectKey{Namespace: vmi.Namespace, Name: kubevirt.PodName(vmi)}, live)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("read pod of VirtualMachineInstance %s: %w", vmi.Name, err)
		}
		if err == nil && metav1.IsControlledBy(live, vmi) {
			pod = live
		}
	}
	if pod == nil {
		gone := vmi.DeepCopy()
		controllerutil.RemoveFinalizer(gone, v1.VirtualMachineInstanceFinalizer)
		return controller.IgnoreStale(r.Client.Patch(ctx, gone, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{})))
	}
	if pod.DeletionTimestamp != nil {
		return nil
	}
	if err := r.Client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID}); err != nil {
		return controller.IgnoreStale(err)
	}
	r.Events.Eventf(vmi, pod, corev1.EventTypeNormal, ReasonDeleted, "Delete", "deleted the pod %s", pod.Name)
	return nil
}

// write writes what of the status is new, and the finalizer. A VirtualMachineInstance has no subresource for its status. It is a patch:
// an update would also write the spec, as our types have it, with empty objects where the user has none, and the spec never changes.
func (r *Reconciler) write(ctx context.Context, vmi *v1.VirtualMachineInstance, s v1.VirtualMachineInstanceStatus, finalizers ...string) error {
	next := vmi.DeepCopy()
	next.Status = s
	next.Finalizers = append(next.Finalizers, finalizers...)
	if s.NodeName != "" {
		metav1.SetMetaDataLabel(&next.ObjectMeta, v1.NodeNameLabel, s.NodeName)
	}
	if apiequality.Semantic.DeepEqual(vmi, next) {
		return nil
	}
	return controller.IgnoreStale(r.Client.Patch(ctx, next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{})))
}
