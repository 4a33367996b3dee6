package hibernation

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func aVM(annotations map[string]string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "ns", UID: "pod", Annotations: annotations}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
}

// A request that exceeds its time limit is Failed, and the next request has its own time limit.
func TestEachRequestHasItsTimeLimit(t *testing.T) {
	r := &Reconciler{Now: func() time.Time { return now }}
	h := &v1.CocoonHibernation{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "ns", Generation: 2}}
	h.Spec.PodRef.Name, h.Spec.Desire = "a", v1.DesireWake
	asleep := aVM(map[string]string{contract.KeyLifecycleState: string(contract.LifecycleHibernated)})
	for _, c := range []struct {
		name     string
		observed int64
		began    time.Duration // ago
		want     v1.HibernationPhase
	}{
		{"an earlier request failed", 1, time.Hour, v1.HibernationWaking},
		{"this request exceeds its time limit", 2, time.Hour, v1.HibernationFailed},
		{"this request has time left", 2, time.Minute, v1.HibernationWaking},
	} {
		h.Status = v1.CocoonHibernationStatus{Phase: v1.HibernationFailed, ObservedGeneration: c.observed, Since: &metav1.Time{Time: now.Add(-c.began)}}
		s, _, err := r.step(t.Context(), h, asleep)
		if err != nil || s.Phase != c.want {
			t.Errorf("%s: phase %s, error %v", c.name, s.Phase, err)
		}
		if c.observed != h.Generation && !s.Since.Time.Equal(now) {
			t.Errorf("%s: the transition began at %s", c.name, s.Since)
		}
	}
}

// A VM that failed is not reported as timed out.
func TestFailedIsNotTimedOut(t *testing.T) {
	for _, c := range []struct {
		failed bool
		want   string
	}{{true, "PodLifecycleFailed"}, {false, "HibernateTimedOut"}} {
		recorder := events.NewFakeRecorder(1)
		r := &Reconciler{Now: func() time.Time { return now }, Events: recorder}
		h := &v1.CocoonHibernation{Spec: v1.CocoonHibernationSpec{Desire: v1.DesireHibernate}}
		r.emitEvent(h, v1.CocoonHibernationStatus{Phase: v1.HibernationFailed, VMName: "vk-ns-a"}, c.failed)
		if got := <-recorder.Events; !strings.Contains(got, c.want) || c.failed == strings.Contains(got, "its node retries") {
			t.Errorf("the Event is %s", got)
		}
	}
}

// writes counts the writes to the pod of the API server.
type writes struct {
	client.Client
	pod              *corev1.Pod
	applied, patched int
}

func (w *writes) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	if w.pod == nil {
		return apierrors.NewNotFound(corev1.Resource("pods"), "a")
	}
	w.pod.DeepCopyInto(o.(*corev1.Pod))
	return nil
}

func (w *writes) Apply(context.Context, runtime.ApplyConfiguration, ...client.ApplyOption) error {
	w.applied++
	return nil
}

func (w *writes) Patch(context.Context, client.Object, client.Patch, ...client.PatchOption) error {
	w.patched++
	return nil
}

// finish withdraws the request even if the cache does not show the annotation yet, because there is no later check.
func TestDeletedBeforeTheCacheHasTheMark(t *testing.T) {
	marked := aVM(map[string]string{contract.KeyHibernate: "true"})
	marked.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: fieldOwner, Operation: metav1.ManagedFieldsOperationApply, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:` + contract.KeyHibernate + `":{}}}}`)}}
	for _, c := range []struct {
		name        string
		cached, pod *corev1.Pod
		want        int
	}{
		{"the cache is stale", aVM(nil), marked, 1},
		{"the cache does not know the pod", nil, marked, 1},
		{"nothing is marked", aVM(nil), aVM(nil), 0},
		{"the pod is gone", nil, nil, 0},
	} {
		w := &writes{pod: c.pod}
		r := &Reconciler{Client: w, Live: w}
		h := &v1.CocoonHibernation{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "ns", Finalizers: []string{v1.FinalizerHibernation}}}
		if err := r.finish(t.Context(), h, c.cached); err != nil || w.applied != c.want || w.patched != 1 || len(h.Finalizers) > 0 {
			t.Errorf("%s: %d and %d writes, finalizers %v, %v", c.name, w.applied, w.patched, h.Finalizers, err)
		}
	}
}
