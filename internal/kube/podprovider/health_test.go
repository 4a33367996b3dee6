package podprovider

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// guestOf answers the commands of probes and hooks. A test sets the exit code and the duration of each command.
type guestOf struct {
	mu    sync.Mutex
	codes map[string]int
	fails map[string]error
	takes map[string]time.Duration
}

func (g *guestOf) set(command string, code int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.codes[command] = code
}

func (g *guestOf) exec(ctx context.Context, command string) (int, error) {
	g.mu.Lock()
	code, err, takes := g.codes[command], g.fails[command], g.takes[command]
	g.mu.Unlock()
	select {
	case <-time.After(takes):
		return code, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// watched returns a world whose guest answers commands.
func watched(t *testing.T) (*world, *guestOf) {
	g := &guestOf{codes: map[string]int{}, fails: map[string]error{}, takes: map[string]time.Duration{}}
	e := newEngine()
	e.execAs = g.exec
	return start(t, e), g
}

// remove deletes the pod with that grace period, as virtual-kubelet does.
func (w *world) remove(grace time.Duration) {
	w.t.Helper()
	p := w.after(0)
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(grace.Seconds()))
	if err := w.p.DeletePod(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
}

// probeBy returns an exec probe with the API server's defaults, which runs every 10 s.
func probeBy(command string, change ...func(*corev1.Probe)) *corev1.Probe {
	p := &corev1.Probe{
		ProbeHandler:   corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{command}}},
		TimeoutSeconds: 1, PeriodSeconds: 10, SuccessThreshold: 1, FailureThreshold: 3,
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func with(change func(*corev1.Container)) func(*corev1.Pod) {
	return func(p *corev1.Pod) { change(&p.Spec.Containers[0]) }
}

func startedOf(p *corev1.Pod) bool {
	return len(p.Status.ContainerStatuses) > 0 && *p.Status.ContainerStatuses[0].Started
}

func TestReadinessProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.set("ready", 1)
		w.create(pod(with(func(c *corev1.Container) { c.ReadinessProbe = probeBy("ready") })))
		p := w.after(25 * time.Second)
		expect(t, p, "Running running")
		if got := condition(p, corev1.PodReady).Message; got != "containers with unready status: [c]: readiness probe failed: said by ready" {
			t.Errorf("message %q", got)
		}
		if got := w.told(); !strings.Contains(got, "Warning Unhealthy Readiness probe failed: said by ready") {
			t.Errorf("events: %s", got)
		}
		g.set("ready", 0)
		expect(t, w.after(10*time.Second), "Running running ready")
		g.set("ready", 1)
		expect(t, w.after(20*time.Second), "Running running ready") // two failures are not enough
		p = w.after(10 * time.Second)
		expect(t, p, "Running running")
		if got := condition(p, corev1.ContainersReady).Message; !strings.Contains(got, "readiness probe failed: said by ready") {
			t.Errorf("message %q", got)
		}
		g.set("ready", 0)
		expect(t, w.after(10*time.Second), "Running running ready")
		w.reach.refuse.Store(true) // the pod is ready only if the guest answers too
		expect(t, w.after(16*time.Second), "Running running")
		w.reach.refuse.Store(false)
		expect(t, w.after(5*time.Second), "Running running ready")
		g.mu.Lock()
		g.fails["ready"] = errdefs.Unavailablef("the guest agent does not answer")
		g.mu.Unlock()
		expect(t, w.after(time.Minute), "Running running ready") // a container that cannot be probed is not unhealthy
		if got := w.told(); !strings.Contains(got, "Readiness probe errored and resulted in unknown state: the guest agent does not answer") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestAQuickReadinessProbeCostsNoWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.takes["ready"] = 100 * time.Millisecond
		w.create(pod(with(func(c *corev1.Container) { c.ReadinessProbe = probeBy("ready") })))
		expect(t, w.after(time.Second), "Running running ready")
		if n := w.writes(); n != 1 {
			t.Errorf("%d writes", n)
		}
	})
}

func TestLivenessProbe(t *testing.T) {
	for _, tc := range []struct {
		policy corev1.RestartPolicy
		want   string
		killed string
	}{
		{corev1.RestartPolicyAlways, "Running running last:0 restarts:1 ready", "Container c failed liveness probe, will be restarted"},
		{corev1.RestartPolicyOnFailure, "Running running last:0 restarts:1 ready", "Container c failed liveness probe, will be restarted"},
		{corev1.RestartPolicyNever, "Succeeded terminated:Completed:0", "Container c failed liveness probe"},
	} {
		t.Run(string(tc.policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, g := watched(t)
				defer w.stop()
				w.create(pod(policy(tc.policy), with(func(c *corev1.Container) {
					c.LivenessProbe = probeBy("alive", func(p *corev1.Probe) {
						p.InitialDelaySeconds, p.PeriodSeconds, p.TerminationGracePeriodSeconds = 5, 2, new(int64(7))
					})
				})))
				expect(t, w.after(4*time.Second), "Running running ready")
				if n := w.engine.called("exec alive"); n != 0 {
					t.Errorf("probed %d times before its initial delay", n)
				}
				w.pass(2 * time.Second)
				g.set("alive", 1)
				expect(t, w.after(4*time.Second), "Running running ready")
				g.set("alive", 0)
				w.pass(2 * time.Second) // a success in between restarts the count
				g.set("alive", 1)
				expect(t, w.after(4*time.Second), "Running running ready")
				w.pass(1500 * time.Millisecond)
				g.set("alive", 0)
				expect(t, w.after(2500*time.Millisecond), tc.want)
				if got := w.told(); !strings.Contains(got, "Warning Unhealthy Liveness probe failed: said by alive") || !strings.Contains(got, "Normal Killing "+tc.killed) {
					t.Errorf("events: %s", got)
				}
				if w.engine.called("stop 7s") != 1 {
					t.Errorf("calls %v", w.engine.calls)
				}
			})
		})
	}
}

func TestStartupProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.set("up", 1)
		w.create(pod(with(func(c *corev1.Container) {
			c.StartupProbe = probeBy("up", func(p *corev1.Probe) { p.PeriodSeconds, p.FailureThreshold = 1, 30 })
			c.ReadinessProbe = probeBy("ready")
			c.LivenessProbe = probeBy("alive")
		})))
		p := w.after(20 * time.Second)
		expect(t, p, "Running running")
		if startedOf(p) || w.engine.called("exec ready")+w.engine.called("exec alive") != 0 {
			t.Errorf("started %v, calls %v", startedOf(p), w.engine.calls)
		}
		g.set("up", 0)
		p = w.after(2 * time.Second)
		expect(t, p, "Running running ready")
		n := w.engine.called("exec up")
		if w.pass(time.Minute); !startedOf(p) || w.engine.called("exec up") != n || w.engine.called("exec alive") == 0 {
			t.Errorf("started %v, calls %v", startedOf(p), w.engine.calls)
		}
		g.set("up", 1)
		g.set("alive", 1)
		w.pass(30 * time.Second) // the liveness probe fails; after the restart the startup probe fails
		w.told()
		p = w.after(40 * time.Second)
		if got := w.told(); !strings.Contains(got, "Container c failed startup probe, will be restarted") || startedOf(p) {
			t.Errorf("started %v, events: %s", startedOf(p), got)
		}
	})
}

func TestAProbeThatHangsFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.takes["ready"] = time.Hour
		w.create(pod(with(func(c *corev1.Container) { c.ReadinessProbe = probeBy("ready") })))
		expect(t, w.after(15*time.Second), "Running running")
		if got := w.told(); !strings.Contains(got, `Readiness probe failed: command timed out: "ready" timed out after 1s`) {
			t.Errorf("events: %s", got)
		}
	})
}

func hook(command string) *corev1.LifecycleHandler {
	return &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{command}}}
}

func TestPostStartHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		g.takes["begin"] = 10 * time.Second
		w.create(pod(with(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PostStart: hook("begin")}
			c.LivenessProbe = probeBy("alive")
		})))
		expect(t, w.after(9*time.Second), "Pending waiting:ContainerCreating")
		if w.engine.called("exec alive") != 0 {
			t.Error("probed before the hook had ended")
		}
		expect(t, w.after(2*time.Second), "Running running ready")
		w.stop()
		w.run(Config{})
		defer w.stop()
		expect(t, w.after(time.Minute), "Running running ready")
		if n := w.engine.called("exec begin"); n != 1 {
			t.Errorf("the hook ran %d times for one start", n)
		}
		g.set("begin", 3)
		w.engine.exit(1)
		w.told()
		p := w.after(11 * time.Second)
		got := w.told()
		if !strings.Contains(got, "Warning FailedPostStartHook PostStartHook failed: the command exited with 3") || !strings.Contains(got, "Normal Killing FailedPostStartHook") {
			t.Errorf("pod %s, events: %s", sketch(p), got)
		}
		expect(t, p, "Running waiting:CrashLoopBackOff last:0 restarts:1")
	})
}

func TestPreStopHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.takes["end"], g.codes["end"] = 10*time.Second, 1
		w.create(pod(with(func(c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{PreStop: hook("end")} })))
		expect(t, w.after(time.Second), "Running running ready")
		w.remove(30 * time.Second)
		if w.pass(5 * time.Second); w.engine.called("exec end") != 1 || w.engine.called("stop 20s") != 0 {
			t.Errorf("calls %v", w.engine.calls)
		}
		expect(t, w.after(6*time.Second), "gone")
		if w.engine.called("stop 20s") != 1 || !strings.Contains(w.told(), "Warning FailedPreStopHook PreStopHook failed: the command exited with 1") {
			t.Errorf("calls %v", w.engine.calls)
		}
	})
}

func TestAPreStopHookHasTheGraceAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := watched(t)
		defer w.stop()
		w.create(pod(with(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 600}}}
		})))
		w.after(time.Second)
		w.remove(30 * time.Second)
		expect(t, w.after(31*time.Second), "gone")
		if w.engine.called("stop 2s") != 1 {
			t.Errorf("calls %v", w.engine.calls)
		}
	})
}

func TestManagedVMsAreRestartedInPlaceAndGivenUpInTime(t *testing.T) {
	for name, tc := range map[string]struct {
		start func() error
		again time.Duration // after which the VM ends once more; 0: it does not
		after time.Duration
		want  string
		event string
	}{
		"in place":       {after: time.Second, want: "Running running last:3 restarts:1 ready", event: "Normal Restarted"},
		"cooled down":    {again: 31 * time.Second, after: time.Second, want: "Running running last:3 restarts:2 ready", event: "Normal Restarted"},
		"too soon":       {again: 20 * time.Second, after: time.Second, want: "gone", event: "Warning RestartCooldown"},
		"cannot start":   {start: func() error { return errdefs.Preconditionf("no image") }, after: time.Second, want: "gone", event: "Warning RestartFailed"},
		"no answer":      {start: func() error { return errdefs.Unavailablef("no answer") }, after: 29 * time.Minute, want: "Running waiting:RunContainerError last:3", event: "RunContainerError"},
		"no answer ever": {start: func() error { return errdefs.Unavailablef("no answer") }, after: 31 * time.Minute, want: "gone", event: "Warning VMInspectTimeout"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				e.startAs = tc.start
				w := start(t, e)
				defer w.stop()
				w.create(pod(managedRun))
				expect(t, w.after(time.Second), "Running running ready")
				w.engine.exit(3)
				if tc.again > 0 {
					w.pass(tc.again)
					w.engine.exit(3)
				}
				p := w.after(tc.after)
				if p == nil { // virtual-kubelet notices the deletion
					_ = w.p.DeletePod(t.Context(), pod(managedRun))
					w.pass(time.Second)
				}
				expect(t, p, tc.want)
				if got := w.told(); !strings.Contains(got, tc.event) {
					t.Errorf("events: %s", got)
				}
				if p == nil && w.engine.count() != 0 {
					t.Error("the VM of the evicted pod was not removed")
				}
			})
		})
	}
}

// Guests are still probed if the clock of the host jumps while the virtual node is restarted.
func TestProbesGoOnWhenTheClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{-time.Hour, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			w, g := watched(t)
			w.create(pod(with(func(c *corev1.Container) { c.LivenessProbe = probeBy("lives") })))
			expect(t, w.after(time.Minute), "Running running ready")
			rec, err := w.engine.Inspect(t.Context(), vmName)
			if err != nil {
				t.Fatal(err)
			}
			w.engine.change(rec.ID, func(r *vm.Record) { r.StartedAt = r.StartedAt.Add(-jump) })
			expect(t, w.after(time.Minute), "Running running ready")
			w.stop()
			w.run(Config{})
			defer w.stop()
			expect(t, w.after(time.Minute), "Running running ready")
			g.mu.Lock()
			g.codes["lives"] = 1
			g.mu.Unlock()
			w.after(time.Minute)
			if got := w.told(); !strings.Contains(got, "Unhealthy Liveness probe failed") {
				t.Errorf("clock jumped by %s: told %s", jump, got)
			}
		})
	}
}
