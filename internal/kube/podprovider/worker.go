package podprovider

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// worker owns one pod: one goroutine, one step at a time. Other goroutines only leave requests (update, apply,
// requestRemoval) and wake it. A removal also interrupts the worker's current call.
type worker struct {
	tenant // access to VMs and snapshots on behalf of the pod
	log    *slog.Logger
	key    string
	uid    types.UID
	vmName string
	static bool    // the pod stands for a machine that the node does not run; rec is always nil
	prior  *worker // the worker that had the VM name before; nil: none
	writer *writer
	tokens *tokens
	wake   chan struct{}
	freed  chan struct{} // closed when the VM is gone for good

	mu           sync.Mutex
	pod          *corev1.Pod           // as the API server has it, without the status
	status       corev1.PodStatus      // as we see it
	gates        []corev1.PodCondition // conditions as others set them
	rec          *vm.Record            // our VM as last reported; nil: none (yet)
	heard        map[vm.ID]vm.Event    // events of VMs with our label, before we know which VM is ours
	lost         bool                  // the engine reports that our VM is gone
	removal      *removal              // the requested removal; nil: none
	interrupt    context.CancelFunc    // cancels the worker's current call
	keeper       *keeper               // keeps the VM's volumes up to date; set only by the worker's goroutine
	ready        bool                  // the guest can be reached
	unready      string
	guestMonitor *guestMonitor     // monitors the current run; nil: no monitor
	health       map[string]health // of the containers, by name
	bowed        map[string]run    // container runs whose preStop hook has run, by container name
	killRequest  *killRequest      // the request for which the VM must be stopped; nil: none

	// The following are used only by the worker's goroutine.
	background func(func(context.Context)) context.CancelFunc // runs what may outlast a step, but not the worker's life
	killed     time.Time                                      // start of the run that we ended and that another run follows
	restarted  time.Time                                      // when a managed VM was last restarted
	unanswered time.Time                                      // since when the engine does not answer the restart of a managed VM
	pause      pause
	last       *corev1.ContainerStateTerminated
	again      bool
	claimed    bool // this node has claimed the VM's state
	verdict    *verdict
	begun      bool              // a status was already published
	told       time.Time         // start of the run that was announced
	diskTold   string            // disk fault that was announced
	trusted    bool              // an earlier process saw the guest ready at its last check
	launched   time.Time         // when this process requested the VM; zero when adopted
	backoff    wait.Backoff      // before the next start
	tries      wait.Backoff      // after failed attempts to bring the VM up
	lacking    []convert.Absent  // missing references that were already reported
	fresh      map[string]sum    // checksums of the volumes of a VM that was just created
	images     map[string]pulled // by the name that the pod asks for; written with mu held
	fetched    map[string]bool   // images that are ready for the VM that is being created
	pulls      backoff
	due        time.Time // of the next start
	dueFor     time.Time // the stop that due belongs to
	mode       string    // how this process created the VM

	// The following concern snapshots. What annotations show is read with mu held; all others are used only by the
	// worker's goroutine.
	life     contract.Lifecycle
	tidy     bool   // no hibernated state is left in the registry
	restored bool   // this process resumed the VM from elsewhere
	kept     string // hibernation snapshot that is known to be stored where it should be
	saved    vm.ID  // the VM that was saved before its removal
	hinted   string // the hint that was reported
	dozing   retryTask
	waking   retryTask
	tidying  retryTask
	saving   retryTask
	stale    string            // digest of a fork state that does not belong to the VM to be forked
	slept    string            // registry digest of the local snapshot from which the VM woke
	foreign  snapshot.Snapshot // from an old place in the registry; not known to belong to the VM
	why      error             // why foreign is not used

	offering retryTask // offering and offers need mu held
	offers   vm.ID     // the VM whose fork state is in the registry, or is being pushed
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
		tenant: p.on(ownerOf(pod)), log: log, key: key, uid: pod.UID, vmName: nameOf(pod, rec),
		pod: bare(pod), status: pod.Status, gates: pod.Status.Conditions, rec: rec,
		health: map[string]health{}, bowed: map[string]run{},
		heard: map[vm.ID]vm.Event{}, wake: make(chan struct{}, 1), freed: make(chan struct{}),
		writer: newWriter(p.Client.CoreV1().Pods(pod.Namespace), pod, p.pace, log),
		tokens: &tokens{client: p.Client, all: map[tokenKey]token{}},
		mode:   modeRun,
		images: map[string]pulled{}, fetched: map[string]bool{},
		static: rec == nil && convert.Static(pod),
	}
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
		w.resumeHealth(w.rec)
		w.told = w.rec.StartedAt
		if c := w.status.ContainerStatuses; len(c) > 0 && c[0].ContainerID == contract.ContainerIDScheme+string(w.rec.ID) {
			w.images[convert.Image(w.pod)] = pulled{name: c[0].Image, id: w.rec.ImageDigest, ref: c[0].ImageID}
		}
	}
	if w.status.Phase == corev1.PodFailed && w.status.Reason != "" {
		w.verdict = &verdict{reason: w.status.Reason, message: w.status.Message}
	}
}

// run works until the VM is gone for good or ctx (the node's life) ends.
func (w *worker) run(ctx context.Context) {
	defer close(w.freed)
	defer w.stopMonitor()
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
		var next turn
		var gone bool
		if r := w.begin(cancel); r != nil {
			next, gone = w.tearDown(op, *r)
		} else {
			next = w.step(op)
		}
		cancel()
		if gone {
			w.p.drop(w)
			w.p.wg.Go(func() { w.depart(ctx) })
			return
		}
		next.wait(ctx, w.wake)
	}
}

// begin starts a step that cancel interrupts. It returns the requested removal, if any.
func (w *worker) begin(cancel context.CancelFunc) *removal {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.interrupt = cancel
	return w.removal
}

// step does the next thing for the pod, and returns when the step after it comes.
func (w *worker) step(ctx context.Context) turn {
	pod, rec, lost := w.look()
	switch {
	case w.ended():
		w.stopKeeper()
		return whenWoken
	case w.verdict != nil:
		w.stopKeeper()
		w.publish(0)
		return whenWoken
	case w.static:
		return w.attend(ctx, pod)
	case lost && (rec.StartedAt.IsZero() || rec.State == vm.StateHibernated && w.p.remote()):
		w.forget()
		return atOnce
	case lost:
		w.vanish(rec)
		return w.evict(ctx, reasonVMGone, "the VM "+rec.Spec.Name+" is gone; it was removed behind the pod's back or its host lost it")
	case w.late(pod) <= 0:
		return w.expire(ctx, pod, rec)
	case rec == nil:
		return w.inTime(pod, w.bringUpBefore(ctx, pod))
	}
	if rec.State != vm.StateHibernated {
		w.keepVolumes(pod, rec)
	}
	var wait turn
	switch rec.State {
	case vm.StateRunning:
		if s := w.requestedStop(rec); s != nil {
			wait = w.stopForKill(ctx, pod, rec, s)
		} else {
			wait = w.awake(ctx, pod, rec)
		}
	case vm.StateHibernated:
		wait = w.asleep(ctx, pod, rec)
	case vm.StateCreated:
		wait = w.start(ctx, rec)
	case vm.StateStopped, vm.StateError:
		wait = w.stopped(ctx, pod, rec)
	case vm.StateCreating:
		w.publish(w.p.cfg.Settle)
	}
	return w.inTime(pod, wait)
}

// ended reports whether the pod has reached a phase that it never leaves.
func (w *worker) ended() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status.Phase == corev1.PodSucceeded || w.status.Phase == corev1.PodFailed
}

func (w *worker) look() (pod *corev1.Pod, rec *vm.Record, lost bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod, w.rec, w.lost
}

// update stores the pod as the API server now has it.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(pod.Spec.EphemeralContainers) > len(w.pod.Spec.EphemeralContainers) {
		w.p.Recorder.Eventf(pod, corev1.EventTypeWarning, eventUnserved, "%s", noEphemeral)
	}
	if w.rec != nil && !slices.Equal(imagesOf(pod), imagesOf(w.pod)) {
		w.p.Recorder.Eventf(pod, corev1.EventTypeWarning, eventUnserved, "VM %s goes on with the image that it was made of; delete the pod to have one of another image", w.vmName)
	}
	w.pod = bare(pod)
	if w.keeper != nil { // the pod's labels and annotations may be in volume files
		w.keeper.poke()
	}
	w.poke()
}

// imagesOf returns the images that pod names.
func imagesOf(pod *corev1.Pod) (images []string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		images = append(images, c.Image)
	}
	return images
}

// renew stores the pod when it is being deleted, because its annotations about the VM's state still count.
func (w *worker) renew(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pod = bare(pod)
	w.poke()
}

func (w *worker) observe(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gates = pod.Status.Conditions
	w.poke()
}

func (w *worker) requestRemoval(r removal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.removal != nil && w.removal.grace <= r.grace && (w.removal.confirmed || !r.confirmed) {
		return // nothing new: a grace can only become shorter
	}
	w.removal = &r
	if w.interrupt != nil {
		w.interrupt()
	}
	w.poke()
}

// replaced is called when the API server has another pod of our name: our pod is gone.
func (w *worker) replaced() {
	w.writer.stop()
	pod, _, _ := w.look()
	w.requestRemoval(removal{grace: convert.Grace(pod), confirmed: true})
}

// leaving reports whether the pod is being removed.
func (w *worker) leaving() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.removal != nil
}

func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// apply takes an event of a VM that is ours, or that will be ours by its label.
func (w *worker) apply(e vm.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec == nil {
		w.heard[e.Record.ID] = e
		return
	}
	w.settle(e)
	w.poke()
}

// settle updates rec from e, unless rec is newer. Preconditions: mu is held, rec is set.
func (w *worker) settle(e vm.Event) {
	switch {
	case e.Record.ID != w.rec.ID:
	case e.Type == vm.EventDeleted:
		w.lost = true
	case e.Record.Revision > w.rec.Revision:
		rec := e.Record
		w.rec = &rec
	}
}

// missing is called when the Runtime's complete list does not contain our VM.
func (w *worker) missing(id vm.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec != nil && w.rec.ID == id {
		w.lost = true
		w.poke()
	}
}

// take records rec as our VM, or as a newer state of it.
func (w *worker) take(rec vm.Record) *vm.Record {
	if rec.Spec.Labels[contract.VMLabelPodUID] == "" {
		w.p.adopted(w, rec.ID)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec == nil || w.rec.ID != rec.ID || rec.Revision >= w.rec.Revision {
		w.rec, w.lost = &rec, false
	}
	if e, ok := w.heard[rec.ID]; ok {
		w.settle(e)
	}
	clear(w.heard)
	return w.rec
}

// forget drops a VM that vanished before it ever ran: the engine rolls back a creation when its caller, such as an earlier
// process of ours, goes away. The pod lost nothing and gets another VM. The same applies to a hibernated VM whose snapshot
// is also in the registry.
func (w *worker) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log.Info("vm went and is made anew", "vm", w.rec.ID)
	w.rec, w.lost = nil, false
}

func (w *worker) setReady(v *guestMonitor, ready bool, why error) {
	text := ""
	if why != nil {
		text = why.Error()
	}
	w.mu.Lock()
	fell := w.ready && !ready
	// Skip results of an earlier run, and new wordings of the same state: they are not worth a write.
	idle := w.guestMonitor != v || w.ready == ready && (w.unready == "") == (text == "")
	if !idle {
		w.ready, w.unready = ready, text
		w.poke()
	}
	w.mu.Unlock()
	if !idle && fell {
		w.event(corev1.EventTypeWarning, eventUnhealthy, "VM does not answer: %s", text)
	}
}

// target returns where to probe: the address of the first NIC, or the address leased to its MAC.
func (w *worker) target() (ip string, port int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	port, _ = strconv.Atoi(w.pod.Annotations[contract.KeyProbePort])
	return w.address(), port
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
	v := view{
		pod: w.pod, gates: w.gates, hostIP: w.p.cfg.Node.IP, rec: w.rec, pause: w.pause, last: w.last, again: w.again,
		ready: w.ready, unready: w.unready, verdict: w.verdict, asleep: w.sleeping(),
		health: w.shownHealth(), cut: w.removal == nil && w.verdict == nil && w.cut(w.rec),
	}
	if w.rec != nil {
		v.image, v.imageID = w.images[convert.Image(w.pod)].shown(w.rec.ImageDigest)
		v.containers = w.containerImages()
	}
	if w.static && w.verdict == nil {
		v.rec, v.ip = machine(w.pod), w.address()
	} else if w.rec != nil && !over(w.rec) {
		v.ip = w.address()
	} else if w.rec != nil || v.asleep {
		v.ip = w.status.PodIP // a stopped VM keeps the address that it had
	}
	if diskFault(v.rec) == vm.ReasonDiskFull { // nothing in the guest answers
		v.ready, v.unready = false, v.rec.Message
	}
	w.status = v.status(w.status, time.Now())
	status := w.status
	annotations := w.annotations(v.ip)
	w.mu.Unlock()
	w.sayHint(annotations[contract.KeyPostCloneHint])
	w.sayDisk(v.rec)
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
