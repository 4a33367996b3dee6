package podprovider

import (
	"context"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file watches the containers of a pod. Each container and each of its runs is watched separately.

// run is one run of a container. For a container that is the VM it is the VM's run, otherwise the run that the guest
// counts.
type run struct {
	vm     time.Time // start of the VM's run
	number int       // from 1; 0: the container is the VM
}

func (r run) is(other run) bool { return r.number == other.number && r.vm.Equal(other.vm) }

// runOf returns the current run of the named container; false when it does not run. It does not check whether the guest is
// up.
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

// beganOf returns when that run began.
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
	tasks []*probe.Task
	hooks []context.CancelFunc
}

// add registers t, so that stop ends it. hook does the same for a running hook.
func (d *backgroundTasks) add(t *probe.Task) {
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
	container   *corev1.Container
	run         run
	killRequest *killRequest // the request to kill this run; under the worker's mu
	released    bool         // the guest was told that the container has started; used only by the worker's goroutine
}

// holds reports whether other containers may wait for this one to start.
func (x *containerMonitor) holds() bool {
	return x.container.StartupProbe != nil || hasPostStart(x.container)
}

// monitorContainers makes v watch what runs now: first the postStart hook of a container, once per run, then its startup
// probe, then the other probes. If an earlier process watched the run, or the run was hibernated, only changes are
// reported. The containers of a trusted guest count as ready until they fail.
func (w *worker) monitorContainers(v *guestMonitor, pod *corev1.Pod, rec *vm.Record, trusted bool) {
	for _, c := range convert.Observed(pod) {
		now, runs := runOf(rec, c.Name)
		w.mu.Lock()
		old := v.watches[c.Name]
		if old != nil && runs && old.run.is(now) {
			w.mu.Unlock()
			continue
		}
		delete(v.watches, c.Name)
		before, known := w.health[c.Name]
		known = known && before.run.is(now) && !before.Starting
		x := &containerMonitor{container: c, run: now}
		h := fresh(c, now)
		began := time.Now()
		if known {
			began = beganOf(rec, c.Name)
			h.Starting, h.Started, h.Ready = false, h.Started || before.Started, h.Ready || trusted && before.Ready
		}
		if runs {
			v.watches[c.Name], w.health[c.Name] = x, h
		}
		w.mu.Unlock()
		if old != nil {
			old.stop()
		}
		switch {
		case !runs:
		case h.Starting:
			x.hook(w.background(func(ctx context.Context) { w.postStart(ctx, v, x) }))
		default:
			w.watchContainer(v, x, began)
		}
	}
	w.killRequested(v, pod, rec)
	w.releaseEach(v, rec)
}

// releaseEach tells the guest to start the containers that wait for a container which has started by now. The guest's
// agent knows neither probes nor hooks.
func (w *worker) releaseEach(v *guestMonitor, rec *vm.Record) {
	for i, r := range rec.Containers {
		x, h := v.watches[r.Name], w.healthOf(r.Name)
		waiting := slices.ContainsFunc(rec.Containers[i+1:], func(c vm.ContainerRecord) bool { return c.Status.StartedAt.IsZero() })
		if x == nil || x.released || !x.holds() || h.Starting || !h.Started || !waiting {
			continue
		}
		x.released = true
		v.hook(w.background(func(ctx context.Context) {
			_ = growing(time.Second, 30*time.Second, 0).DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
				err := w.containers.ReleaseContainer(ctx, string(rec.ID), r.Name)
				if err == nil || errdefs.Is(err, errdefs.Unsupported) || ctx.Err() != nil { // with an older agent no container waits
					return true, err
				}
				w.log.Warn("containers after one that has started not released", "vm", rec.ID, "op", r.Name, "err", err)
				return false, nil
			})
		}))
	}
}

// fresh returns the health of a container in a run of which nothing is known.
func fresh(c *corev1.Container, r run) health {
	return health{r, podstatus.Health{Starting: hasPostStart(c), Started: c.StartupProbe == nil, Ready: c.ReadinessProbe == nil}}
}

// keepHealth records that the containers of rec's guest keep running, although in a new VM.
func (w *worker) keepHealth(pod *corev1.Pod, rec *vm.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range convert.Observed(pod) {
		if r, runs := runOf(rec, c.Name); runs {
			w.health[c.Name] = health{r, podstatus.Health{Started: true}}
		}
	}
}

// on reports whether x is a current monitor. Preconditions: mu is held.
func (w *worker) on(x *containerMonitor) bool {
	return w.guestMonitor != nil && w.guestMonitor.watches[x.container.Name] == x
}

// shownHealth returns the health that the status shows. Nothing is known of a run that is not watched yet. Preconditions:
// mu is held.
func (w *worker) shownHealth() map[string]podstatus.Health {
	all := map[string]podstatus.Health{}
	if w.rec == nil {
		return all
	}
	for _, c := range convert.Observed(w.pod) {
		now, runs := runOf(w.rec, c.Name)
		h, known := w.health[c.Name]
		if runs && (!known || !h.run.is(now)) {
			h = fresh(c, now)
		}
		all[c.Name] = h.Health
	}
	return all
}

// resumeHealth restores from the pod's status what an earlier process knew of the containers in rec's run.
func (w *worker) resumeHealth(rec *vm.Record) {
	for _, c := range slices.Concat(w.status.InitContainerStatuses, w.status.ContainerStatuses) {
		running := c.State.Running != nil && c.State.Running.StartedAt.Equal(new(podstatus.Stamp(beganOf(rec, c.Name))))
		asleep := c.State.Waiting != nil && c.State.Waiting.Reason == podstatus.ReasonHibernated
		if c.ContainerID != podstatus.ContainerID(rec, c.Name) || !running && !asleep {
			continue
		}
		if r, runs := runOf(rec, c.Name); runs {
			w.health[c.Name] = health{r, podstatus.Health{Started: asleep || c.Started == nil || *c.Started, Ready: c.Ready}}
		}
	}
}
