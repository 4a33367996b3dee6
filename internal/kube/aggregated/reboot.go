package aggregated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// reboot starts a running guest again: with hard at once, otherwise after it has shut down in order. It asks by an annotation of the pod,
// whose node answers by another one when that has begun.
func reboot(hard bool) func(*Server, http.ResponseWriter, *http.Request, target) error {
	return func(s *Server, w http.ResponseWriter, r *http.Request, t target) error {
		vmi, pod, err := s.runs(r.Context(), t)
		if err != nil {
			return err
		}
		if isPaused(vmi) || contract.Paused(pod.Annotations) {
			return conflict(t, "VMI is paused")
		}
		ask := contract.Reboot{Hard: hard, ID: string(uuid.NewUUID())}
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": map[string]any{contract.KeyReboot: ask.String()}}})
		if err == nil {
			err = s.opts.Client.Patch(r.Context(), pod, client.RawPatch(types.MergePatchType, body))
		}
		if err != nil {
			return fmt.Errorf("patch pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		return accepted(w, s.untilRebooted(r.Context(), t, pod, ask.ID))
	}
}

// untilRebooted waits for the answer of the node. Errors: 409 with its reason, or if the pod ends meanwhile; 503 if there is none in time.
func (s *Server) untilRebooted(ctx context.Context, t target, pod *corev1.Pod, id string) error {
	err := wait.PollUntilContextTimeout(ctx, pausePoll, pauseTimeout, true, func(context.Context) (bool, error) { // see untilPaused
		var now corev1.Pod
		if err := s.opts.Client.Get(ctx, client.ObjectKeyFromObject(pod), &now); err != nil {
			return false, fmt.Errorf("get pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		answer := contract.ParseRebooted(now.Annotations)
		switch {
		case now.UID != pod.UID || now.DeletionTimestamp != nil || now.Status.Phase != corev1.PodRunning:
			return false, conflict(t, "VMI is not running")
		case answer.ID != id:
			return false, nil
		case answer.Why != "":
			return false, conflict(t, "%s", answer.Why)
		}
		return true, nil
	})
	if err != nil && wait.Interrupted(err) && ctx.Err() == nil {
		return errdefs.Unavailablef("the node of VirtualMachineInstance %s/%s has not answered in %s; it will do it when it can", t.Namespace, t.Name, pauseTimeout)
	}
	return err
}
