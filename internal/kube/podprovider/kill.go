package podprovider

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles what surrounds the process of a container: its hooks, and its end when a probe or hook demands it.

// leastGrace is the minimum grace that is left, however long preStop took.
const leastGrace = 2 * time.Second

// killRequest says that a container must be killed, and then restarted if the pod's policy allows that.
type killRequest struct {
	message string    // for the Killing Event
	grace   *int64    // seconds; nil: the pod's
	run     time.Time // of the VM that must be stopped for it
	told    bool      // it was reported and, if the VM keeps running, is being carried out
}

func (s *killRequest) graceIn(pod *corev1.Pod) time.Duration {
	if s.grace != nil {
		return convert.Seconds(*s.grace)
	}
	return convert.Grace(pod)
}

// requestKill requests a kill of the run that x monitors; only the first request counts. Preconditions: mu is held.
func (w *worker) requestKill(x *containerMonitor, s killRequest) {
	if !w.on(x) || x.killRequest != nil {
		return
	}
	x.killRequest = &s
	if x.run.number == 0 { // the container is the VM
		w.requestVMStop(s, x.run.vm)
	}
	w.poke()
}

// requestVMStop requests a stop of the VM in that run because of s. Preconditions: mu is held.
func (w *worker) requestVMStop(s killRequest, run time.Time) {
	if w.killRequest == nil || !w.killRequest.run.Equal(run) {
		s.run = run
		w.killRequest = &s
	}
}

// requestedStop returns the request for which the VM must be stopped.
func (w *worker) requestedStop() *killRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.killRequest
}

// stopForKill stops the VM. A restart is handled after the VM has ended.
func (w *worker) stopForKill(ctx context.Context, pod *corev1.Pod, rec *vm.Record, s *killRequest) turn {
	if !s.told {
		s.told = true
		w.log.Info("container killed", "vm", rec.ID, "op", s.message)
		w.event(corev1.EventTypeNormal, eventKilling, "%s", s.message)
	}
	w.stopMonitor()
	w.publish(0)
	got, err := w.vms.Stop(ctx, string(rec.ID), w.preStop(ctx, convert.Observed(pod), rec, s.graceIn(pod)))
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		return w.retry(ctx, reasonRunError, err, time.Second, 30*time.Second)
	}
	w.tries, w.killed = wait.Backoff{}, rec.StartedAt
	w.take(got)
	return atOnce
}

// killRequested kills each container that has a kill request, by itself, while the VM keeps running.
func (w *worker) killRequested(v *guestMonitor, pod *corev1.Pod, rec *vm.Record) {
	var due []*containerMonitor
	w.mu.Lock()
	for name, x := range v.watches {
		if x.run.number == 0 || x.killRequest == nil || x.killRequest.told {
			continue
		}
		x.killRequest.told = true
		h := w.health[name]
		h.Ready = false
		w.health[name] = h
		due = append(due, x)
	}
	w.mu.Unlock()
	for _, x := range due {
		x.stop()
		v.hook(w.background(func(ctx context.Context) { w.killContainer(ctx, pod, rec, x) }))
	}
}

// killContainer ends the run that x monitors; the guest takes care of the next run. If the guest's agent cannot do that,
// the VM is stopped instead.
func (w *worker) killContainer(ctx context.Context, pod *corev1.Pod, rec *vm.Record, x *containerMonitor) {
	name := x.container.Name
	w.log.Info("container killed", "vm", rec.ID, "op", x.killRequest.message)
	w.event(corev1.EventTypeNormal, eventKilling, "%s", x.killRequest.message)
	grace := w.preStop(ctx, []*corev1.Container{x.container}, rec, x.killRequest.graceIn(pod))
	_ = growing(time.Second, 30*time.Second, 0).DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := w.containers.KillContainer(ctx, string(rec.ID), name, x.run.number, grace)
		switch {
		case err == nil || ctx.Err() != nil:
			return true, err
		case errdefs.Is(err, errdefs.Unsupported):
			w.log.Info("vm stopped for its container: its guest's agent is older", "vm", rec.ID, "err", err)
			w.mu.Lock()
			w.requestVMStop(*x.killRequest, x.run.vm)
			w.poke()
			w.mu.Unlock()
			return true, nil
		}
		w.event(corev1.EventTypeWarning, eventFailedKill, "error killing container %s: %s", name, err)
		w.log.Warn("container not killed", "vm", rec.ID, "op", name, "err", err)
		return false, nil
	})
}

// postStart runs the hook that follows the start of the process of x's container. The container does not count as running
// until the hook has succeeded. If the hook fails, the container is killed.
func (w *worker) postStart(ctx context.Context, v *guestMonitor, x *containerMonitor) {
	began, c := time.Now(), x.container
	target, _ := w.aim(c)
	err := target.Hook(ctx, c.Lifecycle.PostStart)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		w.log.Warn("postStart hook failed", "op", c.Name, "err", err)
		w.event(corev1.EventTypeWarning, eventPostStart, "PostStartHook failed: %s", err)
		w.mu.Lock()
		w.requestKill(x, killRequest{message: eventPostStart})
		w.mu.Unlock()
		return
	}
	w.mu.Lock()
	on := w.on(x)
	if on {
		h := w.health[c.Name]
		h.Starting = false
		w.health[c.Name] = h
		w.poke()
	}
	w.mu.Unlock()
	if on {
		w.watchContainer(v, x, began)
	}
}

// preStop runs the hooks that come before containers are stopped, all at once and once per run. It returns what is left of
// grace. It runs no hook where nothing is stopped in order: without a grace, in a guest that is not up, or where nothing
// runs.
func (w *worker) preStop(ctx context.Context, containers []*corev1.Container, rec *vm.Record, grace time.Duration) time.Duration {
	if grace <= 0 || !podstatus.Up(rec) {
		return grace
	}
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var hooks sync.WaitGroup
	ran := false
	for _, c := range containers {
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil || !w.preStopDue(rec, c.Name) {
			continue
		}
		ran = true
		hooks.Go(func() {
			target, _ := w.aim(c)
			err := target.Hook(limited, c.Lifecycle.PreStop)
			if err == nil || ctx.Err() != nil {
				return
			}
			w.log.Warn("preStop hook failed", "op", c.Name, "err", err)
			w.event(corev1.EventTypeWarning, eventPreStop, "PreStopHook failed: %s", err)
		})
	}
	hooks.Wait()
	if !ran {
		return grace
	}
	return max(grace-time.Since(began), leastGrace)
}

// preStopDue reports whether the preStop hook of the named container must run now, and records that it runs.
func (w *worker) preStopDue(rec *vm.Record, name string) bool {
	r, runs := runOf(rec, name)
	w.mu.Lock()
	defer w.mu.Unlock()
	if !runs || w.bowed[name].is(r) {
		return false
	}
	w.bowed[name] = r
	return true
}
