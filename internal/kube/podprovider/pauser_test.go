package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func conditionOf(p *corev1.Pod, kind corev1.PodConditionType) string {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return string(c.Status) + " " + c.Reason
		}
	}
	return ""
}

// TestPauseAndUnpause: the annotation pauses the VM. Its pod runs and is not ready, and its liveness probe does not kill it, over a
// restart of the node.
func TestPauseAndUnpause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := watched(t)
		defer func() { w.stop() }()
		w.create(pod(with(func(c *corev1.Container) {
			c.LivenessProbe = probeBy("alive", func(p *corev1.Probe) { p.PeriodSeconds, p.FailureThreshold = 2, 1 })
		})))
		p := w.after(4 * time.Second)
		expect(t, p, "Running running ready")
		if got := conditionOf(p, contract.ConditionPaused); got != "" {
			t.Errorf("a pod that was never paused has the condition %q", got)
		}
		w.annotate(contract.KeyPaused, "true")
		w.pass(time.Second)
		g.set("alive", 1) // nothing answers
		w.reach.refuse.Store(true)
		probes := w.engine.called("exec alive")
		p = w.after(time.Minute)
		expect(t, p, "Running running")
		if got := conditionOf(p, contract.ConditionPaused) + ", " + conditionOf(p, corev1.PodReady) + ", " + conditionOf(p, corev1.ContainersReady); got != "True Paused, False Paused, False Paused" {
			t.Errorf("paused: %s", got)
		}
		if n := w.engine.called("exec alive") - probes; n != 0 || w.engine.called("pause") != 1 {
			t.Errorf("%d probes of a paused guest; calls %v", n, w.engine.calls)
		}
		w.expectTold("Normal Paused VM " + vmName + " is paused")
		writes := w.writes()
		expect(t, w.after(time.Hour), "Running running")
		if n := w.writes() - writes; n != 0 {
			t.Errorf("%d writes in an hour of pause", n)
		}

		w.stop() // the node is started again
		w.run(Config{})
		if err := w.p.CreatePod(t.Context(), p.DeepCopy()); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(time.Minute), "Running running")

		g.set("alive", 0)
		w.reach.refuse.Store(false)
		w.annotate(contract.KeyPaused, "")
		p = w.after(10 * time.Second)
		expect(t, p, "Running running ready")
		if got := conditionOf(p, contract.ConditionPaused); got != "False " {
			t.Errorf("unpaused: %q", got)
		}
		w.expectTold("Normal Unpaused VM " + vmName + " runs again")
		g.set("alive", 1) // and now it counts
		w.pass(10 * time.Second)
		if w.engine.called("stop 30s") == 0 {
			t.Errorf("the liveness probe of a guest that was paused does not kill it: %v", w.engine.calls)
		}
	})
}

// TestStartPaused: with the annotation from the beginning, the guest does not run before the annotation is gone. A deletion does not
// wait for it.
func TestStartPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(asks(map[string]string{contract.KeyPaused: "true"})))
		p := w.after(5 * time.Second)
		if w.engine.called("pause") != 0 || !strings.HasPrefix(conditionOf(p, contract.ConditionPaused), "True") || ready(p) {
			t.Errorf("it is %s, %q; calls %v", sketch(p), conditionOf(p, contract.ConditionPaused), w.engine.calls)
		}
		w.annotate(contract.KeyPaused, "")
		expect(t, w.after(5*time.Second), "Running running ready")
	})
}

// TestPauseFails: a node that cannot pause a VM says so once, tries again, and the guest goes on.
func TestPauseFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		expect(t, w.after(5*time.Second), "Running running ready")
		w.engine.mu.Lock()
		w.engine.pauseAs = errdefs.Unavailablef("no answer")
		w.engine.mu.Unlock()
		w.annotate(contract.KeyPaused, "true")
		expect(t, w.after(2*time.Minute), "Running running ready")
		if n, told := w.engine.called("pause"), w.told(); n < 2 || n > 30 || strings.Count(told, "Warning PauseFailed") != 1 {
			t.Errorf("%d attempts; events %s", n, told)
		}
		w.engine.mu.Lock()
		w.engine.pauseAs = nil
		w.engine.mu.Unlock()
		expect(t, w.after(6*time.Minute), "Running running")
	})
}

// TestDeletePaused: a paused guest runs again to shut down in order.
func TestDeletePaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		expect(t, w.after(5*time.Second), "Running running ready")
		w.annotate(contract.KeyPaused, "true")
		p := w.after(5 * time.Second)
		expect(t, p, "Running running")
		w.remove(10 * time.Second)
		w.pass(time.Minute)
		calls := strings.Join(w.engine.calls, " ")
		if u, s := strings.LastIndex(calls, "unpause"), strings.LastIndex(calls, "stop"); u < 0 || s < u {
			t.Errorf("calls %s", calls)
		}
	})
}

// TestReboot: each request is done once and answered, also one that fails, and also over a restart of the node.
func TestReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		w.create(pod())
		expect(t, w.after(5*time.Second), "Running running ready")
		ask := func(value, answer string) *corev1.Pod {
			t.Helper()
			w.annotate(contract.KeyReboot, value)
			p := w.after(5 * time.Second)
			if got := p.Annotations[contract.KeyRebooted]; got != answer {
				t.Errorf("%s: the answer is %q, want %q", value, got, answer)
			}
			expect(t, p, "Running running ready")
			return p
		}
		ask("soft 1", "1")
		ask("hard 2", "2")
		ask("now 3", "2") // no request
		w.engine.mu.Lock()
		w.engine.rebootAs = errdefs.Unsupportedf("the guest ends when it resets")
		w.engine.mu.Unlock()
		p := ask("hard 4", "4 the guest ends when it resets")
		w.expectTold("Normal Rebooted The guest of VM "+vmName+" starts again in order", "by a reset", "Warning RebootFailed")
		w.stop() // the node is started again
		w.run(Config{})
		if err := w.p.CreatePod(t.Context(), p.DeepCopy()); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(time.Minute), "Running running ready")
		if soft, hard := w.engine.called("reboot false"), w.engine.called("reboot true"); soft != 1 || hard != 2 {
			t.Errorf("%d and %d reboots: %v", soft, hard, w.engine.calls)
		}
	})
}
