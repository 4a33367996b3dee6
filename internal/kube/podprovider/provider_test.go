package podprovider

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	vkerr "github.com/virtual-kubelet/virtual-kubelet/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// reach is a Prober whose answer a test decides.
type reach struct {
	refuse atomic.Bool
	slow   time.Duration
}

func (r *reach) Probe(ctx context.Context, _ string, _ int) error {
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

// world is a provider with everything around it, on the bubble's clock.
type world struct {
	t      *testing.T
	engine *engine
	client *fake.Clientset
	events *record.FakeRecorder
	reach  *reach
	shelf  *shelf // nil: the node keeps no snapshots
	claims Placements
	p      *Provider
	stop   func()
}

func start(t *testing.T, e *engine) *world { return startWith(t, e, Config{}) }

func startWith(t *testing.T, e *engine, cfg Config) *world {
	t.Helper()
	w := &world{t: t, engine: e}
	w.begin(cfg)
	return w
}

// begin makes what is around a provider, and starts it.
func (w *world) begin(cfg Config) {
	w.client, w.events, w.reach = fake.NewClientset(), record.NewFakeRecorder(1000), &reach{}
	w.run(cfg)
}

// run starts a provider; after stop it may be called again, as a process that was restarted.
func (w *world) run(cfg Config) {
	cfg.Node = convert.Node{Name: "node-1", IP: "192.0.2.1"}
	var snapshots Snapshots
	if w.shelf != nil {
		snapshots = w.shelf
	}
	p, err := New(cfg, Deps{
		Snapshots: snapshots, Placements: w.claims,
		Runtime: w.engine, Client: w.client, Recorder: w.events, Prober: w.reach,
		Cached: func(ns, name string) (*corev1.Pod, error) {
			return w.client.CoreV1().Pods(ns).Get(w.t.Context(), name, metav1.GetOptions{})
		},
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler),
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

// create makes the pod in the API and tells the provider, as virtual-kubelet does.
func (w *world) create(p *corev1.Pod) {
	w.t.Helper()
	if _, err := w.client.CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if err := w.p.CreatePod(w.t.Context(), p.DeepCopy()); err != nil {
		w.t.Fatal(err)
	}
}

// pass lets d pass.
func (w *world) pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the bubble's clock: this waits for nothing real
	synctest.Wait()
}

// after lets d pass and returns the pod as the API server has it.
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

// writes counts what was written about pods.
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

const vmName = "vk-default-web"

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

func TestLifeOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.boot, e.stopTime = 2*time.Second, time.Second
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		p := w.after(1500 * time.Millisecond)
		expect(t, p, "Running running ready")
		rec, err := e.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		if p.Status.PodIP != rec.NICs[0].IP || !slices.Equal(p.Status.PodIPs, []corev1.PodIP{{IP: rec.NICs[0].IP}, {IP: rec.NICs[0].IPv6}}) || p.Status.HostIP != "192.0.2.1" || len(p.Status.HostIPs) != 1 {
			t.Errorf("addresses: %+v", p.Status)
		}
		if p.Status.QOSClass != corev1.PodQOSBestEffort || p.Status.StartTime == nil || p.Status.ObservedGeneration != 1 {
			t.Errorf("status: %+v", p.Status)
		}
		c := p.Status.ContainerStatuses[0]
		if c.ContainerID != "cocoon://"+string(rec.ID) || c.ImageID != "sha256:abc" || c.State.Running.StartedAt.Unix() != rec.StartedAt.Unix() || !*c.Started {
			t.Errorf("container: %+v", c)
		}
		if p.Annotations[contract.KeyID] != string(rec.ID) || p.Annotations[contract.KeyIP] != rec.NICs[0].IP {
			t.Errorf("annotations: %v", p.Annotations)
		}
		if n := w.writes(); n != 2 {
			t.Errorf("%d writes until Ready, want 2", n)
		}
		if got := w.told(); !strings.HasPrefix(got, "Normal Started Created and started container c") {
			t.Errorf("events: %s", got)
		}

		w.after(time.Hour)
		if n := w.writes(); n != 2 {
			t.Errorf("%d writes after an hour of nothing, want 2", n)
		}

		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.p.DeletePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(2*time.Second), "gone")
		if e.count() != 0 || e.called("stop 30s") != 1 {
			t.Errorf("%d VMs left, calls %v", e.count(), e.calls)
		}
		if n := w.writes(); n != 4 {
			t.Errorf("%d writes in a whole life, want 4 (two statuses, the last one, the deletion)", n)
		}
		if err := w.p.PodClient().Pods("default").Delete(t.Context(), "web", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}); !apierrors.IsNotFound(err) || w.writes() != 4 {
			t.Errorf("virtual-kubelet deletes once more: %v", err)
		}
		if got := w.told(); got != "" {
			t.Errorf("events of a deletion that was asked for: %s", got)
		}
		if _, err := w.p.GetPod(t.Context(), "default", "web"); !vkerr.IsNotFound(err) {
			t.Errorf("the pod is still known: %v", err)
		}
	})
}

func TestAQuickVMCostsOneWriteLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.boot = 50 * time.Millisecond
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		if n := w.writes(); n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
}

func TestReadinessFollowsTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.reach.refuse.Store(true)
		w.create(pod())
		expect(t, w.after(10*time.Second), "Running running")
		w.reach.refuse.Store(false)
		p := w.after(2 * time.Second)
		expect(t, p, "Running running ready")
		since := condition(p, corev1.PodReady).LastTransitionTime
		w.reach.refuse.Store(true)
		expect(t, w.after(10*time.Second), "Running running ready") // two failures are none
		p = w.after(6 * time.Second)
		expect(t, p, "Running running")
		if got := w.told(); !strings.Contains(got, "Warning Unhealthy VM does not answer: no answer") {
			t.Errorf("events: %s", got)
		}
		if !condition(p, corev1.PodReady).LastTransitionTime.After(since.Time) || condition(p, corev1.PodScheduled).LastTransitionTime.Unix() != 1 {
			t.Errorf("transition times: %+v", p.Status.Conditions)
		}
	})
}

func condition(p *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

func TestRestartPolicies(t *testing.T) {
	for _, tc := range []struct {
		policy corev1.RestartPolicy
		code   int
		want   string
	}{
		{corev1.RestartPolicyNever, 0, "Succeeded terminated:Completed:0"},
		{corev1.RestartPolicyNever, 3, "Failed terminated:Error:3"},
		{corev1.RestartPolicyOnFailure, 0, "Succeeded terminated:Completed:0"},
		{corev1.RestartPolicyOnFailure, 3, "Running running last:3 restarts:1 ready"},
		{corev1.RestartPolicyAlways, 0, "Running running last:0 restarts:1 ready"},
		{corev1.RestartPolicyAlways, 3, "Running running last:3 restarts:1 ready"},
	} {
		t.Run(fmt.Sprint(tc.policy, tc.code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, newEngine())
				defer w.stop()
				w.create(pod(policy(tc.policy)))
				expect(t, w.after(time.Second), "Running running ready")
				w.engine.exit(tc.code)
				expect(t, w.after(time.Second), tc.want)
			})
		})
	}
}

// Who watches a pod hears of the end of its VM at once, not when the next start has succeeded.
func TestAnEndIsToldBeforeTheNextStart(t *testing.T) {
	for _, managed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine()
			e.startAs = func() error { <-time.After(10 * time.Second); return nil }
			w := start(t, e)
			defer w.stop()
			p := pod()
			if managed {
				managedRun(p)
			}
			w.create(p)
			expect(t, w.after(time.Second), "Running running ready")
			e.exit(3)
			expect(t, w.after(50*time.Millisecond), "Running waiting:ContainerCreating last:3")
			expect(t, w.after(11*time.Second), "Running running last:3 restarts:1 ready")
		})
	}
}

func TestCrashLoopBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		w.engine.exit(1)
		expect(t, w.after(time.Second), "Running running last:1 restarts:1 ready") // the first restart is at once
		for i, pause := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
			w.told()
			w.engine.exit(1)
			expect(t, w.after(pause-time.Second), fmt.Sprintf("Running waiting:CrashLoopBackOff last:1 restarts:%d", i+1))
			if got := w.told(); !strings.Contains(got, "Warning BackOff Back-off restarting") {
				t.Errorf("events: %s", got)
			}
			expect(t, w.after(2*time.Second), fmt.Sprintf("Running running last:1 restarts:%d ready", i+2))
		}
		w.after(11 * time.Minute) // a long run is forgiven
		w.engine.exit(1)
		expect(t, w.after(time.Second), "Running running last:1 restarts:5 ready")
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Spec.HostNetwork = true }))
		p := w.after(time.Second)
		expect(t, p, "Failed/PodNotSupported")
		if !strings.Contains(p.Status.Message, "spec.hostNetwork") {
			t.Errorf("message: %s", p.Status.Message)
		}
		if got := w.told(); !strings.Contains(got, "Warning PodNotSupported") {
			t.Errorf("events: %s", got)
		}
		if w.engine.called("launch "+vmName) != 0 {
			t.Error("something was launched")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.launchAt = func(vm.Spec) error { return errdefs.Invalidf("storage is smaller than the image") }
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Failed/VMRejected")
	})
}

func TestWhatCanComeIsWaitedFor(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"image": {errdefs.NotFoundf("the image went after it was pulled"), "Pending waiting:CreateContainerError"},
		"full":  {errdefs.Exhaustedf("no address is left"), "Pending waiting:CreateContainerError"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				var lacks atomic.Bool
				lacks.Store(true)
				e.launchAt = func(vm.Spec) error {
					if lacks.Load() {
						return tc.err
					}
					return nil
				}
				w := start(t, e)
				defer w.stop()
				w.create(pod())
				expect(t, w.after(time.Second), tc.want)
				if got := w.told(); !strings.Contains(got, tc.err.Error()) {
					t.Errorf("events: %s", got)
				}
				lacks.Store(false)
				expect(t, w.after(10*time.Second), "Running running ready")
			})
		})
	}
	t.Run("configmap", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := start(t, newEngine())
			defer w.stop()
			w.create(pod(func(p *corev1.Pod) {
				p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}}}}
			}))
			expect(t, w.after(time.Second), "Pending waiting:CreateContainerConfigError")
			_ = w.client.Tracker().Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cm"}, Data: map[string]string{"A": "1"}})
			expect(t, w.after(5*time.Second), "Running running ready")
		})
	})
}

func TestCloudInitOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		w := start(t, e)
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{
				contract.KeyVirtletUserData: "runcmd: [ls]", contract.KeyVirtletSSHKeySource: "secret/keys", contract.KeyVirtletDiskDriver: "scsi",
			}
		}))
		expect(t, w.after(time.Second), "Pending waiting:CreateContainerConfigError")
		_ = w.client.Tracker().Add(&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "keys"}, Data: map[string][]byte{"authorized_keys": []byte("ssh-rsa AAAAB me")},
		})
		expect(t, w.after(5*time.Second), "Running running ready")
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, r := range e.recs {
			c := r.Spec.CloudInit
			if c == nil || c.UserData != "#cloud-config\nruncmd:\n  - ls\n" || len(c.SSHKeys) != 1 {
				t.Errorf("cloud-init is %+v", c)
			}
		}
		if got := w.told(); !strings.Contains(got, "Without effect in this VM: VirtletDiskDriver scsi") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestAVanishedVMEvictsItsPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		var last *corev1.Pod
		watcher, err := w.client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.engine.vanish()
		expect(t, w.after(time.Second), "gone")
		watcher.Stop()
		for e := range watcher.ResultChan() {
			last, _ = e.Object.(*corev1.Pod)
		}
		expect(t, last, "Failed/VMGone terminated:Error:137")
		if got := w.told(); !strings.Contains(got, "Warning VMGone") {
			t.Errorf("events: %s", got)
		}
	})
}

// An earlier process was killed while it had the VM made; the engine undoes that under the eyes of the next process.
func TestAVMThatVanishesBeforeItRanIsMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		rec, err := e.Launch(t.Context(), convert.Spec(pod(), convert.Node{Name: "node-1"}, nil))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute) // whatever the fake guest does, it has done
		e.change(rec.ID, func(r *vm.Record) { r.State, r.AgentReady, r.StartedAt = vm.StateCreating, false, time.Time{} })
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		e.vanish()
		expect(t, w.after(time.Second), "Running running ready")
		if got := w.told(); strings.Contains(got, "VMGone") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestARestartedProcessTouchesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		w.create(pod())
		before := w.after(time.Second)
		expect(t, before, "Running running ready")
		w.stop()
		writes, calls := w.writes(), len(w.engine.calls)
		w.run(Config{})
		defer w.stop()
		after := w.after(time.Minute)
		if !equality.Semantic.DeepEqual(after.Status, before.Status) {
			t.Errorf("status became\n%+v\nfrom\n%+v", after.Status, before.Status)
		}
		if n := w.writes() - writes; n != 0 {
			t.Errorf("%d writes", n)
		}
		if got := w.engine.calls[calls:]; len(got) != 1 || got[0] != "list" {
			t.Errorf("calls %v", got)
		}
		if _, err := w.p.GetPod(t.Context(), "default", "web"); err != nil {
			t.Error(err)
		}
		w.engine.exit(4) // and it is in charge
		expect(t, w.after(time.Second), "Running running last:4 restarts:1 ready")
	})
}

func TestWhatHappenedWhileTheEngineWasAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		w.engine.fall(errdefs.Unavailablef("cocoond does not answer"))
		p := w.after(time.Minute)
		expect(t, p, "Running running ready") // nobody knows better
		if w.p.Health() == nil {
			t.Error("the node thinks that the engine answers")
		}
		w.engine.vanish()
		w.engine.mu.Lock()
		w.engine.history = nil // the stream cannot tell
		w.engine.mu.Unlock()
		w.engine.fall(nil)
		expect(t, w.after(2*time.Minute), "gone")
		if w.p.Health() != nil {
			t.Error("the node thinks that the engine is away")
		}
	})
}

func TestOrphans(t *testing.T) {
	for policy, left := range map[OrphanPolicy]int{OrphanAlert: 2, OrphanKeep: 2, OrphanDestroy: 1} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				spec := convert.Spec(pod(), convert.Node{Name: "node-1"}, nil)
				if _, err := e.Launch(t.Context(), spec); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Launch(t.Context(), vm.Spec{Name: "mine", Image: "x"}.Default()); err != nil { // not ours to touch
					t.Fatal(err)
				}
				w := startWith(t, e, Config{Orphans: policy})
				defer w.stop()
				w.after(time.Second)
				if e.count() != left {
					t.Errorf("%d VMs left, want %d", e.count(), left)
				}
			})
		})
	}
	if _, err := New(Config{Orphans: "eat"}, Deps{}); !errdefs.IsInvalid(err) {
		t.Errorf("a policy nobody knows was taken: %v", err)
	}
}

func TestWhoOwnsTheName(t *testing.T) {
	launch := func(t *testing.T, e *engine, uid, node string) {
		t.Helper()
		spec := convert.Spec(pod(func(p *corev1.Pod) { p.UID = "other" }), convert.Node{Name: node}, nil)
		if uid == "" {
			spec.Labels = nil
		} else {
			spec.Labels[contract.VMLabelPodUID] = uid
		}
		if _, err := e.Launch(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) { // the leftover of a pod that is gone
		e := newEngine()
		launch(t, e, "dead", "node-1")
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		if rec, _ := e.Inspect(t.Context(), vmName); rec.Spec.Labels[contract.VMLabelPodUID] != "uid-1" {
			t.Error("the leftover was adopted")
		}
	})
	synctest.Test(t, func(t *testing.T) { // another node's
		e := newEngine()
		launch(t, e, "alive", "node-2")
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Pending waiting:CreateContainerError")
		if m := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(m, "taken by pod default/web") {
			t.Errorf("message: %s", m)
		}
	})
	synctest.Test(t, func(t *testing.T) { // made by hand: adopted, and gone with the pod
		e := newEngine()
		launch(t, e, "", "")
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		w.engine.exit(2)
		expect(t, w.after(time.Second), "Running running last:2 restarts:1 ready")
		if e.called("remove") != 0 {
			t.Error("it was removed")
		}
	})
}

func TestDeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a shorter grace cuts a longer one short
		e := newEngine()
		e.stopTime = time.Hour
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(600))
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(time.Minute), "Running running ready")
		p.DeletionGracePeriodSeconds = new(int64(1))
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(2*time.Second), "gone")
		if e.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // the word of a cache destroys nothing
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(time.Minute), "Running running ready")
		if w.engine.count() != 1 {
			t.Error("the VM was destroyed")
		}
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		_ = w.p.DeletePod(t.Context(), p)
		w.after(time.Minute)
		if w.engine.count() != 0 {
			t.Error("the VM of a pod that is really gone is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // virtual-kubelet deletes nothing whose VM is there
		e := newEngine()
		e.boot = time.Minute
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Pending waiting:ContainerCreating")
		if err := w.p.PodClient().Pods("default").Delete(t.Context(), "web", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}); !apierrors.IsNotFound(err) {
			t.Error(err)
		}
		expect(t, w.after(time.Second), "gone")
		if e.count() != 0 || e.called("stop 0s") != 1 {
			t.Errorf("%d VMs left, calls %v", e.count(), e.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a process that ended half through is taken up where it was
		w := start(t, newEngine())
		w.create(pod())
		p := w.after(time.Second)
		w.stop()
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.engine.Stop(t.Context(), vmName, 0); err != nil {
			t.Fatal(err)
		}
		w.run(Config{})
		defer w.stop()
		expect(t, w.after(time.Second), "gone")
		if w.engine.count() != 0 || w.engine.called("start") != 0 {
			t.Errorf("%d VMs left, calls %v", w.engine.count(), w.engine.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a pod that has ended leaves nothing
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(policy(corev1.RestartPolicyNever)))
		w.after(time.Second)
		w.engine.exit(0)
		p := w.after(time.Second)
		expect(t, p, "Succeeded terminated:Completed:0")
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		p, err := w.p.GetPod(t.Context(), "default", "web")
		if err != nil {
			t.Fatal(err)
		}
		_ = w.p.DeletePod(t.Context(), p)
		w.after(time.Second)
		if w.engine.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // a namesake waits for the name
		e := newEngine()
		e.stopTime = 5 * time.Second
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		second := pod(func(p *corev1.Pod) { p.UID = "uid-2" })
		_ = w.client.Tracker().Add(second)
		if _, err := w.p.GetPod(t.Context(), "default", "web"); !vkerr.IsNotFound(err) {
			t.Errorf("the first pod stands for the second: %v", err)
		}
		_ = w.p.CreatePod(t.Context(), second)
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		expect(t, w.after(6*time.Second), "Running running ready")
		if rec, _ := e.Inspect(t.Context(), vmName); rec.Spec.Labels[contract.VMLabelPodUID] != "uid-2" || e.count() != 1 {
			t.Errorf("VM of %s, %d in all", rec.Spec.Labels[contract.VMLabelPodUID], e.count())
		}
	})
}

func TestStatusSurvivesAnAbsentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		var away atomic.Bool
		w.client.PrependReactor("patch", "pods", outage(&away))
		away.Store(true)
		w.create(pod())
		w.after(time.Minute)
		w.engine.exit(1)
		w.after(time.Minute)
		away.Store(false)
		expect(t, w.after(20*time.Second), "Running running last:1 restarts:1 ready")
	})
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(60)) }))
		expect(t, w.after(50*time.Second), "Running running ready")
		expect(t, w.after(20*time.Second), "Failed/DeadlineExceeded terminated:Completed:0")
	})
}

func TestReadinessGates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) {
			p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/lb"}}
		}))
		p := w.after(time.Second)
		expect(t, p, "Running running")
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: "example.com/lb", Status: corev1.ConditionTrue})
		p, err := w.client.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.p.Observe(p)
		p = w.after(time.Second)
		expect(t, p, "Running running ready")
		if condition(p, "example.com/lb").Status != corev1.ConditionTrue {
			t.Error("a condition of somebody else's was lost")
		}
	})
}
