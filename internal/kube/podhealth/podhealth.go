// Package podhealth monitors the health of a pod's guest and of its containers, and runs the containers' hooks.
//
// It probes the guest's address and, as the pod's spec requires, the containers. It runs the postStart and preStop hooks. It
// tells the guest when a container has started, and kills a container whose probe or postStart hook fails. The package does
// not run single probes (package probe does) and does not compute statuses (package podstatus does). It neither starts nor
// stops VMs. It only reports that a VM must be stopped. It knows a pod only through its Owner.
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
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/vm"
)

// Prober checks whether a guest can be reached.
type Prober interface {
	// Probe returns nil if ip accepts a TCP connection on port, or, if port is 0, answers an ICMP echo.
	Probe(ctx context.Context, ip string, port int) error
}

// Config says how the guest of a pod is probed.
type Config struct {
	Prober    Prober
	Scheduler *probing.Scheduler
	// Static means that the pod represents a machine that the node does not run. The creator of such a pod chooses the
	// address, so the node does not probe addresses that pods must not reach.
	Static bool
	// Measured records, for a metric, the duration of each probe of the guest's address.
	Measured func(time.Duration)
	// Count counts, for a metric, the result of each probe of the pod's spec. kind is Startup, Liveness or Readiness.
	Count func(kind string, result probing.Result)
}

// Spawn starts work in a goroutine. The function that it returns cancels the work's context.
type Spawn func(work func(context.Context)) context.CancelFunc

// Owner holds the functions that Health needs from the part that runs the pod's VM. Health calls them without holding a lock,
// so they may take the owner's locks.
type Owner struct {
	// Look returns the current pod, its VM (nil: none) and the VM's address ("": not known).
	Look func() (pod *corev1.Pod, rec *vm.Record, ip string)
	// Exec runs a command in the guest of a VM.
	Exec func(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error)
	// Ping asks the agent in the guest of a VM that boots itself. It returns an error if no agent answers.
	Ping func(ctx context.Context, ref string) error
	// Kill ends one run of one container in a guest that has several; see guest.ContainerKeeper.
	Kill func(ctx context.Context, ref, container string, run int, grace time.Duration) error
	// Release tells the guest to start the containers that wait for this one.
	Release func(ctx context.Context, ref, container string) error
	// Poke makes the owner update the pod's status and handle a StopRequest.
	Poke func()
	// Event reports an Event of the pod.
	Event func(kind, reason, format string, args ...any)
	// Spawn runs work that lasts at most as long as the owner.
	Spawn Spawn
	Log   *slog.Logger
}

// Health monitors the health of one pod's guest and of its containers. Only one goroutine may call Watch and Stop. Any
// goroutine may call the other methods.
//
// Lock order: the owner's locks come before mu. Health calls no function of the Owner while it holds mu. The owner may hold
// its locks when it calls Watching, Reach, Shown and StopRequested, which call no function of the Owner. It must hold no lock
// when it calls the other methods.
type Health struct {
	cfg   Config
	owner Owner

	mu         sync.Mutex
	reach      podstatus.Reach
	monitor    *guestMonitor        // monitors the current run; nil: no monitor
	containers map[string]runHealth // by name
	preStopped map[string]run       // by container name: the run whose preStop hook has run
	stop       *StopRequest         // the request to stop the VM; nil: none
}

// runHealth is the health of a container in one run.
type runHealth struct {
	run run
	podstatus.Health
}

// New returns the Health of a pod. It monitors nothing before Watch.
func New(cfg Config, owner Owner) *Health {
	return &Health{cfg: cfg, owner: owner, containers: map[string]runHealth{}, preStopped: map[string]run{}}
}

// Watch monitors the current run of rec, the VM of pod, and of its containers, until Stop. When a run begins, it waits a
// moment for the first probes, so that a guest that answers immediately becomes Running and Ready in one status write. trusted
// means that an earlier process saw the guest ready. The guest and its containers then count as ready until a probe fails. rec
// is nil for a static pod, of which only the address is probed.
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

// Stop ends the monitors that Watch started. The guest then counts as not ready.
func (h *Health) Stop() {
	h.mu.Lock()
	v := h.monitor
	h.monitor, h.reach = nil, podstatus.Reach{}
	h.mu.Unlock()
	if v == nil {
		return
	}
	v.stop()
	for _, x := range v.watches { // no lock: v is not shared any more
		x.stop()
	}
}

// Watching reports whether the guest is monitored.
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

// Shown returns the health of pod's containers for the status. A run without a monitor has the health of a new run. rec is the
// VM of pod; nil: none.
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

// Keep records that the containers of rec's guest, which resumed in a new VM, have kept running.
func (h *Health) Keep(pod *corev1.Pod, rec *vm.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range convert.Observed(pod) {
		if r, runs := runOf(rec, c.Name); runs {
			h.containers[c.Name] = runHealth{r, podstatus.Health{Started: true}}
		}
	}
}

// Resume restores from the pod's status the health that an earlier process recorded of the containers in rec's run.
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

// update reports whether x is a current monitor. If so, it calls change with the health of x's container, with mu held. If
// change returns true, it pokes the owner.
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

// on reports whether x is a current monitor. Precondition: mu is held.
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
