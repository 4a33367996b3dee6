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

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// worker owns one pod: one goroutine, one step at a time. Others only leave word (update, apply, requestRemoval) and wake
// it; a removal also interrupts the call it is in.
type worker struct {
	tenant // for whom it reaches VMs and snapshots
	log    *slog.Logger
	key    string
	uid    types.UID
	vmName string
	static bool    // the pod stands for a machine that is not the node's: there is never a rec
	prior  *worker // who had the VM name before; nil for nobody
	writer *writer
	tokens *tokens
	wake   chan struct{}
	freed  chan struct{} // closed when the VM is gone for good

	mu           sync.Mutex
	pod          *corev1.Pod           // as the API server has it, but for the status
	status       corev1.PodStatus      // as we see it
	gates        []corev1.PodCondition // as others set them
	rec          *vm.Record            // our VM as last heard of; nil: none (yet)
	heard        map[vm.ID]vm.Event    // of VMs with our label before we know which is ours
	lost         bool                  // the engine says our VM is gone
	removal      *removal              // wanted
	interrupt    context.CancelFunc    // ends the call the worker is in
	keeper       *keeper               // of the VM's volumes; set by the worker's goroutine alone
	ready        bool                  // the guest can be reached
	unready      string
	guestMonitor *guestMonitor     // over the present run; nil: nobody watches
	health       map[string]health // of the containers, by name
	bowed        map[string]run    // of the containers, whose preStop hooks have run
	killRequest  *killRequest      // for which the VM is to be stopped

	// Of the worker's goroutine alone.
	background func(func(context.Context)) context.CancelFunc // runs what may outlast a step, but not the worker's life
	killed     time.Time                                      // start of the run that we ended, and that another one follows
	restarted  time.Time                                      // when a managed VM was started again
	unanswered time.Time                                      // since when the engine does not say how to start it again
	pause      pause
	last       *corev1.ContainerStateTerminated
	again      bool
	claimed    bool // the node holds the VM's state, as its claim says
	verdict    *verdict
	begun      bool              // something was published already
	told       time.Time         // start of the run that was announced
	diskTold   string            // fault of a disk that was announced
	trusted    bool              // the guest was ready when an earlier process last looked
	launched   time.Time         // when this process asked for the VM; zero when adopted
	backoff    time.Duration     // before the next start
	tries      int               // failed attempts to bring the VM up
	lacking    []convert.Absent  // was told
	fresh      map[string]sum    // content of the volumes of a VM that was just made
	images     map[string]pulled // by the name that the pod asks for; written with mu held
	fetched    map[string]bool   // of them, those that the VM being made has
	pulls      backoff
	due        time.Time // of the next start
	dueFor     time.Time // the stop that due belongs to
	mode       string    // how this process had the VM made

	// Of snapshots; what annotations tell is read with mu held, everything else by the worker's goroutine alone.
	life     contract.Lifecycle
	tidy     bool   // nothing of a sleep is left in the registry
	restored bool   // this process woke the VM from elsewhere
	kept     string // snapshot that the VM hibernates in and that is known to be where it should be
	saved    vm.ID  // was saved before its removal
	hinted   string // the hint that was told
	dozing   retryTask
	waking   retryTask
	tidying  retryTask
	saving   retryTask
	stale    string            // digest of a state for forks that is not of the VM to be forked
	slept    string            // digest under which the registry was given what the VM woke from here
	foreign  snapshot.Snapshot // from an old place in the registry, and not known for the VM's
	why      error             // of foreign

	offering retryTask // both with mu held
	offers   vm.ID     // whose state for forks is in the registry, or on its way there
}

// removal is how the pod shall go. An unconfirmed one is checked with the API server first.
type removal struct {
	grace     time.Duration
	confirmed bool
}

// bare is pod without its status, of which the worker has its own. Pods that were handed over do not change any more.
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

// nameOf is the name of pod's VM: what rec has, if it is there. One that an earlier release made keeps its own.
func nameOf(pod *corev1.Pod, rec *vm.Record) string {
	if rec != nil {
		return rec.Spec.Name
	}
	return convert.VMName(pod)
}

// vmKey is the VM's name as it is unique on the node.
func (w *worker) vmKey() string { return w.owner.Qualify(w.vmName) }

// resume takes from the pod's status what an earlier process knew.
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
		var wait time.Duration
		var gone bool
		if r := w.begin(cancel); r != nil {
			wait, gone = w.tearDown(op, *r)
		} else {
			wait = w.step(op)
		}
		cancel()
		if gone {
			w.p.drop(w)
			w.p.wg.Go(func() { w.depart(ctx) })
			return
		}
		sleep(ctx, w.wake, wait, wait <= 0)
	}
}

// begin opens a step that cancel interrupts, and returns the removal that is wanted, if any.
func (w *worker) begin(cancel context.CancelFunc) *removal {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.interrupt = cancel
	return w.removal
}

// step does the next thing for the pod and returns how long to wait for the one after it; 0: until woken.
func (w *worker) step(ctx context.Context) time.Duration {
	pod, rec, lost := w.look()
	switch {
	case w.ended():
		w.stopKeeper()
		return 0
	case w.verdict != nil:
		w.stopKeeper()
		w.publish(0)
		return 0
	case w.static:
		return w.attend(ctx, pod)
	case lost && (rec.StartedAt.IsZero() || rec.State == vm.StateHibernated && w.p.remote()):
		w.forget()
		return time.Millisecond
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
	var wait time.Duration
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

// update takes the pod as the API server now has it.
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
	if w.keeper != nil { // its labels and annotations may be in files
		w.keeper.poke()
	}
	w.poke()
}

// imagesOf are those that pod names.
func imagesOf(pod *corev1.Pod) (images []string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		images = append(images, c.Image)
	}
	return images
}

// renew takes the pod as it is being deleted: what its annotations say of its VM's state still counts.
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

// replaced is told when the API server has another pod of our name: ours is gone.
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

// apply takes an event of a VM that is, or by its label will be, ours.
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

// settle brings rec up to date with e, unless it knows better. Preconditions: mu is held, rec is set.
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

// missing is told when the Runtime was asked for everything and does not have our VM.
func (w *worker) missing(id vm.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec != nil && w.rec.ID == id {
		w.lost = true
		w.poke()
	}
}

// take makes rec our VM, or a newer state of it.
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

// forget lets go of a VM that vanished before it ever ran: the engine undoes what it makes when the one who asked, such
// as an earlier process of ours, goes away. The pod lost nothing by it and gets another VM. The same goes for one that was
// asleep when what it is in is in the registry too.
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
	// Of an earlier run, or a new wording of the same, which is not worth a write.
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

// target is where to probe: the address of the first interface, or the one leased to its MAC.
func (w *worker) target() (ip string, port int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	port, _ = strconv.Atoi(w.pod.Annotations[contract.KeyProbePort])
	return w.address(), port
}

// address of the VM. Preconditions: mu is held.
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

// publish computes the status and has it written; hold is how long the write may wait for a newer one.
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
		v.ip = w.status.PodIP // a stopped VM keeps the address it had
	}
	if diskFault(v.rec) == vm.ReasonDiskFull { // nobody in it answers
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

// snapshot is the pod with its status, for virtual-kubelet and the kubelet API.
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
