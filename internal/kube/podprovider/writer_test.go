package podprovider

import (
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// If a node creates many pods at a time, it writes a "ContainerCreating" status for only a few of them. The final status of
// every pod is written without a delay.
func TestStatusesThatMayWaitArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 60
		var mu sync.Mutex
		client, patches := fake.NewClientset(), map[string]int{}
		client.PrependReactor("patch", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			patches[a.(clienttesting.PatchAction).GetName()]++
			return true, &corev1.Pod{}, nil
		})
		pace := rate.NewLimiter(waitingRate, waitingBurst)
		writers := make([]*writer, many)
		for i := range writers {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint(i)}}
			w := newWriter(client.CoreV1().Pods("default"), pod, pace, slog.New(slog.DiscardHandler))
			w.spawn = func() { go w.run(t.Context()) }
			w.set(corev1.PodStatus{Phase: corev1.PodPending}, nil, 500*time.Millisecond)
			writers[i] = w
		}
		told := func(after time.Duration, want int) {
			t.Helper()
			time.Sleep(after) //nolint:forbidigo // the fake clock of synctest
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if len(patches) != want {
				t.Errorf("of %d pods %d statuses are written, want %d", many, len(patches), want)
			}
		}
		times := func(i int) int {
			mu.Lock()
			defer mu.Unlock()
			return patches[fmt.Sprint(i)]
		}
		told(499*time.Millisecond, 0)
		told(2*time.Millisecond, waitingBurst)
		told(2*time.Second, waitingBurst+2*waitingRate)
		for _, w := range writers[:many/2] {
			w.set(corev1.PodStatus{Phase: corev1.PodRunning}, nil, 0)
		}
		synctest.Wait()
		for i, w := range writers[:many/2] {
			w.mu.Lock()
			if n := times(i); w.base.Status.Phase != corev1.PodRunning || n < 1 || n > 2 || w.runs {
				t.Errorf("pod %d is %s after %d patches, its writer runs: %v", i, w.base.Status.Phase, n, w.runs)
			}
			w.mu.Unlock()
		}
		told(time.Minute, many)
		for i, w := range writers {
			w.set(corev1.PodStatus{Phase: corev1.PodRunning}, nil, 0)
			synctest.Wait()
			if n := times(i); w.base.Status.Phase != corev1.PodRunning || n > 2 {
				t.Errorf("pod %d is %s after %d patches", i, w.base.Status.Phase, n)
			}
		}
	})
}
