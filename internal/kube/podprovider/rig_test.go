package podprovider

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
)

// answers is a Prober. A test sets its answers.
type answers struct {
	refuse atomic.Bool
	slow   time.Duration
}

func (r *answers) Probe(ctx context.Context, _ string, _ int) error {
	select {
	case <-time.After(r.slow):
	case <-ctx.Done():
		return ctx.Err()
	}
	if r.refuse.Load() {
		return errors.New("no answer")
	}
	return nil
}

// world is a provider with a fake API server, engine and registry, on the fake clock of synctest.
type world struct {
	t             *testing.T
	engine        *engine
	client        *fake.Clientset
	events        *record.FakeRecorder
	reach         *answers
	fakeSnapshots *fakeSnapshots // nil: the node keeps no snapshots
	claims        Placements
	plugins       podvolumes.Plugins
	policed       func() (bool, error)
	standIn       func(context.Context) (string, error)
	p             *Provider
	stop          func()
}

func start(t *testing.T, e *engine) *world { return startWith(t, e, Config{}) }

func startWith(t *testing.T, e *engine, cfg Config) *world {
	t.Helper()
	w := &world{t: t, engine: e}
	w.begin(cfg)
	return w
}

// begin creates the fakes around a provider, and starts the provider.
func (w *world) begin(cfg Config) {
	w.client, w.events, w.reach = fake.NewClientset(), record.NewFakeRecorder(1000), &answers{}
	w.run(cfg)
}

// run starts a provider. After stop it may be called again, like a process that is restarted.
func (w *world) run(cfg Config) {
	cfg.Node = convert.Node{Name: "node-1", IP: "192.0.2.1", Memory: cfg.Node.Memory}
	var snapshots podsnapshots.Snapshots
	if w.fakeSnapshots != nil {
		snapshots = w.fakeSnapshots
	}
	p, err := New(cfg, Deps{
		Snapshots: snapshots, Placements: w.claims,
		Runtime: w.engine, Client: w.client, Recorder: w.events, Prober: w.reach,
		Cached: func(ns, name string) (*corev1.Pod, error) {
			return w.client.CoreV1().Pods(ns).Get(w.t.Context(), name, metav1.GetOptions{})
		},
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler), Policed: w.policed, Plugins: w.plugins, StandIn: w.standIn,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.Run(ctx, func() {})
	}()
	w.p = p
	w.stop = func() { cancel(); <-ended }
	synctest.Wait()
}

// create creates the pod in the API and tells the provider, as virtual-kubelet does.
func (w *world) create(p *corev1.Pod) {
	w.t.Helper()
	if _, err := w.client.CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if err := w.p.CreatePod(w.t.Context(), p.DeepCopy()); err != nil {
		w.t.Fatal(err)
	}
}

// pass waits for d.
func (w *world) pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the fake clock of synctest
	synctest.Wait()
}

// after waits for d and returns the pod of the API server.
func (w *world) after(d time.Duration) *corev1.Pod {
	w.t.Helper()
	w.pass(d)
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// writes counts the writes of pods.
func (w *world) writes() (n int) {
	for _, a := range w.client.Actions() {
		if a.GetResource().Resource == "pods" && (a.GetVerb() == "patch" || a.GetVerb() == "update" || a.GetVerb() == "delete") {
			n++
		}
	}
	return n
}

func (w *world) told() string {
	var all []string
	for {
		select {
		case e := <-w.events.Events:
			all = append(all, e)
		default:
			return strings.Join(all, "\n")
		}
	}
}

func pod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "uid-1", Generation: 1},
		Spec: corev1.PodSpec{
			NodeName: "node-1", RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: new(int64(30)),
			Containers: []corev1.Container{{Name: "c", Image: "cocoon/demo:latest"}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBestEffort, Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Unix(1, 0))},
		}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func policy(p corev1.RestartPolicy) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.RestartPolicy = p }
}

const (
	vmName = "vk-default-web"
	vmRepo = "default/" + vmName
)

func ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func sketch(p *corev1.Pod) string {
	if p == nil {
		return "gone"
	}
	s := string(p.Status.Phase)
	if p.Status.Reason != "" {
		s += "/" + p.Status.Reason
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.State.Running != nil:
			s += " running"
		case c.State.Waiting != nil:
			s += " waiting:" + c.State.Waiting.Reason
		case c.State.Terminated != nil:
			s += fmt.Sprintf(" terminated:%s:%d", c.State.Terminated.Reason, c.State.Terminated.ExitCode)
		}
		if t := c.LastTerminationState.Terminated; t != nil {
			s += fmt.Sprintf(" last:%d", t.ExitCode)
		}
		if c.RestartCount > 0 {
			s += fmt.Sprintf(" restarts:%d", c.RestartCount)
		}
	}
	if ready(p) {
		s += " ready"
	}
	return s
}

func expect(t *testing.T, p *corev1.Pod, want string) {
	t.Helper()
	if got := sketch(p); got != want {
		t.Fatalf("pod is %q, want %q", got, want)
	}
}
