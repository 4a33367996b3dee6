package podprovider

import (
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
)

// keeping returns a world whose node keeps snapshots. The node has a registry unless bare is set.
func keeping(t *testing.T, s *fakeSnapshots, bare bool) *world {
	t.Helper()
	return keepingWith(t, s, bare, nil)
}

// keepingWith does the same as keeping, with claims of VMs.
func keepingWith(t *testing.T, s *fakeSnapshots, bare bool, claims Placements) *world {
	t.Helper()
	w := &world{t: t, engine: s.engine, client: fake.NewClientset(), events: record.NewFakeRecorder(1000), reach: &answers{}, fakeSnapshots: s, claims: claims}
	w.run(keepingConfig(bare))
	return w
}

func keepingConfig(bare bool) Config {
	if bare {
		return Config{}
	}
	return Config{Registry: podsnapshots.Registry{URL: registryURL + "/"}}
}

func newKept() *fakeSnapshots { return newFakeSnapshots(newEngine(), newRegistry()) }

func asks(m map[string]string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		maps.Copy(p.Annotations, m)
	}
}

var managedRun = asks(map[string]string{contract.KeyManaged: "true", contract.KeyMode: "run"})

// annotate sets an annotation of the pod in the API and calls the provider, as virtual-kubelet does.
func (w *world) annotate(key, value string) {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	if p.Annotations[key] = value; value == "" {
		delete(p.Annotations, key)
	}
	if p, err = w.client.CoreV1().Pods("default").Update(w.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if p.DeletionTimestamp == nil {
		err = w.p.UpdatePod(w.t.Context(), p.DeepCopy())
	} else {
		err = w.p.DeletePod(w.t.Context(), p.DeepCopy())
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// kill deletes the pod as `kubectl delete` and virtual-kubelet do.
func (w *world) kill() {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
	if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
		w.t.Fatal(err)
	}
	if err := w.p.DeletePod(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) expectLife(p *corev1.Pod, want contract.LifecycleState) {
	w.t.Helper()
	if got := p.Annotations[contract.KeyLifecycleState]; got != string(want) {
		w.t.Fatalf("lifecycle is %q (%s), want %q", got, p.Annotations[contract.KeyLifecycleMessage], want)
	}
}

func (w *world) expectTold(parts ...string) {
	w.t.Helper()
	got := w.told()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			w.t.Errorf("events lack %q: %s", part, got)
		}
	}
}

// A change in the middle of a transition waits until that transition ends.
// Wherever the process ends, the next one continues.
// The VM was hibernated on another node; here only its tag exists.
// A crash between a save and what follows leaves an older snapshot; the next one takes its place.
