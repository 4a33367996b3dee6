package podprovider

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// writer sends one pod's status and runtime annotations to the API server. A newer request replaces a waiting one. One patch
// is sent at a time. Status and annotations are in one patch, because the status endpoint accepts both. A patch contains only
// the changes since the server's last answer, and the pod's UID. So it never undoes a write of others, and never changes
// another pod of the same name.
type writer struct {
	target
	pods  typed.PodInterface
	log   *slog.Logger
	pace  *rate.Limiter // rate limit, for all pods together, of the writes that may be delayed
	spawn func()        // starts run

	mu     sync.Mutex
	base   *corev1.Pod   // the server's last answer; only the fields that we write
	want   *corev1.Pod   // metadata.annotations and status; nil: nothing to write
	notBy  time.Time     // the write is delayed until then
	again  time.Duration // how long the write may be delayed again after notBy; 0: not at all
	gone   bool          // the server no longer has this pod
	runs   bool          // run is active, as long as there is something to write
	wake   chan struct{}
	change chan struct{} // closed and replaced after each write, and when the writer stops
}

// target is the pod that a writer writes.
type target struct {
	ref  types.NamespacedName
	uid  types.UID
	node string
}

func newWriter(pods typed.PodInterface, pod *corev1.Pod, pace *rate.Limiter, log *slog.Logger) *writer {
	return &writer{
		target: target{types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, pod.UID, pod.Spec.NodeName},
		pods:   pods, log: log, pace: pace, base: written(pod.Annotations, pod.Status), wake: make(chan struct{}, 1), change: make(chan struct{}),
	}
}

// written returns the part of a pod that the writer writes.
func written(annotations map[string]string, status corev1.PodStatus) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}, Status: status}
}

// The rate limit of statuses that may be delayed. If a node creates more pods at a time, their "ContainerCreating" statuses
// are left out, because each would cost the API server as much as the status that follows.
const (
	waitingRate  = 5 // per second
	waitingBurst = 20
)

// set requests a write of status and annotations. The annotations are merged into the existing ones. An empty value removes
// the key. The caller must not change both arguments afterwards. The write may be delayed for hold, so that a newer request
// can replace it, and for several times hold while many pods wait. 0: no delay.
func (w *writer) set(status corev1.PodStatus, annotations map[string]string, hold time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	known := w.base.Annotations
	if w.want != nil {
		known = w.want.Annotations
	}
	want := written(maps.Clone(known), status)
	if want.Annotations == nil {
		want.Annotations = map[string]string{}
	}
	for key, value := range annotations {
		if value == "" {
			delete(want.Annotations, key)
			continue
		}
		want.Annotations[key] = value
	}
	if w.gone || w.want == nil && same(want, w.base) {
		return
	}
	notBy := time.Now().Add(hold)
	if w.want != nil && w.notBy.Before(notBy) {
		notBy = w.notBy // a newer request does not extend the delay
	}
	if w.want != nil {
		hold = min(hold, w.again)
	}
	w.notBy, w.again = notBy, hold
	if w.want == nil || !same(want, w.want) { // do not send the same request twice
		w.want = want
	}
	if !w.runs {
		w.runs = true
		w.spawn()
	}
	w.signal()
}

// signal makes run check again.
func (w *writer) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func same(a, b *corev1.Pod) bool {
	return equality.Semantic.DeepEqual(a.Status, b.Status) && maps.Equal(a.Annotations, b.Annotations)
}

// flush waits until everything is written, the pod is gone, or ctx ends.
func (w *writer) flush(ctx context.Context) error {
	for {
		w.mu.Lock()
		done, change := w.want == nil || w.gone, w.change
		w.notBy, w.again = time.Time{}, 0
		w.mu.Unlock()
		if done {
			return nil
		}
		w.signal()
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stop drops the waiting request and ends run.
func (w *writer) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone, w.want = true, nil
	w.settled()
	w.signal()
}

// lost reports whether the server is known to have no such pod.
func (w *writer) lost() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gone
}

// settled wakes the callers of flush. Precondition: mu is held.
func (w *writer) settled() {
	close(w.change)
	w.change = make(chan struct{})
}

// run writes until everything is written, ctx ends or the pod is gone. While the server does not answer, it retries with
// growing pauses.
func (w *writer) run(ctx context.Context) {
	first := pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many)
	pause := first
	for {
		want, base, hold := w.next(ctx)
		if want == nil {
			return
		}
		if hold > 0 {
			pauses.Sleep(ctx, w.wake, hold, false)
			continue
		}
		if same(want, base) { // a newer request has undone the change
			w.wrote(want, base)
			continue
		}
		got, err := w.patch(ctx, base, want)
		if err == nil {
			pause = first
			w.wrote(want, got)
			continue
		}
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) && w.replaced(ctx) {
			w.stop()
			continue
		}
		if ctx.Err() != nil {
			continue
		}
		w.log.Warn("pod status not written", "pod", w.ref.String(), "err", err)
		pauses.Sleep(ctx, nil, pause.Step(), false)
	}
}

// next returns the request, its base, and the delay before the write. A nil request means that run must end.
func (w *writer) next(ctx context.Context) (want, base *corev1.Pod, hold time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.want == nil || w.gone || ctx.Err() != nil {
		w.runs = false
		return nil, nil, 0
	}
	if w.again > 0 && !time.Now().Before(w.notBy) && !w.pace.Allow() {
		w.notBy = time.Now().Add(w.again)
	}
	return w.want, w.base, time.Until(w.notBy)
}

func (w *writer) wrote(want, got *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.base = got
	if w.want == want {
		w.want = nil
	}
	w.settled()
}

// patch sends the difference between base and want. In the result, fields that we own have the values of want, because the
// server returns times cut to seconds, which must not look like a change.
func (w *writer) patch(ctx context.Context, base, want *corev1.Pod) (*corev1.Pod, error) {
	from, err := json.Marshal(corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: base.Annotations}, Status: base.Status})
	if err != nil {
		return nil, fmt.Errorf("encode status: %w", err)
	}
	to, err := json.Marshal(corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: want.Annotations, UID: w.uid}, Status: want.Status})
	if err != nil {
		return nil, fmt.Errorf("encode status: %w", err)
	}
	body, err := strategicpatch.CreateTwoWayMergePatch(from, to, corev1.Pod{})
	if err != nil {
		return nil, fmt.Errorf("compute status patch: %w", err)
	}
	if _, err := w.pods.Patch(ctx, w.ref.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status"); err != nil {
		return nil, err
	}
	return want, nil
}

// replaced reports whether another pod now has the name.
func (w *writer) replaced(ctx context.Context) bool {
	pod, err := w.lookUp(ctx)
	return err == nil && (pod == nil || pod.UID != w.uid)
}

// lookUp reads the pod of our name on our node from the API server, without its cache. It returns nil if no such pod exists.
// It uses a list, because a get of a pod that is gone is "forbidden", not "not found", with a node's own credentials.
func (w *writer) lookUp(ctx context.Context) (*corev1.Pod, error) {
	list, err := w.pods.List(ctx, metav1.ListOptions{FieldSelector: fields.Set{"metadata.name": w.ref.Name, "spec.nodeName": w.node}.String()})
	if err != nil {
		return nil, err
	}
	for i := range list.Items { // a fake server may ignore the field selector
		if list.Items[i].Name == w.ref.Name {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

// deleteObject deletes the pod's object without a grace period. Preconditions: the last status is written, and the VM is gone
// or given up.
func (w *writer) deleteObject(ctx context.Context) error {
	err := w.pods.Delete(ctx, w.ref.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64(0)), Preconditions: &metav1.Preconditions{UID: &w.uid},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
