package podprovider

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// inside returns a world whose guests start the only container of a pod again by themselves.
func inside(t *testing.T) *world {
	e := newEngine()
	e.inside = true
	return start(t, e)
}

// The only container of a pod ends: its guest goes on, and the next run has a time and an ID of its own.
func TestTheOnlyContainerRunsAgainInItsGuest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := inside(t)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Running running ready")
		if got := w.told(); !strings.HasPrefix(got, "Normal Started Created and started container c") {
			t.Errorf("events: %s", got)
		}
		first := p.Status.ContainerStatuses[0]
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		if first.ContainerID != "cocoon://"+string(rec.ID) || first.ImageID != "sha256:abc" || first.Image != "cocoon/demo:latest" {
			t.Errorf("first run %+v", first)
		}
		w.pass(time.Minute)
		w.engine.rerun("c", 3)
		p = w.after(time.Second)
		expect(t, p, "Running running last:3 restarts:1 ready")
		again := p.Status.ContainerStatuses[0]
		if again.ContainerID != first.ContainerID+"/2" || again.LastTerminationState.Terminated.ContainerID != first.ContainerID || again.Image != first.Image {
			t.Errorf("second run %+v after %+v", again, first)
		}
		if !again.State.Running.StartedAt.After(first.State.Running.StartedAt.Time) {
			t.Errorf("the second run began %s, the first %s", again.State.Running.StartedAt, first.State.Running.StartedAt)
		}
		if w.engine.called("start") != 0 {
			t.Errorf("the VM was started again: %v", w.engine.calls)
		}
		w.stop()
		w.run(Config{})
		expect(t, w.after(time.Second), "Running running last:3 restarts:1 ready")
		w.told()
		w.engine.change(rec.ID, func(r *vm.Record) {
			r.Containers = slices.Clone(r.Containers)
			s := &r.Containers[0].Status
			s.State, s.Reason, s.Last = vm.ContainerWaiting, vm.ContainerCrashLoop, &vm.ContainerExit{Code: 4}
		})
		p = w.after(time.Second)
		expect(t, p, "Running waiting:CrashLoopBackOff last:4 restarts:1")
		if id := p.Status.ContainerStatuses[0].LastTerminationState.Terminated.ContainerID; id != again.ContainerID {
			t.Errorf("the run that ended is %s, want %s", id, again.ContainerID)
		}
		w.engine.change(rec.ID, func(*vm.Record) {})
		if got := w.told(); strings.Count(got, "Warning BackOff Back-off restarting failed container c") != 1 {
			t.Errorf("events: %s", got)
		}
	})
}

// What a container lacks before its guest can start it is in its status, and once in an Event.
func TestAContainerWaitsForItsFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := inside(t)
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		w.told()
		for range 2 {
			w.engine.change(rec.ID, func(r *vm.Record) {
				r.Containers = slices.Clone(r.Containers)
				r.Containers[0].Status = vm.ContainerStatus{State: vm.ContainerWaiting, Reason: vm.ContainerConfigError, Message: "couldn't parse env file"}
			})
		}
		expect(t, w.after(time.Second), "Running waiting:CreateContainerConfigError")
		if got := w.told(); strings.Count(got, "Warning Failed Error: couldn't parse env file") != 1 {
			t.Errorf("events: %s", got)
		}
	})
}

// A VM that ends, rather than its container, is started again by the node.
func TestTheVMOfTheOnlyContainerEnds(t *testing.T) {
	for restart, want := range map[corev1.RestartPolicy]string{
		corev1.RestartPolicyAlways:    "Running running restarts:1 ready",
		corev1.RestartPolicyOnFailure: "Running running restarts:1 ready",
		corev1.RestartPolicyNever:     "Failed terminated:Error:3",
	} {
		t.Run(string(restart), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := inside(t)
				defer w.stop()
				w.create(pod(policy(restart)))
				expect(t, w.after(time.Second), "Running running ready")
				w.engine.exit(3)
				expect(t, w.after(time.Second), want)
			})
		})
	}
}

// A liveness probe ends the run, not the VM.
func TestALivenessProbeEndsARunInTheGuest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := inside(t)
		defer w.stop()
		var sick atomic.Bool
		w.engine.execAs = func(context.Context, string) (int, error) {
			if sick.CompareAndSwap(true, false) {
				return 1, nil
			}
			return 0, nil
		}
		w.create(pod(with(func(c *corev1.Container) {
			c.LivenessProbe = probeBy("alive", func(p *corev1.Probe) {
				p.PeriodSeconds, p.FailureThreshold, p.TerminationGracePeriodSeconds = 2, 1, new(int64(7))
			})
		})))
		expect(t, w.after(time.Second), "Running running ready")
		sick.Store(true)
		expect(t, w.after(2500*time.Millisecond), "Running running last:143 restarts:1 ready")
		if w.engine.called("kill c/1 7s") != 1 || w.engine.called("start") != 0 {
			t.Errorf("calls %v", w.engine.calls)
		}
	})
}

// A clone has the container of its snapshot, whatever the pod calls it.
func TestTheOnlyContainerOfACloneHasAnyName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := inside(t)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		w.engine.mu.Lock()
		r := w.engine.web()
		r.Containers = slices.Clone(r.Containers)
		r.Containers[0].Name = "other"
		w.engine.mu.Unlock()
		w.engine.change(r.ID, func(*vm.Record) {})
		p := w.after(time.Second)
		expect(t, p, "Running running ready")
		if p.Status.ContainerStatuses[0].Name != "c" {
			t.Errorf("%+v", p.Status.ContainerStatuses)
		}
		if all := w.p.Tracked(); len(all) != 1 || !slices.Equal(all[0].Containers, []string{"c"}) {
			t.Errorf("tracked: %+v", all)
		}
		var out strings.Builder
		if _, err := w.p.Exec(t.Context(), "default", "web", "c", guest.Exec{Command: []string{"true"}}, guest.Streams{Stdout: &out}); err != nil || out.String() != "hi\n" {
			t.Errorf("exec: %q, %v", out.String(), err)
		}
	})
}
