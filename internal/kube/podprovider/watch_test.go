package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// two is a pod of the containers c and d.
func two(change ...func(*corev1.Pod)) *corev1.Pod {
	return pod(append([]func(*corev1.Pod){func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "cocoon/demo:latest"})
	}}, change...)...)
}

func quick(p *corev1.Probe) { p.PeriodSeconds = 1 }

// What a probe says of one container is not the others' business.
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

		// A run that ended by itself has the next one probed from the beginning, too.
		g.set("up", 1)
		w.engine.rerun("c", 3)
		p = w.after(time.Second)
		expect(t, p, "Running running last:3 restarts:2 running")
		if startedOf(p) {
			t.Error("it has started already")
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

// A new process of ours knows how the containers did, each by its run.
func TestContainersAreTakenUpAgain(t *testing.T) {
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
			t.Error("a run that nobody saw begin has started")
		}
	})
}
