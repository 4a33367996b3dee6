// Package podhealth finds out how healthy the guest of a pod and its containers are, and runs the containers' hooks.
//
// It probes the guest's address and the containers as the pod's spec asks, runs the postStart and preStop hooks, tells the
// guest when a container has started, and kills a container that a probe or hook condemns. The package does not make single
// probes (package probe does) and does not compute statuses (package podstatus does). It neither starts nor stops VMs: it
// only says that a VM must be stopped. It knows pods only through their Owner.
package podhealth

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// Prober checks whether a guest can be reached.
type Prober interface {
	// Probe returns nil when ip answers: to a TCP connection on port, or, when port is 0, to an ICMP echo.
	Probe(ctx context.Context, ip string, port int) error
}

// Config says how the guest of a pod is probed.
type Config struct {
	Prober    Prober
	Scheduler *probe.Scheduler
	// Static means that the pod represents a machine that the node does not run. The creator of such a pod chose the
	// address, so addresses that pods must not reach are not probed.
	Static bool
	// Measured gets the time that each check of the guest's address took.
	Measured func(time.Duration)
	// Count gets the result of each probe of the pod's spec. kind is Startup, Liveness or Readiness.
	Count func(kind string, result probe.Result)
}

// Spawn starts work in a goroutine. The function that it returns cancels the work's context.
type Spawn func(work func(context.Context)) context.CancelFunc

// Owner is what Health needs from the one that runs the pod's VM. The functions are called without a lock held, so they may
// take the owner's locks.
type Owner struct {
	// Look returns the pod, its VM and the VM's address as they are now: nil for no VM, "" for no known address.
	Look func() (pod *corev1.Pod, rec *vm.Record, ip string)
	// Exec runs a command in the guest of a VM.
	Exec func(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error)
	// Kill ends one run of one container in a guest that has several; see guest.ContainerKeeper.
	Kill func(ctx context.Context, ref, container string, run int, grace time.Duration) error
	// Release allows the containers that wait for this one to start.
	Release func(ctx context.Context, ref, container string) error
	// Poke tells that there is something new to show or to do.
	Poke func()
	// Event reports an Event of the pod.
	Event func(kind, reason, format string, args ...any)
	// Spawn runs what may last as long as the owner.
	Spawn Spawn
	Log   *slog.Logger
}

// Health is the health of one pod's guest and of its containers. Only one goroutine calls Watch and Stop. Any goroutine may
// call the other methods.
//
// Lock order: the owner's locks come before mu. No function of the Owner is called while mu is held. The owner may hold its
// locks when it calls Watching, Reach, Shown and StopRequested, which call no function of the Owner. It holds none when it
// calls the other methods.
type Health struct {
	cfg   Config
	owner Owner

	mu         sync.Mutex
	reach      podstatus.Reach
	monitor    *guestMonitor        // monitors the current run; nil: no monitor
	containers map[string]runHealth // by name
	bowed      map[string]run       // container runs whose preStop hook has run, by container name
	stop       *StopRequest         // the request for which the VM must be stopped; nil: none
}

// runHealth is the health of one container in one run of it.
type runHealth struct {
	run run
	podstatus.Health
}

// New returns the health of a pod of which nothing is known.
func New(cfg Config, owner Owner) *Health {
	return &Health{cfg: cfg, owner: owner, containers: map[string]runHealth{}, bowed: map[string]run{}}
}

// Watch makes sure that what now runs in rec, the VM of pod, is watched until Stop. When a run begins, it waits a moment
// for the first probes, so that a guest that answers at once becomes Running and Ready in one status write. trusted means
// that an earlier process saw the guest ready: then it and its containers count as ready until they fail. rec is nil for a
// static pod, of which only the address is watched.
func (h *Health) Watch(ctx context.Context, pod *corev1.Pod, rec *vm.Record, trusted bool) {
	var began time.Time
	if rec != nil {
		began = rec.StartedAt
	}
	h.mu.Lock()
	v := h.monitor
	h.mu.Unlock()
	if v != nil && v.run.Equal(began) {
		h.watchContainers(v, pod, rec, false)
		return
	}
	h.Stop()
	v = newGuestMonitor(began)
	h.mu.Lock()
	h.monitor, h.reach.Ready = v, trusted
	h.mu.Unlock()
	v.expect()
	h.watchContainers(v, pod, rec, trusted)
	v.add(h.cfg.Scheduler.Start(0, h.check(v, trusted)))
	v.await(ctx)
}

// Stop ends what Watch began, and with it the readiness, which only a monitor can determine.
func (h *Health) Stop() {
	h.mu.Lock()
	v := h.monitor
	h.monitor, h.reach = nil, podstatus.Reach{}
	h.mu.Unlock()
	if v == nil {
		return
	}
	v.stop()
	for _, x := range v.watches { // nobody else uses them any more
		x.stop()
	}
}

// Watching reports whether the guest is watched.
func (h *Health) Watching() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.monitor != nil
}

// Reach returns whether the guest can be reached.
func (h *Health) Reach() podstatus.Reach {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reach
}

// Shown returns the health of pod's containers that the status shows. Nothing is known of a run that is not watched yet.
// rec is the VM of pod; nil: none.
func (h *Health) Shown(pod *corev1.Pod, rec *vm.Record) map[string]podstatus.Health {
	all := map[string]podstatus.Health{}
	if rec == nil {
		return all
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range convert.Observed(pod) {
		now, runs := runOf(rec, c.Name)
		s, known := h.containers[c.Name]
		if runs && (!known || !s.run.is(now)) {
			s = fresh(c, now)
		}
		all[c.Name] = s.Health
	}
	return all
}

// Keep records that the containers of rec's guest keep running, although in a new VM.
func (h *Health) Keep(pod *corev1.Pod, rec *vm.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range convert.Observed(pod) {
		if r, runs := runOf(rec, c.Name); runs {
			h.containers[c.Name] = runHealth{r, podstatus.Health{Started: true}}
		}
	}
}

// Resume restores from the pod's status what an earlier process knew of the containers in rec's run.
func (h *Health) Resume(status *corev1.PodStatus, rec *vm.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range slices.Concat(status.InitContainerStatuses, status.ContainerStatuses) {
		running := c.State.Running != nil && c.State.Running.StartedAt.Equal(new(podstatus.Stamp(beganOf(rec, c.Name))))
		asleep := c.State.Waiting != nil && c.State.Waiting.Reason == podstatus.ReasonHibernated
		if c.ContainerID != podstatus.ContainerID(rec, c.Name) || !running && !asleep {
			continue
		}
		if r, runs := runOf(rec, c.Name); runs {
			h.containers[c.Name] = runHealth{r, podstatus.Health{Started: asleep || c.Started == nil || *c.Started, Ready: c.Ready}}
		}
	}
}

// update changes the health of x's container, unless x is not a current monitor, and pokes the owner if change returns true.
// It reports whether x is a current monitor. change runs with mu held.
func (h *Health) update(x *containerMonitor, change func(*podstatus.Health) (news bool)) bool {
	name := x.container.Name
	h.mu.Lock()
	on, news := h.on(x), false
	if on {
		s := h.containers[name]
		news = change(&s.Health)
		h.containers[name] = s
	}
	h.mu.Unlock()
	if news {
		h.owner.Poke()
	}
	return on
}

// on reports whether x is a current monitor. Preconditions: mu is held.
func (h *Health) on(x *containerMonitor) bool {
	return h.monitor != nil && h.monitor.watches[x.container.Name] == x
}

// of returns the health of the named container.
func (h *Health) of(name string) podstatus.Health {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s, ok := h.containers[name]; ok {
		return s.Health
	}
	return podstatus.Well
}
