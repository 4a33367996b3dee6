package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// two returns a pod with the containers c and d.
func two(change ...func(*corev1.Pod)) *corev1.Pod {
	return pod(append([]func(*corev1.Pod){func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "cocoon/demo:latest"})
	}}, change...)...)
}

func quick(p *corev1.Probe) { p.PeriodSeconds = 1 }

// A failed liveness probe restarts only its own container.
func TestALivenessProbeRestartsItsContainerAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		w.create(two(with(func(c *corev1.Container) {
			c.LivenessProbe = probeBy("alive", quick, func(p *corev1.Probe) { p.TerminationGracePeriodSeconds = new(int64(7)) })
			c.StartupProbe = probeBy("up", quick)
			c.ReadinessProbe = probeBy("ready", quick)
		})))
		expect(t, w.after(5*time.Second), "Running running running ready")
		g.set("alive", 1)
		g.set("up", 1)
		p := w.after(4 * time.Second)
		expect(t, p, "Running running last:143 restarts:1 running")
		if startedOf(p) || w.engine.called("kill c/1 7s") != 1 || w.engine.called("stop 7s")+w.engine.called("start") != 0 {
			t.Errorf("started %v, calls %v", startedOf(p), w.engine.calls)
		}
		got := w.told()
		if !strings.Contains(got, "Normal Killing Container c failed liveness probe, will be restarted") || strings.Count(got, "Killing") != 1 {
			t.Errorf("events: %s", got)
		}
		g.set("alive", 0)
		g.set("up", 0)
		expect(t, w.after(3*time.Second), "Running running last:143 restarts:1 running ready")

		// After a run that ended by itself, the next run is also probed from the beginning.
		g.set("up", 1)
		w.engine.rerun("c", 3)
		p = w.after(time.Second)
		expect(t, p, "Running running last:3 restarts:2 running")
		if startedOf(p) {
			t.Error("the container counts as started")
		}
		w.pass(3 * time.Second)
		if got := w.told(); !strings.Contains(got, "Container c failed startup probe, will be restarted") || w.engine.called("kill c/3 30s") != 1 {
			t.Errorf("events: %s, calls %v", got, w.engine.calls)
		}
	})
}

func TestAVMOfAnOlderAgentIsRestartedForItsContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		w.engine.older = true
		defer w.stop()
		w.create(two(policy(corev1.RestartPolicyOnFailure), with(func(c *corev1.Container) { c.LivenessProbe = probeBy("alive", quick) })))
		expect(t, w.after(5*time.Second), "Running running running ready")
		g.set("alive", 1)
		w.pass(3 * time.Second)
		g.set("alive", 0)
		p := w.after(5 * time.Second)
		if sketch(p) != "Running running restarts:1 running restarts:1 ready" || w.engine.called("stop 30s") != 1 {
			t.Errorf("pod %s, calls %v", sketch(p), w.engine.calls)
		}
		if got := w.told(); strings.Count(got, "Killing") != 1 {
			t.Errorf("events: %s", got)
		}
	})
}

// A new process restores the health of each container, if the container is still in the same run.
func TestContainerHealthIsRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		w.create(two(with(func(c *corev1.Container) { c.StartupProbe = probeBy("up", quick) })))
		expect(t, w.after(5*time.Second), "Running running running ready")
		w.stop()
		g.set("up", 1)
		w.run(Config{})
		expect(t, w.after(10*time.Second), "Running running running ready")
		w.stop()
		w.engine.rerun("c", 1)
		w.run(Config{})
		defer w.stop()
		p := w.after(time.Second)
		expect(t, p, "Running running last:1 restarts:1 running")
		if startedOf(p) {
			t.Error("a run that began while no process ran counts as started")
		}
	})
}

// beside adds a sidecar called s before the containers of a pod.
func beside(change func(*corev1.Container)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := corev1.Container{Name: "s", Image: "cocoon/demo:latest", RestartPolicy: new(corev1.ContainerRestartPolicyAlways)}
		change(&c)
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
}

func sidecarOf(p *corev1.Pod) string {
	c := p.Status.InitContainerStatuses[0]
	switch {
	case c.State.Running != nil && c.Ready:
		return "ready"
	case c.State.Running != nil && *c.Started:
		return "started"
	case c.State.Running != nil:
		return "running"
	}
	return "waiting"
}

// The containers after a sidecar start when its startup probe has succeeded. The pod is ready only if its sidecars are ready.
// A sidecar is restarted alone.
func TestSidecarsAreProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer w.stop()
		g.set("up", 1)
		g.set("ready", 1)
		w.create(pod(policy(corev1.RestartPolicyNever), beside(func(c *corev1.Container) {
			c.StartupProbe = probeBy("up", func(p *corev1.Probe) { p.PeriodSeconds, p.FailureThreshold = 1, 100 })
			c.ReadinessProbe, c.LivenessProbe = probeBy("ready", quick), probeBy("alive", quick)
		})))
		p := w.after(10 * time.Second)
		expect(t, p, "Pending waiting:PodInitializing")
		if got := condition(p, corev1.PodInitialized); sidecarOf(p) != "running" || got.Status != corev1.ConditionFalse || !strings.Contains(got.Message, "[s]") {
			t.Errorf("sidecar %s, %+v", sidecarOf(p), got)
		}
		if w.engine.called("release s") != 0 {
			t.Error("the next containers were released before the sidecar had started")
		}
		g.set("up", 0)
		p = w.after(3 * time.Second)
		expect(t, p, "Running running")
		if got := condition(p, corev1.PodReady).Message; sidecarOf(p) != "started" || !strings.Contains(got, "unready status: [s]") || w.engine.called("release s") != 1 {
			t.Errorf("sidecar %s, %s, calls %v", sidecarOf(p), got, w.engine.calls)
		}
		g.set("ready", 0)
		p = w.after(2 * time.Second)
		if expect(t, p, "Running running ready"); sidecarOf(p) != "ready" {
			t.Errorf("sidecar %s", sidecarOf(p))
		}
		g.set("alive", 1)
		g.set("up", 1)
		p = w.after(4 * time.Second) // the pod stays initialized
		if expect(t, p, "Running running"); sidecarOf(p) != "running" || p.Status.InitContainerStatuses[0].RestartCount != 1 || condition(p, corev1.PodInitialized).Status != corev1.ConditionTrue {
			t.Errorf("sidecar %s: %+v", sidecarOf(p), p.Status)
		}
		if got := w.told(); !strings.Contains(got, "Container s failed liveness probe, will be restarted") || w.engine.called("stop 30s") != 0 {
			t.Errorf("events: %s", got)
		}
	})
}

// Each container has its own hooks. postStart delays the containers after it, and its failure affects only its own container.
// The preStop hooks of all containers run at the same time.
func TestHooksOfSeveralContainers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		g.takes["begin-s"], g.takes["begin-c"], g.takes["end-s"], g.takes["end-c"] = 5*time.Second, 5*time.Second, 10*time.Second, 8*time.Second
		w.create(two(beside(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PostStart: hook("begin-s"), PreStop: hook("end-s")}
		}), with(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PostStart: hook("begin-c"), PreStop: hook("end-c")}
		})))
		p := w.after(4 * time.Second)
		if expect(t, p, "Pending waiting:PodInitializing waiting:PodInitializing"); sidecarOf(p) != "waiting" || w.engine.called("exec begin-c") != 0 {
			t.Errorf("sidecar %s, calls %v", sidecarOf(p), w.engine.calls)
		}
		expect(t, w.after(4*time.Second), "Pending waiting:ContainerCreating waiting:PodInitializing")
		expect(t, w.after(4*time.Second), "Running running running ready")
		w.stop()
		w.run(Config{})
		defer w.stop()
		expect(t, w.after(10*time.Second), "Running running running ready")
		if w.engine.called("exec begin-s") != 1 || w.engine.called("exec begin-c") != 1 {
			t.Errorf("calls %v", w.engine.calls)
		}
		g.set("begin-c", 3)
		w.told()
		w.engine.rerun("c", 1)
		expect(t, w.after(4*time.Second), "Running waiting:ContainerCreating last:1 restarts:1 running")
		w.pass(10 * time.Second)
		if got := w.told(); !strings.Contains(got, "PostStartHook failed: the command exited with 3") || w.engine.called("exec end-c") != 1 || w.engine.called("kill c/2 22s") != 1 {
			t.Errorf("events: %s, calls %v", got, w.engine.calls)
		}
		g.set("begin-c", 0)
		w.pass(time.Minute)
		w.remove(30 * time.Second)
		expect(t, w.after(9*time.Second), "Running running last:143 restarts:3 running ready")
		if expect(t, w.after(2*time.Second), "gone"); w.engine.called("stop 20s") != 1 || w.engine.called("exec end-s") != 1 || w.engine.called("exec end-c") != 3 {
			t.Errorf("calls %v", w.engine.calls)
		}
	})
}
