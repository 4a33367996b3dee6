package aggregated

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// The pod says whether its VM is to be paused, and its node makes it so. A request waits until the instance tells that, so that the
// next request finds it.
const (
	pauseTimeout = 45 * time.Second // an API server waits for a minute
	pausePoll    = 100 * time.Millisecond
)

// pause stops the CPUs of a running guest.
func (s *Server) pause(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.PauseOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	return s.setPaused(w, r, t, true, o.DryRun)
}

// unpause lets a paused guest continue.
func (s *Server) unpause(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.UnpauseOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	return s.setPaused(w, r, t, false, o.DryRun)
}

func (s *Server) setPaused(w http.ResponseWriter, r *http.Request, t target, paused bool, only []string) error {
	dry, err := dryRun(r, only)
	if err != nil {
		return err
	}
	vmi, pod, err := s.runs(r.Context(), t)
	if err != nil {
		return err
	}
	asked, is := contract.Paused(pod.Annotations), isPaused(vmi)
	switch p := vmi.Spec.LivenessProbe; {
	case paused && p != nil && p.GuestAgentPing == nil:
		return apierrors.NewForbidden(v1.Resource("virtualmachineinstance"), t.Name, errors.New("Pausing VMIs with LivenessProbe is currently not supported")) //nolint:staticcheck // KubeVirt's words
	case paused && asked && is:
		return conflict(t, "VMI is already paused")
	case !paused && !asked && !is:
		return conflict(t, "VMI is not paused")
	}
	if err := s.askPaused(r.Context(), pod, paused, dry); err != nil || len(dry) > 0 {
		return accepted(w, err)
	}
	return accepted(w, s.untilPaused(r.Context(), t, vmi.UID, paused))
}

// runs returns the instance of the target and its pod. Errors: 404, and 409 if it does not run.
func (s *Server) runs(ctx context.Context, t target) (*v1.VirtualMachineInstance, *corev1.Pod, error) {
	vmi, err := s.instance(ctx, t)
	if err != nil {
		return nil, nil, err
	}
	if vmi.Status.Phase != v1.Running || vmi.DeletionTimestamp != nil {
		return nil, nil, conflict(t, "VMI is not running")
	}
	pods, err := s.podsOf(ctx, vmi)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning })
	if i < 0 {
		return nil, nil, conflict(t, "VMI is not running: it has no pod that runs")
	}
	return vmi, &pods[i], nil
}

func isPaused(vmi *v1.VirtualMachineInstance) bool {
	c := kubevirt.Condition(vmi, v1.VirtualMachineInstancePaused)
	return c != nil && c.Status == corev1.ConditionTrue
}

// askPaused sets or removes the annotation by which the node pauses the VM of the pod. The UID in the patch protects a later pod of the
// same name.
func (s *Server) askPaused(ctx context.Context, pod *corev1.Pod, paused bool, dry []string) error {
	var value any // null removes the annotation
	if paused {
		value = "true"
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": map[string]any{contract.KeyPaused: value}}})
	if err == nil {
		err = s.opts.Client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, body), &client.PatchOptions{DryRun: dry})
	}
	if err != nil {
		return fmt.Errorf("patch pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// untilPaused waits until the condition Paused of the instance is as wanted. Errors: 409 if the instance ends first; 503 after
// pauseTimeout. After a 503 the node still does it when it can.
func (s *Server) untilPaused(ctx context.Context, t target, uid types.UID, paused bool) error {
	err := wait.PollUntilContextTimeout(ctx, pausePoll, pauseTimeout, true, func(context.Context) (bool, error) { // a read does not fail because the time is over
		vmi, err := s.instance(ctx, t)
		switch {
		case err != nil:
			return false, err
		case vmi.UID != uid || vmi.Status.Phase != v1.Running:
			return false, conflict(t, "VMI is not running")
		}
		return isPaused(vmi) == paused, nil
	})
	if err != nil && wait.Interrupted(err) && ctx.Err() == nil {
		return errdefs.Unavailablef("the node of VirtualMachineInstance %s/%s has not answered in %s; it will do it when it can, and the Events of its pod say why it cannot", t.Namespace, t.Name, pauseTimeout)
	}
	return err
}
