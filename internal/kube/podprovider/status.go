package podprovider

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// verdict ends a pod for good: refused, evicted, out of time.
type verdict struct{ reason, message string }

// pause is why a container is not running (yet).
type pause struct{ reason, message string }

// view is everything that a pod's status depends on. It is a value: status() is a pure function of the view, the previous
// status and the time, and returns the same result for the same view.
type view struct {
	pod     *corev1.Pod
	gates   []corev1.PodCondition // as others set them
	hostIP  string
	rec     *vm.Record // nil: no VM (yet)
	image   string     // name in the store; "" when only the pod's name for it is known
	imageID string

	containers map[string]shownImage // of a VM with several containers, by name

	ip      string
	pause   pause
	last    *corev1.ContainerStateTerminated // the run before this one
	again   bool                             // a stopped VM will be started again
	cut     bool                             // somebody stopped the VM before its workload ended
	ready   bool
	unready string            // why it is not ready
	health  map[string]health // of the containers; one without an entry is healthy
	verdict *verdict
	asleep  bool // hibernated, here or elsewhere
}

func (v view) healthOf(name string) health {
	if h, ok := v.health[name]; ok {
		return h
	}
	return well
}

// up reports whether a record's guest is set up and its main process runs. A disk image boots by itself, so it is up when
// it runs.
func up(rec *vm.Record) bool {
	return rec != nil && rec.State == vm.StateRunning && (rec.AgentReady || rec.ImageType == vm.ImageDisk)
}

func over(rec *vm.Record) bool {
	return rec != nil && (rec.State == vm.StateStopped || rec.State == vm.StateError)
}

// stamp returns t as the API server stores it, so that comparisons and patches find no false difference.
func stamp(t time.Time) metav1.Time {
	if t.IsZero() {
		return metav1.Time{}
	}
	return metav1.NewTime(t.Truncate(time.Second))
}

// status returns the pod's status. It keeps from prev what must be stable (start time, transition times) and what others
// own.
func (v view) status(prev corev1.PodStatus, now time.Time) corev1.PodStatus {
	s := *prev.DeepCopy()
	s.ObservedGeneration = v.pod.Generation
	if s.StartTime == nil {
		s.StartTime = new(stamp(now))
	}
	s.Reason, s.Message = "", ""
	if v.verdict != nil {
		s.Reason, s.Message = v.verdict.reason, v.verdict.message
	}
	if v.cut && !v.again {
		s.Reason, s.Message = reasonStopped, "the VM was stopped, and not by its pod, before what runs in it had come to its end"
	}
	s.HostIP, s.HostIPs = "", nil
	if v.hostIP != "" {
		s.HostIP, s.HostIPs = v.hostIP, []corev1.HostIP{{IP: v.hostIP}}
	}
	s.PodIP, s.PodIPs = "", nil
	if a, err := netip.ParseAddr(v.ip); err == nil {
		s.PodIP, s.PodIPs = a.String(), []corev1.PodIP{{IP: a.String()}}
		if v.rec != nil && len(v.rec.NICs) > 0 && v.rec.NICs[0].IPv6 != "" {
			s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: v.rec.NICs[0].IPv6})
		}
	}
	s.ContainerStatuses = nil
	if v.rec != nil || v.verdict == nil {
		s.ContainerStatuses = []corev1.ContainerStatus{v.container()}
	}
	if convert.Several(v.pod) {
		s.InitContainerStatuses = nil
		if s.ContainerStatuses != nil {
			s.InitContainerStatuses, s.ContainerStatuses = v.each(v.pod.Spec.InitContainers), v.each(v.pod.Spec.Containers)
		}
		if v.asleep && v.rec == nil { // elsewhere: here only the status knows how the init containers ended
			s.InitContainerStatuses = prev.InitContainerStatuses
		}
	}
	keepImages(s.ContainerStatuses, prev.ContainerStatuses)
	keepImages(s.InitContainerStatuses, prev.InitContainerStatuses)
	s.EphemeralContainerStatuses = v.unserved()
	s.Phase = v.phase(s)
	if s.Phase == corev1.PodPending && prev.Phase == corev1.PodRunning {
		s.Phase = corev1.PodRunning // a VM that wakes up existed before
	}
	s.Conditions = v.conditions(s, prev.Conditions, now)
	return s
}

// keepImages keeps the image names that were reported before: the images of a pod may change, but what runs stays the
// same.
func keepImages(now, before []corev1.ContainerStatus) {
	for i := range now {
		for _, b := range before {
			if b.ContainerID != "" && b.ContainerID == now[i].ContainerID && b.ImageID == now[i].ImageID {
				now[i].Image = b.Image
			}
		}
	}
}

// unserved returns the statuses of ephemeral containers. Somebody added them to a pod that runs without them.
func (v view) unserved() (out []corev1.ContainerStatus) {
	for i := range v.pod.Spec.EphemeralContainers {
		c := &v.pod.Spec.EphemeralContainers[i]
		out = append(out, corev1.ContainerStatus{Name: c.Name, Image: c.Image, Started: new(false), State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: exitCannotRun, Reason: eventUnserved, Message: noEphemeral},
		}})
	}
	return out
}

// hibernatedState returns the state of a container whose VM is hibernated.
func hibernatedState() *corev1.ContainerStateWaiting {
	return &corev1.ContainerStateWaiting{Reason: reasonHibernated, Message: "the VM is hibernated; it goes on when the annotation " + contract.KeyHibernate + " is removed"}
}

func (v view) container() corev1.ContainerStatus {
	h := v.healthOf(v.name())
	c := corev1.ContainerStatus{Started: new(up(v.rec) && h.started && !h.starting)}
	if len(v.pod.Spec.Containers) > 0 {
		c.Name, c.Image = v.pod.Spec.Containers[0].Name, convert.Image(v.pod)
	}
	if v.image != "" {
		c.Image = v.image
	}
	if v.last != nil {
		c.LastTerminationState.Terminated = v.last.DeepCopy()
	}
	if v.rec != nil {
		c.ImageID = v.imageID
		c.ContainerID = contract.ContainerIDScheme + string(v.rec.ID)
		c.RestartCount = int32(min(v.rec.Restarts, 1<<30))
	}
	switch {
	case v.asleep:
		c.State.Waiting = hibernatedState()
	case up(v.rec) && h.starting:
		c.State.Waiting = v.waiting()
	case up(v.rec):
		c.Ready = v.ready && *c.Started && h.ready
		c.State.Running = &corev1.ContainerStateRunning{StartedAt: stamp(v.rec.StartedAt)}
	case over(v.rec) && !v.again:
		c.State.Terminated = terminated(v.rec)
		if v.cut {
			c.State.Terminated.Reason = reasonStopped
		}
	case over(v.rec):
		c.LastTerminationState.Terminated = terminated(v.rec)
		c.State.Waiting = v.waiting()
	default:
		c.State.Waiting = v.waiting()
	}
	return c
}

func (v view) waiting() *corev1.ContainerStateWaiting {
	if v.pause.reason == "" {
		return &corev1.ContainerStateWaiting{Reason: reasonCreating}
	}
	return &corev1.ContainerStateWaiting{Reason: v.pause.reason, Message: v.pause.message}
}

// terminated returns how the last run of rec ended. A guest that shut itself down ended in order; a guest that was lost
// did not.
func terminated(rec *vm.Record) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		ExitCode: exitCode(rec), Reason: reasonCompleted,
		StartedAt: stamp(rec.StartedAt), FinishedAt: stamp(rec.StoppedAt),
		ContainerID: contract.ContainerIDScheme + string(rec.ID),
	}
	if t.ExitCode != 0 {
		t.Reason, t.Message = reasonError, rec.Message
	}
	return t
}

// exitCode returns the exit code of the main process. If it is not known: 0 for an orderly shutdown, 137 (killed) for
// anything else.
func exitCode(rec *vm.Record) int32 {
	switch {
	case rec.ExitCode != nil:
		return int32(*rec.ExitCode)
	case rec.State == vm.StateStopped && (rec.Reason == vm.ReasonPoweredOff || rec.Reason == vm.ReasonStopped || rec.Reason == vm.ReasonExited):
		return 0
	}
	return 137
}

func (v view) phase(s corev1.PodStatus) corev1.PodPhase {
	switch {
	case v.verdict != nil:
		return corev1.PodFailed
	case over(v.rec) && !v.again:
		if exitCode(v.rec) == 0 && !v.cut {
			return corev1.PodSucceeded
		}
		return corev1.PodFailed
	case up(v.rec) && (!v.initialized() || !v.begun(s)):
		return corev1.PodPending
	case up(v.rec), over(v.rec), v.asleep, v.last != nil:
		return corev1.PodRunning
	}
	return corev1.PodPending
}

// conditions replaces our conditions in prev and leaves the others as they are.
func (v view) conditions(s corev1.PodStatus, prev []corev1.PodCondition, now time.Time) []corev1.PodCondition {
	out := slices.Clone(prev)
	set := func(kind corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message}
		if ok {
			c.Status = corev1.ConditionTrue
		}
		out = setCondition(out, c, now)
	}
	done := s.Phase == corev1.PodSucceeded || s.Phase == corev1.PodFailed
	if v.rec == nil && v.verdict != nil {
		return out // refused: nothing was done that a condition could describe
	}
	running := up(v.rec)
	set(corev1.PodReadyToStartContainers, (running || v.asleep) && v.ip != "", "", "")
	initReason := ""
	if s.Phase == corev1.PodSucceeded {
		initReason = reasonPodCompleted
	}
	if v.initialized() || s.Phase == corev1.PodSucceeded {
		set(corev1.PodInitialized, true, initReason, "")
	} else {
		set(corev1.PodInitialized, false, reasonNotInitialized, "containers with incomplete status: ["+strings.Join(v.incomplete(), " ")+"]")
	}
	switch {
	case s.Phase == corev1.PodSucceeded:
		set(corev1.ContainersReady, false, reasonPodCompleted, "")
		set(corev1.PodReady, false, reasonPodCompleted, "")
	case done:
		set(corev1.ContainersReady, false, reasonPodFailed, "")
		set(corev1.PodReady, false, reasonPodFailed, "")
	case !running || !v.ready || len(v.unreadyNames(s)) > 0:
		why := "containers with unready status: [" + strings.Join(v.unreadyNames(s), " ") + "]"
		switch {
		case running && v.unready != "":
			why += ": " + v.unready
		case running && v.ailment() != "":
			why += ": " + v.ailment()
		}
		if v.asleep {
			why += ": the VM is hibernated"
		}
		set(corev1.ContainersReady, false, reasonNotReady, why)
		set(corev1.PodReady, false, reasonNotReady, why)
	default:
		set(corev1.ContainersReady, true, "", "")
		closed := v.closedGates()
		if len(closed) > 0 {
			set(corev1.PodReady, false, reasonGatesNotReady, "readiness gates not open: "+strings.Join(closed, ", "))
		} else {
			set(corev1.PodReady, true, "", "")
		}
	}
	set(corev1.PodScheduled, true, "", "")
	if fault := diskFault(v.rec); fault != "" {
		set(conditionDiskFault, true, fault, v.rec.Message)
	} else if hasCondition(prev, conditionDiskFault) {
		set(conditionDiskFault, false, "", "")
	}
	return out
}

func (v view) name() string {
	if len(v.pod.Spec.Containers) == 0 {
		return ""
	}
	return v.pod.Spec.Containers[0].Name
}

// ailment returns what is wrong with the first container that has a known problem.
func (v view) ailment() string {
	for _, c := range convert.Observed(v.pod) {
		if why := v.healthOf(c.Name).why; why != "" {
			return why
		}
	}
	return ""
}

// unreadyNames returns the containers that keep the pod from being ready: apps and sidecars.
func (v view) unreadyNames(s corev1.PodStatus) (names []string) {
	for i, c := range v.pod.Spec.InitContainers {
		if convert.IsSidecar(&c) && i < len(s.InitContainerStatuses) && !s.InitContainerStatuses[i].Ready {
			names = append(names, c.Name)
		}
	}
	for _, c := range s.ContainerStatuses {
		if !c.Ready {
			names = append(names, c.Name)
		}
	}
	return names
}

func (v view) closedGates() []string {
	var closed []string
	for _, g := range v.pod.Spec.ReadinessGates {
		open := slices.ContainsFunc(v.gates, func(c corev1.PodCondition) bool {
			return c.Type == g.ConditionType && c.Status == corev1.ConditionTrue
		})
		if !open {
			closed = append(closed, string(g.ConditionType))
		}
	}
	return closed
}

// setCondition keeps the transition time while the status stays the same.
func setCondition(all []corev1.PodCondition, c corev1.PodCondition, now time.Time) []corev1.PodCondition {
	c.LastTransitionTime = stamp(now)
	for i := range all {
		if all[i].Type != c.Type {
			continue
		}
		if all[i].Status == c.Status {
			c.LastTransitionTime = all[i].LastTransitionTime
		}
		c.LastProbeTime, c.ObservedGeneration = all[i].LastProbeTime, all[i].ObservedGeneration
		all[i] = c
		return all
	}
	return append(all, c)
}
