package aggregated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A change of a VirtualMachine is a JSON patch that first tests what was read, so that of two requests at a time one fails
// with 409. A change of spec.runStrategy or spec.running keeps its effect; an entry of status.stateChangeRequests is one
// action of the controller, for the run strategies that such requests belong to.

// start makes a VirtualMachine run.
func (s *Server) start(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.StartOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	if err != nil {
		return err
	}
	vm, vmi, err := s.pair(r.Context(), t)
	if err != nil {
		return err
	}
	strategy, err := vm.RunStrategy()
	switch {
	case err != nil:
		return conflict(t, "spec.running and spec.runStrategy are both set: %w", err)
	case vmi != nil && !vmi.IsFinal() && vmi.Status.Phase != v1.Unknown && vmi.Status.Phase != v1.VmPhaseUnset:
		return conflict(t, "VM is already running")
	}
	begin := v1.VirtualMachineStateChangeRequest{Action: v1.StartRequest}
	if o.Paused {
		begin.Data = map[string]string{v1.StartRequestDataPausedKey: v1.StartRequestDataPausedTrue}
	}
	switch strategy {
	case v1.RunStrategyHalted:
		if o.Paused { // the controller changes the strategy
			err = s.request(r.Context(), t, vm, dry, begin)
			break
		}
		err = s.patchSpec(r.Context(), t, vm, true, dry)
	case v1.RunStrategyManual, v1.RunStrategyRerunOnFailure:
		requests := []v1.VirtualMachineStateChangeRequest{begin}
		switch {
		case strategy == v1.RunStrategyRerunOnFailure && vmi != nil && vmi.Status.Phase == v1.Failed:
			return conflict(t, "%v does not support starting VM from failed state", strategy)
		case vmi != nil && vmi.IsFinal():
			requests = []v1.VirtualMachineStateChangeRequest{{Action: v1.StopRequest, UID: &vmi.UID}, begin}
		}
		err = s.request(r.Context(), t, vm, dry, requests...)
	default:
		return conflict(t, "%v does not support manual start requests", strategy)
	}
	return accepted(w, err)
}

// stop makes a VirtualMachine stop. A grace period shortens the time that the running guest has.
func (s *Server) stop(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.StopOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	if err != nil {
		return err
	}
	if o.GracePeriod != nil && *o.GracePeriod < 0 {
		return apierrors.NewBadRequest("gracePeriod has to be greater or equal to 0")
	}
	vm, vmi, err := s.pair(r.Context(), t)
	if err != nil {
		return err
	}
	strategy, err := vm.RunStrategy()
	if err != nil {
		return conflict(t, "spec.running and spec.runStrategy are both set: %w", err)
	}
	runs := vmi != nil && !vmi.IsFinal()
	switch strategy {
	case v1.RunStrategyHalted: // it stops already
		switch {
		case !runs:
			return conflict(t, "VM is not running")
		case o.GracePeriod == nil || *o.GracePeriod >= graceOf(vmi):
			return conflict(t, "%v only supports manual stop requests with a shorter graceperiod", strategy)
		}
	case v1.RunStrategyManual, v1.RunStrategyRerunOnFailure:
		if !runs {
			return conflict(t, "VM is not running")
		}
		err = s.request(r.Context(), t, vm, dry, v1.VirtualMachineStateChangeRequest{Action: v1.StopRequest, UID: &vmi.UID})
	case v1.RunStrategyAlways, v1.RunStrategyOnce:
		err = s.patchSpec(r.Context(), t, vm, false, dry)
	default:
		return conflict(t, "%v does not support manual stop requests", strategy)
	}
	if err == nil && runs && o.GracePeriod != nil {
		err = s.hurry(r.Context(), vmi, *o.GracePeriod, dry)
	}
	return accepted(w, err)
}

// restart makes another instance of a VirtualMachine that runs.
func (s *Server) restart(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.RestartOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	switch {
	case err != nil:
		return err
	case o.GracePeriodSeconds != nil && *o.GracePeriodSeconds > 0:
		return apierrors.NewBadRequest("For force restart, only gracePeriod=0 is supported for now")
	case o.GracePeriodSeconds != nil && *o.GracePeriodSeconds < 0:
		return apierrors.NewBadRequest("gracePeriod has to be greater or equal to 0")
	}
	vm, vmi, err := s.pair(r.Context(), t)
	if err != nil {
		return err
	}
	strategy, err := vm.RunStrategy()
	switch {
	case err != nil:
		return conflict(t, "spec.running and spec.runStrategy are both set: %w", err)
	case strategy != v1.RunStrategyAlways && strategy != v1.RunStrategyManual && strategy != v1.RunStrategyRerunOnFailure:
		return conflict(t, "RunStrategy %v does not support manual restart requests", strategy)
	case vmi == nil:
		return conflict(t, "VM is not running: %v", v1.RunStrategyHalted)
	}
	err = s.request(r.Context(), t, vm, dry, v1.VirtualMachineStateChangeRequest{Action: v1.StopRequest, UID: &vmi.UID}, v1.VirtualMachineStateChangeRequest{Action: v1.StartRequest})
	if err == nil && o.GracePeriodSeconds != nil && !vmi.IsFinal() {
		err = s.hurry(r.Context(), vmi, 0, dry)
	}
	return accepted(w, err)
}

func accepted(w http.ResponseWriter, err error) error {
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// pair returns the VirtualMachine of the target and its instance, nil if there is none. An instance of the name that belongs to
// nobody or to another owner is not that of the VirtualMachine.
func (s *Server) pair(ctx context.Context, t target) (*v1.VirtualMachine, *v1.VirtualMachineInstance, error) {
	vm, err := s.machine(ctx, t)
	if err != nil {
		return nil, nil, err
	}
	vmi, err := s.instance(ctx, t)
	switch {
	case apierrors.IsNotFound(err):
		return vm, nil, nil
	case err != nil:
		return nil, nil, err
	case !controlledBy(vmi, vm.UID):
		return nil, nil, conflict(t, "VirtualMachineInstance %s was not created by this VM; delete it, or rename the VM", vmi.Name)
	}
	return vm, vmi, nil
}

func controlledBy(o client.Object, uid types.UID) bool {
	ref := metav1.GetControllerOf(o)
	return ref != nil && ref.UID == uid
}

// defaultGrace is KubeVirt's default of terminationGracePeriodSeconds.
const defaultGrace = 30

func graceOf(vmi *v1.VirtualMachineInstance) int64 {
	if g := vmi.Spec.TerminationGracePeriodSeconds; g != nil {
		return *g
	}
	return defaultGrace
}

type step struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// patchSpec sets the run strategy to Always or Halted, in the field that the object uses.
func (s *Server) patchSpec(ctx context.Context, t target, vm *v1.VirtualMachine, run bool, dry []string) error {
	if vm.Spec.Running != nil {
		return s.patch(ctx, t, vm, false, dry, step{"test", "/spec/running", vm.Spec.Running}, step{"add", "/spec/running", run})
	}
	want := v1.RunStrategyHalted
	if run {
		want = v1.RunStrategyAlways
	}
	return s.patch(ctx, t, vm, false, dry, step{"test", "/spec/runStrategy", vm.Spec.RunStrategy}, step{"add", "/spec/runStrategy", want})
}

// request asks the controller for changes of the state. A stop replaces what was asked for before; everything else must wait
// until the controller has done that.
func (s *Server) request(ctx context.Context, t target, vm *v1.VirtualMachine, dry []string, changes ...v1.VirtualMachineStateChangeRequest) error {
	var steps []step
	there := vm.Status.StateChangeRequests
	switch {
	case equality.Semantic.DeepEqual(vm.Status, v1.VirtualMachineStatus{}):
		// No field of the status can be added while there is no status.
		steps = []step{{"test", "/metadata/resourceVersion", vm.ResourceVersion}, {"add", "/status", v1.VirtualMachineStatus{StateChangeRequests: changes}}}
	case len(there) > 0 && (len(changes) > 1 || changes[0].Action != v1.StopRequest):
		return conflict(t, "unable to complete request: stop/start already underway")
	default:
		steps = []step{{"test", "/status/stateChangeRequests", there}, {"add", "/status/stateChangeRequests", changes}}
	}
	if vm.Status.StartFailure != nil {
		steps = append(steps, step{Op: "remove", Path: "/status/startFailure"}) // the back-off ends: a user asks
	}
	return s.patch(ctx, t, vm, true, dry, steps...)
}

// patch applies steps to the VirtualMachine, or to its status. Errors: 409 if what was tested has changed.
func (s *Server) patch(ctx context.Context, t target, vm *v1.VirtualMachine, status bool, dry []string, steps ...step) error {
	body, err := json.Marshal(steps)
	if err != nil {
		return fmt.Errorf("encode patch of virtualmachine %s/%s: %w", t.Namespace, t.Name, err)
	}
	changed := &v1.VirtualMachine{}
	changed.Namespace, changed.Name = vm.Namespace, vm.Name
	p := client.RawPatch(types.JSONPatchType, body)
	options := client.PatchOptions{DryRun: dry}
	if status {
		err = s.opts.Client.Status().Patch(ctx, changed, p, &client.SubResourcePatchOptions{PatchOptions: options})
	} else {
		err = s.opts.Client.Patch(ctx, changed, p, &options)
	}
	return s.explain(ctx, t, vm, err)
}

// explain finds out whether a patch was refused because its test failed. The API server answers 422 then, as for an object that
// is not valid, so what is there now is compared with what was read.
func (s *Server) explain(ctx context.Context, t target, read *v1.VirtualMachine, err error) error {
	if err == nil {
		return nil
	}
	if reason := apierrors.ReasonForError(err); reason == metav1.StatusReasonInvalid || reason == metav1.StatusReasonUnknown {
		now, e := s.machine(ctx, t)
		if apierrors.IsNotFound(e) {
			return e
		}
		if e == nil && now.ResourceVersion != read.ResourceVersion {
			return conflict(t, "the VM was changed at the same time; try again")
		}
	}
	return fmt.Errorf("patch virtualmachine %s/%s: %w", t.Namespace, t.Name, err)
}

// hurry shortens the time that the guest of an instance has until it is killed, by deleting its pod with that grace period. The
// instance is not touched: its spec is immutable, and the API server keeps no grace period for custom resources. The least is
// one second, because a pod that is deleted with zero is gone before its node has stopped the VM. A longer period than a running
// deletion has is without effect.
func (s *Server) hurry(ctx context.Context, vmi *v1.VirtualMachineInstance, grace int64, dry []string) error {
	pods, err := s.podsOf(ctx, vmi)
	if err != nil {
		return err
	}
	grace = max(grace, 1)
	for _, pod := range pods {
		err := s.opts.Client.Delete(ctx, &pod, &client.DeleteOptions{GracePeriodSeconds: &grace, DryRun: dry, Preconditions: &metav1.Preconditions{UID: &pod.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // another pod of the name is not meant
			return fmt.Errorf("delete pod %s/%s of virtualmachineinstance %s in %d s: %w", pod.Namespace, pod.Name, vmi.Name, grace, err)
		}
	}
	return nil
}

// podsOf returns the pods that an instance controls.
func (s *Server) podsOf(ctx context.Context, vmi *v1.VirtualMachineInstance) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := s.opts.Client.List(ctx, &list, client.InNamespace(vmi.Namespace), client.MatchingLabels{v1.CreatedByLabel: string(vmi.UID)})
	if err != nil {
		return nil, fmt.Errorf("list pods of virtualmachineinstance %s/%s: %w", vmi.Namespace, vmi.Name, err)
	}
	var own []corev1.Pod
	for _, pod := range list.Items {
		if controlledBy(&pod, vmi.UID) {
			own = append(own, pod)
		}
	}
	return own, nil
}
