package podprovider

import (
	"context"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// worker owns one pod. Its goroutine takes one step at a time. Each step observes the pod and its VM, decides on an action,
// and lets one of the parts act. Other goroutines use only the podState.
type worker struct {
	base
	asleep   *hibernation
	creation *creation
	offers   *forkOffer
	runs     *runs
	adds     *additions
	resizes  *resizes
	pauses   *pauser
	plugs    *plugger
	connects *connector
	reboots  *rebooter
	dumps    *dumper
	end      *teardown
	trusted  bool // the guest was ready at the last check of an earlier process
}

// newWorker returns the worker of s. prior is the earlier pod with the same VM name; nil: none.
func newWorker(c *common, s, prior *podState) *worker {
	b := base{newReport(c, s), c.newStates(s)}
	asleep := &hibernation{base: b}
	return &worker{
		base: b, asleep: asleep,
		creation: &creation{base: b, asleep: asleep, pulls: pulls{base: b, fetched: map[string]bool{}}, prior: prior, mode: modeRun},
		offers:   &forkOffer{base: b}, runs: &runs{base: b}, end: &teardown{base: b, retention: &retention{base: b}}, adds: newAdditions(b), resizes: &resizes{base: b}, pauses: &pauser{base: b}, plugs: &plugger{base: b}, connects: &connector{base: b}, reboots: &rebooter{base: b}, dumps: &dumper{base: b},
		trusted: slices.ContainsFunc(s.look().status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Ready }),
	}
}

// run takes steps until the VM is removed or ctx ends. ctx lasts as long as the node.
func (w *worker) run(ctx context.Context) {
	defer close(w.freed)
	defer w.health.Stop()
	defer w.volumes.Stop()
	defer w.adds.stop()
	for ctx.Err() == nil {
		op, cancel := context.WithCancel(ctx)
		s, r := w.observe(cancel)
		what, next := decide(s)
		if what == actRemove {
			var gone bool
			if next, gone = w.end.tearDown(op, *r); gone {
				cancel()
				w.index.drop(w.podState)
				w.background(w.end.deletePod)
				return
			}
		} else {
			next = w.act(op, what, s, next)
		}
		cancel()
		next.wait(ctx, w.wake)
	}
}

// observe begins a step, which cancel interrupts. It returns the input of decide, and the requested removal, if any.
func (w *worker) observe(cancel context.CancelFunc) (observation, *removal) {
	f := w.begin(cancel)
	s := observation{
		pod: f.pod, rec: f.rec, lost: f.lost, leaving: f.removal != nil, judged: w.verdict != nil, static: w.static,
		ended: f.status.Phase == corev1.PodSucceeded || f.status.Phase == corev1.PodFailed,
		node:  abilities{snapshots: w.states != nil, remote: w.remote()},
		left:  w.late(f), answers: w.health.Reach().Ready, killed: w.killed,
		waits: waits{hibernate: w.asleep.hibernating.left(), wake: w.asleep.waking.left(), start: time.Until(w.runs.due), pause: w.pauses.attempt.left()},
	}
	if f.rec == nil {
		s.clash = w.index.clash(w.podState)
	} else {
		s.kill, s.reboot = w.health.StopRequested(f.rec) != nil, w.reboots.due(f)
		s.adds, s.waits.add = w.adds.due(f)
		s.resize, s.waits.resize = w.resizes.due(f)
		s.plug, s.waits.plug = w.plugs.due(f)
		s.dump, s.waits.dump = w.dumps.due(f)
		s.connect, s.waits.connect = w.connects.due(f)
		s.stored = w.asleep.kept != "" && w.asleep.kept == f.rec.Snapshot
		s.waits.scheduled = w.runs.dueFor.Equal(f.rec.StoppedAt) && !w.runs.due.IsZero()
	}
	return s, f.removal
}

// act executes an action and returns when the next step begins. For actShow and actKeep, next is the latest time of the next
// step.
func (w *worker) act(ctx context.Context, what action, s observation, next turn) turn {
	pod, rec := s.pod, s.rec
	switch what {
	case actNone:
		w.volumes.Stop()
		return whenWoken
	case actReport:
		w.volumes.Stop()
		w.publish(0)
		return whenWoken
	case actMonitorMachine:
		return w.monitorMachine(ctx, pod)
	case actForget:
		w.forget()
		return atOnce
	case actGiveUp:
		w.vanish(rec)
		return w.runs.evict(ctx, reasonVMGone, "the VM "+rec.Spec.Name+" no longer exists; it was removed outside its pod, or its host lost it")
	case actExpire:
		return w.runs.expire(ctx, pod, rec)
	case actReject:
		return w.runs.reject(reasonPorts, "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports")
	case actCreate:
		return w.inTime(w.createBefore(ctx, pod))
	default: // the other actions need a VM
	}
	w.settleRun(pod, rec)
	switch what {
	case actStart:
		next = w.creation.start(ctx, rec)
	case actShow:
		hold := time.Duration(0)
		if rec.State == vm.StateCreating {
			hold = w.cfg.Settle
		}
		w.publish(hold)
	case actKeep:
		next = sooner(next, w.keepRunning(ctx, s))
	case actAddContainers:
		next = w.adds.add(pod, rec)
	case actResize:
		w.running(ctx, pod, rec)
		next = w.resizes.act(ctx, pod, rec)
	case actPause, actUnpause:
		w.pauses.act(ctx, rec, what == actPause)
		next = atOnce
	case actPlug:
		w.running(ctx, pod, rec)
		w.plugs.act(ctx, pod, rec)
		next = atOnce
	case actConnect:
		w.running(ctx, pod, rec)
		w.connects.act(ctx, rec)
		next = atOnce
	case actReboot:
		w.reboots.act(ctx, pod, rec)
		next = atOnce
	case actDump:
		w.dumps.act(ctx, pod, rec)
		next = atOnce
	case actStopForKill:
		next = w.runs.stopForKill(ctx, pod, rec, w.health.StopRequested(rec))
	case actHibernate:
		next = w.asleep.hibernate(ctx, rec)
	case actStore:
		next = w.asleep.store(ctx, rec)
	case actWake:
		next = w.asleep.wakeLocal(ctx, rec)
	case actFinish:
		w.again = false
		w.publish(0)
	case actSchedule:
		w.runs.schedule(rec)
		next = atOnce
	case actRestart:
		next = w.runs.restart(ctx, rec)
	case actRestartManaged:
		next = w.runs.restartInPlace(ctx, rec)
	default:
	}
	return w.inTime(next)
}

// settleRun stops the monitors of a run that has ended. It keeps the volumes up to date unless the VM is hibernated.
func (w *worker) settleRun(pod *corev1.Pod, rec *vm.Record) {
	if rec.State == vm.StateHibernated {
		w.volumes.Stop()
	} else {
		w.volumes.Keep(pod, rec, w.background)
	}
	if rec.State == vm.StateHibernated || podstatus.Over(rec) {
		w.health.Stop()
		w.again = podstatus.Over(rec)
	}
}

// keepRunning monitors a running VM. Unless the VM is told to hibernate, it also removes what an earlier hibernation left, and
// offers the VM's state to forks.
func (w *worker) keepRunning(ctx context.Context, s observation) turn {
	if contract.Hibernate(s.pod.Annotations) && w.states != nil {
		w.running(ctx, s.pod, s.rec)
		return whenWoken
	}
	w.asleep.hibernating = retryTask{}
	wait := w.creation.claimLate(ctx, s.pod)
	if podstatus.Up(s.rec) && hasIdentity(s.rec, s.answers) {
		wait = sooner(wait, sooner(w.asleep.tidyUp(ctx, s.pod, s.rec), w.offers.offer(s.pod, s.rec)))
	}
	w.running(ctx, s.pod, s.rec)
	return sooner(wait, hintAfter(s.rec))
}

// running makes sure that a running VM is monitored, and publishes its status.
func (w *worker) running(ctx context.Context, pod *corev1.Pod, rec *vm.Record) {
	w.again, w.runs.due, w.pause = false, time.Time{}, podstatus.Pause{}
	switch {
	case podstatus.Paused(rec): // it answers nothing, and is not killed for that
		w.health.Stop()
		w.publish(0)
		return
	case !podstatus.Up(rec):
		w.health.Stop()
		w.publish(w.cfg.Settle)
		return
	}
	w.creation.announce(rec)
	w.health.Watch(ctx, pod, rec, w.trusted)
	w.trusted = false
	w.publish(0)
}

// monitorMachine adopts the machine of a static pod and monitors whether it can be reached. The node does not run that
// machine. Its ID and address are in the pod's annotations. The Runtime is never called for it, even if a VM of the node has
// the same ID or name.
func (w *worker) monitorMachine(ctx context.Context, pod *corev1.Pod) turn {
	if w.health.Watching() {
		w.publish(0)
		return whenWoken
	}
	if !w.supported(pod) {
		return whenWoken
	}
	w.succeeded()
	if !w.begun {
		there := runtimeOf(pod)
		w.event(corev1.EventTypeNormal, eventAdopted, "Adopted the machine %s at %s; this node neither starts nor stops it", there.ID, there.IP)
		w.Metrics.done("create", nil)
	}
	w.health.Watch(ctx, pod, nil, w.trusted)
	w.publish(0)
	return whenWoken
}

// inTime returns wait, or the time until the pod's active deadline if that is sooner.
func (w *worker) inTime(wait turn) turn {
	if left := w.late(w.look()); left < math.MaxInt64 {
		return sooner(wait, after(left))
	}
	return wait
}

// createBefore creates the VM. It gives up at the pod's active deadline, which counts from the pod's start time.
func (w *worker) createBefore(ctx context.Context, pod *corev1.Pod) turn {
	if pod.Spec.ActiveDeadlineSeconds == nil {
		return w.creation.createAndStart(ctx, pod)
	}
	w.publish(w.cfg.Settle) // the status records the start time
	limited, cancel := context.WithTimeout(ctx, w.late(w.look()))
	defer cancel()
	return w.creation.createAndStart(limited, pod)
}
