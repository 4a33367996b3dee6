package podhealth

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file monitors the containers of a pod. Each run of each container has a monitor of its own.

// The pauses before a request to the guest is repeated.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// run is one run of a container. A container that is alone in its VM starts and ends with the VM. In a VM with several
// containers, the guest counts the runs of each.
type run struct {
	vm     time.Time // start of the VM's run
	number int       // from 1; 0: the container is alone in its VM
}

func (r run) is(other run) bool { return r.number == other.number && r.vm.Equal(other.vm) }

// runOf returns the current run of the named container, or false if the container does not run. It does not check whether the
// guest is up.
func runOf(rec *vm.Record, name string) (run, bool) {
	if len(rec.Containers) == 0 {
		return run{vm: rec.StartedAt}, true
	}
	c := rec.Container(name)
	if c == nil || c.Status.State != vm.ContainerRunning {
		return run{}, false
	}
	return run{vm: rec.StartedAt, number: c.Status.Run()}, true
}

// beganOf returns when the current run of the named container began.
func beganOf(rec *vm.Record, name string) time.Time {
	if c := rec.Container(name); c != nil {
		return c.Status.StartedAt
	}
	return rec.StartedAt
}

func hasPostStart(c *corev1.Container) bool {
	return c.Lifecycle != nil && c.Lifecycle.PostStart != nil
}

// backgroundTasks are probes and hooks that run until stop is called.
type backgroundTasks struct {
	held  sync.Mutex
	over  bool
	tasks []*probing.Task
	hooks []context.CancelFunc
}

// add registers t, so that stop stops it. hook does the same for a running hook.
func (d *backgroundTasks) add(t *probing.Task) {
	d.held.Lock()
	defer d.held.Unlock()
	d.tasks = append(d.tasks, t)
	if d.over {
		t.Stop()
	}
}

func (d *backgroundTasks) hook(cancel context.CancelFunc) {
	d.held.Lock()
	defer d.held.Unlock()
	d.hooks = append(d.hooks, cancel)
	if d.over {
		cancel()
	}
}

func (d *backgroundTasks) stop() {
	d.held.Lock()
	defer d.held.Unlock()
	d.over = true
	for _, t := range d.tasks {
		t.Stop()
	}
	for _, cancel := range d.hooks {
		cancel()
	}
}

// containerMonitor monitors one run of one container.
type containerMonitor struct {
	backgroundTasks
	container *corev1.Container
	run       run
	restarts  bool         // the container is restarted after a kill
	kill      *StopRequest // the request to kill this run; guarded by the Health's mu
	released  bool         // the guest was told to start the containers that wait for this one; used only by Watch
}

// holds reports whether other containers may wait for this one to start.
func (x *containerMonitor) holds() bool {
	return x.container.StartupProbe != nil || hasPostStart(x.container)
}

// watchContainers makes v monitor the current run of each container: first the postStart hook, once per run, then the startup
// probe, then the other probes. If an earlier process monitored the run, or the run was hibernated, only changes are reported.
// The containers of a trusted guest count as ready until a probe fails.
func (h *Health) watchContainers(v *guestMonitor, pod *corev1.Pod, rec *vm.Record, trusted bool) {
	if rec == nil {
		return
	}
	for _, c := range convert.Observed(pod) {
		now, runs := runOf(rec, c.Name)
		h.mu.Lock()
		old := v.watches[c.Name]
		if old != nil && runs && old.run.is(now) {
			h.mu.Unlock()
			continue
		}
		delete(v.watches, c.Name)
		before, known := h.containers[c.Name]
		known = known && before.run.is(now) && !before.Starting
		x := &containerMonitor{container: c, run: now, restarts: convert.Restarts(pod, c, vm.LostExitCode, true)}
		s := fresh(c, now)
		began := time.Now()
		if known {
			began = beganOf(rec, c.Name)
			s.Starting, s.Started, s.Ready = false, s.Started || before.Started, s.Ready || trusted && before.Ready
		}
		if runs {
			v.watches[c.Name], h.containers[c.Name] = x, s
		}
		h.mu.Unlock()
		if old != nil {
			old.stop()
		}
		switch {
		case !runs:
		case s.Starting:
			x.hook(h.owner.Spawn(func(ctx context.Context) { h.postStart(ctx, v, x) }))
		default:
			h.watchContainer(v, x, began)
		}
	}
	h.killRequested(v, pod, rec)
	h.releaseEach(v, rec)
}

// releaseEach tells the guest to start the containers that wait for a container which has started by now. The agent of the
// guest cannot decide that, because it knows neither probes nor hooks.
func (h *Health) releaseEach(v *guestMonitor, rec *vm.Record) {
	for i, r := range rec.Containers {
		x, s := v.watches[r.Name], h.of(r.Name)
		waiting := slices.ContainsFunc(rec.Containers[i+1:], func(c vm.ContainerRecord) bool { return c.Status.StartedAt.IsZero() })
		if x == nil || x.released || !x.holds() || s.Starting || !s.Started || !waiting {
			continue
		}
		x.released = true
		v.hook(h.owner.Spawn(func(ctx context.Context) {
			retry(ctx, func(ctx context.Context) (bool, error) {
				err := h.owner.Release(ctx, string(rec.ID), r.Name)
				if err == nil || errdefs.Is(err, errdefs.Unsupported) || ctx.Err() != nil { // an older agent does not let containers wait
					return true, err
				}
				h.owner.Log.Warn("next containers not started", "vm", rec.ID, "op", r.Name, "err", err)
				return false, nil
			})
		}))
	}
}

// fresh returns the health of a container at the beginning of a run.
func fresh(c *corev1.Container, r run) runHealth {
	return runHealth{r, podstatus.Health{Starting: hasPostStart(c), Started: c.StartupProbe == nil, Ready: c.ReadinessProbe == nil}}
}

// retry calls try, with growing pauses, until try returns true or ctx ends.
func retry(ctx context.Context, try func(context.Context) (bool, error)) {
	pauses := wait.Backoff{Duration: retryFirst, Factor: 2, Steps: math.MaxInt, Cap: retryMost}
	_ = pauses.DelayFunc().Until(ctx, true, true, try)
}
