package podprovider

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// virtual-kubelet gets every update, except updates in which only the status changed.
func TestChangesOfStatusAreNoNews(t *testing.T) {
	was := func(p *corev1.Pod) {
		p.UID, p.Generation, p.Labels, p.Annotations = "1", 1, map[string]string{"a": "b"}, map[string]string{"c": "d"}
	}
	for name, c := range map[string]struct {
		before, change func(*corev1.Pod)
		news           bool
	}{
		"status":              {change: func(p *corev1.Pod) { p.Status.Phase, p.ResourceVersion = corev1.PodRunning, "2" }},
		"label":               {change: func(p *corev1.Pod) { p.Labels["a"] = "c" }, news: true},
		"annotation":          {change: func(p *corev1.Pod) { p.Annotations["e"] = "" }, news: true},
		"spec":                {change: func(p *corev1.Pod) { p.Generation = 2 }, news: true},
		"deletion":            {change: func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.NewTime(time.Unix(1e9, 0))) }, news: true},
		"grace":               {change: func(p *corev1.Pod) { p.DeletionGracePeriodSeconds = new(int64(1)) }, news: true},
		"the same grace":      {before: func(p *corev1.Pod) { p.DeletionGracePeriodSeconds = new(int64(1)) }, change: func(*corev1.Pod) {}},
		"a namesake":          {change: func(p *corev1.Pod) { p.UID = "2" }, news: true},
		"an uncounted change": {before: func(p *corev1.Pod) { p.Generation = 0 }, change: func(*corev1.Pod) {}, news: true},
	} {
		told := 0
		h := newsHandler{cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, _ any) { told++ }}, &Provider{}}
		var old corev1.Pod
		was(&old)
		if c.before != nil {
			c.before(&old)
		}
		now := old.DeepCopy()
		c.change(now)
		if h.OnUpdate(&old, now); (told == 1) != c.news {
			t.Errorf("%s: told %d times, want news: %v", name, told, c.news)
		}
	}
}
