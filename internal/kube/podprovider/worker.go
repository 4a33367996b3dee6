package podprovider

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// worker owns one pod: one goroutine, one step at a time. Each step observes what is known, decides what to do, and does
// it. Other goroutines only leave requests (update, apply, requestRemoval) and wake it. A removal also interrupts the
// worker's current call.
//
// All but subject, shared and helpers is used only by the worker's goroutine.
type worker struct {
	tenant // access to VMs on behalf of the pod
	subject
	shared
	bringUp
	restarts
	hibernation
	announced
	helpers

	writer     *writer
	wake       chan struct{}
	freed      chan struct{}                                  // closed when the VM is gone for good
	background func(func(context.Context)) context.CancelFunc // runs what may outlast a step, but not the worker's life

	verdict *podstatus.Verdict
	pause   podstatus.Pause
	tries   wait.Backoff // after failed attempts at what is tried now
}

// helpers do parts of a worker's work. Each has a lock of its own, which comes after mu.
type helpers struct {
	volumes *podvolumes.Volumes
	health  *podhealth.Health
}

// subject is what a worker is about. It never changes.
type subject struct {
	log    *slog.Logger
	key    string
	uid    types.UID
	vmName string
	static bool // the pod stands for a machine that the node does not run; rec is always nil
}

// shared is what a worker shares with other goroutines. mu guards all of it, except that the worker's goroutine reads
// what only it writes: images and lifecycle.
type shared struct {
	mu        sync.Mutex
	pod       *corev1.Pod           // as the API server has it, without the status
	status    corev1.PodStatus      // as we see it
	gates     []corev1.PodCondition // conditions as others set them
	rec       *vm.Record            // our VM as last reported; nil: none (yet)
	heard     map[vm.ID]vm.Event    // events of VMs with our label, before we know which VM is ours
	lost      bool                  // the engine reports that our VM is gone
	removal   *removal              // the requested removal; nil: none
	interrupt context.CancelFunc    // cancels the worker's current call
	images    map[string]pulled     // by the name that the pod asks for
	forking
	lifecycle
}

// forking is what is done so that the VM can be forked on other nodes.
type forking struct {
	offering retryTask
	offers   vm.ID // the VM whose fork state is in the registry, or is being pushed
}

// lifecycle is the state of the VM that its annotations show.
type lifecycle struct {
	life contract.Lifecycle
	tidy bool // no hibernated state is left in the registry
}

// bringUp is the way to a VM.
type bringUp struct {
	prior    *worker          // the worker that had the VM name before; nil: none
	claimed  bool             // this node has claimed the VM's state
	trusted  bool             // an earlier process saw the guest ready at its last check
	launched time.Time        // when this process requested the VM; zero when adopted
	mode     string           // how this process created the VM
	lacking  []convert.Absent // missing references that were already reported
	fetched  map[string]bool  // images that are ready for the VM that is being created
	pulls    backoff
}

// restarts is what follows the end of a run.
type restarts struct {
	killed     time.Time // start of the run that we ended and that another run follows
	restarted  time.Time // when a managed VM was last restarted
	unanswered time.Time // since when the engine does not answer the restart of a managed VM
	last       *corev1.ContainerStateTerminated
	again      bool
	backoff    wait.Backoff // before the next start
	due        time.Time    // of the next start
	dueFor     time.Time    // the stop that due belongs to
}

// hibernation is what is known of the VM's saved states.
type hibernation struct {
	states   *podsnapshots.States // has its own lock; nil: the node keeps no snapshots
	restored bool                 // this process resumed the VM from elsewhere
	kept     string               // hibernation snapshot that is known to be stored where it should be
	saved    vm.ID                // the VM that was saved before its removal
	dozing   retryTask
	waking   retryTask
	tidying  retryTask
	saving   retryTask
}

// announced is what was reported already.
type announced struct {
	begun    bool      // a status
	told     time.Time // start of a run
	diskTold string    // disk fault
	hinted   string    // hint for a clone
}

// removal says how to remove the pod. An unconfirmed removal is first checked with the API server.
type removal struct {
	grace     time.Duration
	confirmed bool
}

// bare returns pod without its status, because the worker keeps its own. Pods that were handed over do not change any
// more.
func bare(pod *corev1.Pod) *corev1.Pod {
	own := *pod
	own.Status = corev1.PodStatus{}
	return &own
}

func newWorker(p *Provider, pod *corev1.Pod, rec *vm.Record) *worker {
	key := pod.Namespace + "/" + pod.Name
	log := p.Log.With("pod", key)
	w := &worker{
		tenant:  p.on(ownerOf(pod)),
		subject: subject{log: log, key: key, uid: pod.UID, vmName: nameOf(pod, rec), static: rec == nil && convert.Static(pod)},
		shared: shared{
			pod: bare(pod), status: pod.Status, gates: pod.Status.Conditions, rec: rec,
			heard: map[vm.ID]vm.Event{}, images: map[string]pulled{},
		},
		bringUp: bringUp{mode: modeRun, fetched: map[string]bool{}},
		wake:    make(chan struct{}, 1), freed: make(chan struct{}),
		writer: newWriter(p.Client.CoreV1().Pods(pod.Namespace), pod, p.pace, log),
	}
	w.volumes, w.health, w.states = w.newVolumes(), w.newHealth(), w.newStates()
	w.life, _ = contract.ParseLifecycle(pod.Annotations)
	w.resume()
	return w
}

// nameOf returns the name of pod's VM: the name in rec, if rec exists. A VM that an earlier release created keeps its own
// name.
func nameOf(pod *corev1.Pod, rec *vm.Record) string {
	if rec != nil {
		return rec.Spec.Name
	}
	return convert.VMName(pod)
}

// vmKey returns the VM's name in the form that is unique on the node.
func (w *worker) vmKey() string { return w.owner.Qualify(w.vmName) }

// resume restores from the pod's status what an earlier process knew.
func (w *worker) resume() {
	if len(w.status.ContainerStatuses) > 0 {
		w.last = w.status.ContainerStatuses[0].LastTerminationState.Terminated.DeepCopy()
		w.begun = true
		w.trusted = slices.ContainsFunc(w.status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Ready })
	}
	if w.rec != nil {
		w.health.Resume(&w.status, w.rec)
		w.told = w.rec.StartedAt
		if c := w.status.ContainerStatuses; len(c) > 0 && c[0].ContainerID == contract.ContainerIDScheme+string(w.rec.ID) {
			w.images[convert.Image(w.pod)] = pulled{name: c[0].Image, id: w.rec.ImageDigest, ref: c[0].ImageID}
		}
	}
	if w.status.Phase == corev1.PodFailed && w.status.Reason != "" {
		w.verdict = &podstatus.Verdict{Reason: w.status.Reason, Message: w.status.Message}
	}
}

// run works until the VM is gone for good or ctx (the node's life) ends.
func (w *worker) run(ctx context.Context) {
	defer close(w.freed)
	defer w.health.Stop()
	defer w.stopKeeper()
	w.background = func(f func(context.Context)) context.CancelFunc {
		ctx, cancel := context.WithCancel(ctx)
		w.p.wg.Go(func() {
			defer cancel()
			f(ctx)
		})
		return cancel
	}
	for ctx.Err() == nil {
		op, cancel := context.WithCancel(ctx)
		s, r := w.observe(cancel)
		what, next := decide(s)
		if what == actRemove {
			var gone bool
			if next, gone = w.tearDown(op, *r); gone {
				cancel()
				w.p.drop(w)
				w.p.wg.Go(func() { w.depart(ctx) })
				return
			}
		} else {
			next = w.act(op, what, s, next)
		}
		cancel()
		next.wait(ctx, w.wake)
	}
}

// observe begins a step that cancel interrupts. It returns what is known, and the requested removal, if any.
func (w *worker) observe(cancel context.CancelFunc) (sight, *removal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.interrupt = cancel
	s := sight{
		pod: w.pod, rec: w.rec, lost: w.lost, leaving: w.removal != nil, judged: w.verdict != nil, static: w.static,
		ended: w.status.Phase == corev1.PodSucceeded || w.status.Phase == corev1.PodFailed,
		node:  abilities{snapshots: w.states != nil, remote: w.p.remote()},
		left:  w.late(), answers: w.health.Reach().Ready, killed: w.killed,
		waits: waits{hibernate: w.dozing.left(), wake: w.waking.left(), start: time.Until(w.due)},
	}
	if w.rec != nil {
		s.kill = w.health.StopRequested(w.rec) != nil
		s.stored = w.kept != "" && w.kept == w.rec.Snapshot
		s.waits.scheduled = w.dueFor.Equal(w.rec.StoppedAt) && !w.due.IsZero()
	}
	return s, w.removal
}

// act does what was decided, and returns when the next step comes. next is when it comes after actions that only show or
// keep the VM.
func (w *worker) act(ctx context.Context, what action, s sight, next turn) turn {
	pod, rec := s.pod, s.rec
	switch what {
	case actRest:
		w.stopKeeper()
		return whenWoken
	case actReport:
		w.stopKeeper()
		w.publish(0)
		return whenWoken
	case actAttend:
		return w.attend(ctx, pod)
	case actForget:
		w.forget()
		return atOnce
	case actGiveUp:
		w.vanish(rec)
		return w.evict(ctx, reasonVMGone, "the VM "+rec.Spec.Name+" is gone; it was removed behind the pod's back or its host lost it")
	case actExpire:
		return w.expire(ctx, pod, rec)
	case actCreate:
		return w.inTime(w.bringUpBefore(ctx, pod))
	default: // there is a VM
	}
	w.settleRun(pod, rec)
	switch what {
	case actStart:
		next = w.start(ctx, rec)
	case actShow:
		hold := time.Duration(0)
		if rec.State == vm.StateCreating {
			hold = w.p.cfg.Settle
		}
		w.publish(hold)
	case actKeep:
		next = sooner(next, w.keepRunning(ctx, s))
	case actStopForKill:
		next = w.stopForKill(ctx, pod, rec, w.health.StopRequested(rec))
	case actHibernate:
		next = w.fallAsleep(ctx, rec)
	case actStore:
		next = w.store(ctx, rec)
	case actWake:
		next = w.wakeLocal(ctx, rec)
	case actFinish:
		w.again = false
		w.publish(0)
	case actSchedule:
		w.schedule(rec)
		next = atOnce
	case actRestart:
		next = w.restart(ctx, rec)
	case actRestartManaged:
		next = w.restartInPlace(ctx, rec)
	default:
	}
	return w.inTime(next)
}

// settleRun ends what belongs to a run that is over, and keeps the volumes of any other up to date.
func (w *worker) settleRun(pod *corev1.Pod, rec *vm.Record) {
	if rec.State == vm.StateHibernated {
		w.stopKeeper()
	} else {
		w.keepVolumes(pod, rec)
	}
	if rec.State == vm.StateHibernated || podstatus.Over(rec) {
		w.health.Stop()
		w.again = podstatus.Over(rec)
	}
}

func (w *worker) look() (pod *corev1.Pod, rec *vm.Record, lost bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod, w.rec, w.lost
}

// address returns the address of the VM. Preconditions: mu is held.
func (w *worker) address() string {
	if w.static {
		return runtimeOf(w.pod).IP
	}
	if w.rec == nil || len(w.rec.NICs) == 0 {
		return ""
	}
	if ip := w.rec.NICs[0].IP; ip != "" {
		return ip
	}
	return leaseIP(w.p.cfg.LeasesPath, w.rec.NICs[0].MAC, time.Now())
}

// publish computes the status and requests its write. hold is how long the write may wait for a newer status.
func (w *worker) publish(hold time.Duration) {
	w.mu.Lock()
	v := podstatus.View{
		Pod: w.pod, Gates: w.gates, HostIP: w.p.cfg.Node.IP, Record: w.rec, Pause: w.pause, Last: w.last, Again: w.again,
		Reach: w.health.Reach(), Verdict: w.verdict, Asleep: w.sleeping(),
		Health: w.health.Shown(w.pod, w.rec), Cut: w.removal == nil && w.verdict == nil && cut(w.rec, w.killed),
	}
	if w.rec != nil {
		v.Image, v.Images = w.images[convert.Image(w.pod)].shown(w.rec.ImageDigest), w.containerImages()
	}
	if w.static && w.verdict == nil {
		v.Record, v.IP = podstatus.Machine(w.pod), w.address()
	} else if w.rec != nil && !podstatus.Over(w.rec) {
		v.IP = w.address()
	} else if w.rec != nil || v.Asleep {
		v.IP = w.status.PodIP // a stopped VM keeps the address that it had
	}
	w.status = v.Status(w.status, time.Now())
	status := w.status
	annotations := w.annotations(v.IP)
	w.mu.Unlock()
	w.sayHint(annotations[contract.KeyPostCloneHint])
	w.sayDisk(v.Record)
	if w.begun {
		hold = 0
	}
	w.begun = w.begun || hold == 0
	w.writer.set(status, annotations, hold)
}

// snapshot returns the pod with its status, for virtual-kubelet and the kubelet API.
func (w *worker) snapshot() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	pod := w.pod.DeepCopy()
	w.status.DeepCopyInto(&pod.Status)
	return pod
}

func (w *worker) event(kind, reason, format string, args ...any) {
	w.mu.Lock()
	pod := w.pod
	w.mu.Unlock()
	w.p.Recorder.Eventf(pod, kind, reason, format, args...)
}
