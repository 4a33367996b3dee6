package podhealth

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file runs the hooks of containers, and kills a container when a probe or hook requires that.

// leastGrace is the minimum grace period that remains after the preStop hooks.
const leastGrace = 2 * time.Second

// StopRequest says that a container must be stopped, or its VM if the container cannot be stopped alone. The restart policy of
// the pod decides whether the container is started again.
type StopRequest struct {
	message string    // for the Killing Event
	grace   *int64    // seconds; nil: the pod's grace period
	run     time.Time // start of the VM's run, if the VM must be stopped
	told    bool      // the request was reported, and if only the container is stopped, that has begun
}

// Grace returns the grace period: how long the processes of pod may take to end.
func (s *StopRequest) Grace(pod *corev1.Pod) time.Duration {
	if s.grace != nil {
		return convert.Seconds(*s.grace)
	}
	return convert.Grace(pod)
}

// StopRequested returns the request to stop the VM in the run of rec, or nil. A request is valid until Watch sees another run.
func (h *Health) StopRequested(rec *vm.Record) *StopRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stop == nil || !h.stop.run.Equal(rec.StartedAt) {
		return nil
	}
	return h.stop
}

// Report reports the request s to stop rec, with a Killing Event. It does so once per request.
func (h *Health) Report(rec *vm.Record, s *StopRequest) {
	h.mu.Lock()
	told := s.told
	s.told = true
	h.mu.Unlock()
	if !told {
		h.report(rec, s.message)
	}
}

func (h *Health) report(rec *vm.Record, message string) {
	h.owner.Log.Info("container killed", "vm", rec.ID, "op", message)
	h.owner.Event(corev1.EventTypeNormal, eventKilling, "%s", message)
}

// requestKill requests a kill of the run that x monitors. It returns false if a kill was requested before. Preconditions: mu
// is held, x is a current monitor.
func (h *Health) requestKill(x *containerMonitor, s StopRequest) bool {
	if x.kill != nil {
		return false
	}
	x.kill = &s
	if x.run.number == 0 { // the container is alone in its VM
		h.requestStop(s, x.run.vm)
	}
	return true
}

// Restart requests a kill of the current run of the named container, which the guest then starts again. It returns false if the
// container is not started again after that, or nothing monitors it. The next Watch begins the kill.
func (h *Health) Restart(container, message string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.monitor == nil {
		return false
	}
	x := h.monitor.watches[container]
	if x == nil || !x.restarts {
		return false
	}
	h.requestKill(x, StopRequest{message: message})
	return true
}

// requestStop requests a stop of the VM because of s, unless that run is over. Precondition: mu is held.
func (h *Health) requestStop(s StopRequest, run time.Time) {
	if h.monitor == nil || !h.monitor.run.Equal(run) {
		return
	}
	if h.stop == nil || !h.stop.run.Equal(run) {
		s.run = run
		h.stop = &s
	}
}

// killRequested kills each container that has a kill request, while the VM and the other containers keep running.
func (h *Health) killRequested(v *guestMonitor, pod *corev1.Pod, rec *vm.Record) {
	var due []*containerMonitor
	h.mu.Lock()
	for name, x := range v.watches {
		if x.run.number == 0 || x.kill == nil || x.kill.told {
			continue
		}
		x.kill.told = true
		s := h.containers[name]
		s.Ready = false
		h.containers[name] = s
		due = append(due, x)
	}
	h.mu.Unlock()
	for _, x := range due {
		x.stop()
		v.hook(h.owner.Spawn(func(ctx context.Context) { h.killContainer(ctx, pod, rec, x) }))
	}
}

// killContainer ends the run that x monitors. The guest restarts the container if its policy allows. If the guest's agent is
// too old to stop a single container, killContainer requests a stop of the VM.
func (h *Health) killContainer(ctx context.Context, pod *corev1.Pod, rec *vm.Record, x *containerMonitor) {
	name := x.container.Name
	h.report(rec, x.kill.message)
	grace := h.preStop(ctx, []*corev1.Container{x.container}, rec, x.kill.Grace(pod))
	retry(ctx, func(ctx context.Context) (bool, error) {
		err := h.owner.Kill(ctx, string(rec.ID), name, x.run.number, grace)
		switch {
		case err == nil || ctx.Err() != nil:
			return true, err
		case errdefs.Is(err, errdefs.Unsupported):
			h.owner.Log.Info("vm stopped to restart its container, because the guest agent cannot stop a single container", "vm", rec.ID, "err", err)
			h.mu.Lock()
			h.requestStop(*x.kill, x.run.vm)
			h.mu.Unlock()
			h.owner.Poke()
			return true, nil
		}
		h.owner.Event(corev1.EventTypeWarning, eventFailedKill, "error killing container %s: %s", name, err)
		h.owner.Log.Warn("container not killed", "vm", rec.ID, "op", name, "err", err)
		return false, nil
	})
}

// postStart runs the postStart hook of x's container. The container does not count as running until the hook has succeeded. If
// the hook fails, the container is killed.
func (h *Health) postStart(ctx context.Context, v *guestMonitor, x *containerMonitor) {
	began, c := time.Now(), x.container
	var target probe.Target
	retry(ctx, func(context.Context) (ready bool, err error) { // wait until the container runs; ctx ends with the run
		target, ready = h.target(c)
		return ready, nil
	})
	if ctx.Err() != nil {
		return
	}
	err := target.Hook(ctx, c.Lifecycle.PostStart)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		h.owner.Log.Warn("postStart hook failed", "op", c.Name, "err", err)
		h.owner.Event(corev1.EventTypeWarning, eventPostStart, "PostStartHook failed: %s", err)
		h.update(x, func(*podstatus.Health) bool { return h.requestKill(x, StopRequest{message: eventPostStart}) })
		return
	}
	if h.update(x, func(s *podstatus.Health) bool { s.Starting = false; return true }) {
		h.watchContainer(v, x, began)
	}
}

// PreStop runs the preStop hooks of the containers of pod, all at the same time and once per run. It returns the rest of the
// grace period. It runs no hook without a grace period, in a guest that is not up, or of a container that does not run.
func (h *Health) PreStop(ctx context.Context, pod *corev1.Pod, rec *vm.Record, grace time.Duration) time.Duration {
	return h.preStop(ctx, convert.Observed(pod), rec, grace)
}

func (h *Health) preStop(ctx context.Context, containers []*corev1.Container, rec *vm.Record, grace time.Duration) time.Duration {
	if grace <= 0 || !podstatus.Up(rec) {
		return grace
	}
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var hooks sync.WaitGroup
	ran := false
	for _, c := range containers {
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
			continue
		}
		target, ready := h.target(c)
		if !ready || !h.preStopDue(rec, c.Name) { // the container does not run, or its hook has run
			continue
		}
		ran = true
		hooks.Go(func() {
			err := target.Hook(limited, c.Lifecycle.PreStop)
			if err == nil || ctx.Err() != nil {
				return
			}
			h.owner.Log.Warn("preStop hook failed", "op", c.Name, "err", err)
			h.owner.Event(corev1.EventTypeWarning, eventPreStop, "PreStopHook failed: %s", err)
		})
	}
	hooks.Wait()
	if !ran {
		return grace
	}
	return max(grace-time.Since(began), leastGrace)
}

// preStopDue reports whether the preStop hook must run in the current run of the named container, and records that it runs.
func (h *Health) preStopDue(rec *vm.Record, name string) bool {
	r, runs := runOf(rec, name)
	h.mu.Lock()
	defer h.mu.Unlock()
	if !runs || h.preStopped[name].is(r) {
		return false
	}
	h.preStopped[name] = r
	return true
}
