// Package podstatus computes the status of a pod from the pod, the record of its VM and the health of its containers.
//
// Its functions are pure: they make no requests, do not wait and keep no state. Package podprovider collects the input and
// writes the status.
package podstatus

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// The reasons that other packages use too. If the kubelet has a reason for the case, it is the same.
const (
	ReasonCreating   = "ContainerCreating"
	ReasonHibernated = "Hibernated"
	ReasonPaused     = "Paused"
	ReasonUnserved   = "NotServed"

	ReasonLoginsSet    = "LoginsSet"
	ReasonLoginsFailed = "FailedLogins"

	ReasonNetworksFailed = "FailedNetworks"
)

const (
	reasonStopped        = "VMStopped"
	reasonCompleted      = "Completed"
	reasonError          = "Error"
	reasonNotReady       = "ContainersNotReady"
	reasonNotInitialized = "ContainersNotInitialized"
	reasonPodCompleted   = "PodCompleted"
	reasonPodFailed      = "PodFailed"
	reasonGatesNotReady  = "ReadinessGatesNotReady"
)

// NoEphemeral says why an ephemeral container does not run in a VM that boots its own system, or on another machine.
const NoEphemeral = "the system of this machine is its own, so it cannot run ephemeral containers; use kubectl exec"

// View is everything that a pod's status depends on.
type View struct {
	Pod      *corev1.Pod
	Gates    []corev1.PodCondition // conditions that others set, for readiness gates
	HostIP   string
	IP       string           // of the VM; "": not known
	Record   *vm.Record       // nil: no VM (yet)
	Image    Image            // of the VM
	Images   map[string]Image // of a VM with containers, by container; of its volumes by VolumeKey
	Reach    Reach
	Logins   Logins
	Networks string            // why the VM does not have the networks of its pod; "": it has, or they are not known
	Health   map[string]Health // of the containers; one without an entry is healthy
	Pause    Pause
	Verdict  *Verdict                         // nil: none
	Last     *corev1.ContainerStateTerminated // the run before this one
	Again    bool                             // the stopped VM will be started again
	Cut      bool                             // the VM was stopped from outside its pod before its containers ended
	Asleep   bool                             // the VM is hibernated, on this node or elsewhere
	Resize   Resize
}

// Image is the image that the status of a container shows. An unknown field is "". Without a name the status shows the image
// of the pod's spec.
type Image struct{ Name, ID string }

// Reach says whether the guest can be reached.
type Reach struct {
	Ready bool
	Why   string // why the guest is not ready
}

// Logins says whether the guest has the passwords and SSH keys of its pod.
type Logins struct {
	Known   bool   // false: the pod asks for none, or its guest has not answered yet
	Failure string // why it does not have them
}

// Health is the result of the hooks and probes of one container in its current run.
type Health struct {
	Starting bool   // its postStart hook has not succeeded yet
	Started  bool   // its startup probe has succeeded, or it has none
	Ready    bool   // its readiness probe has succeeded, or it has none
	Why      string // why it is not ready
}

// Well is the health of a container without hooks and probes.
var Well = Health{Started: true, Ready: true}

// Pause says why a container is not running (yet).
type Pause struct {
	Reason, Message string
	Refused         string // the reason in the pod's status if the node refuses the pod; otherwise ""

	// Ephemeral has the ephemeral containers that the VM does not have yet, by name. If one is Refused, it never runs.
	Ephemeral map[string]Pause
}

// Verdict ends a pod permanently, for example because it was evicted or exceeded its deadline.
type Verdict struct{ Reason, Message string }

func (v View) healthOf(name string) Health {
	if h, ok := v.Health[name]; ok {
		return h
	}
	return Well
}

// Up reports whether the guest of rec is set up and its main process runs. A disk guest boots by itself, so it is up when its
// VM runs.
func Up(rec *vm.Record) bool {
	return rec != nil && rec.State == vm.StateRunning && (rec.AgentReady || rec.ImageType == vm.ImageDisk)
}

// Paused reports whether the guest of rec is paused on request.
func Paused(rec *vm.Record) bool {
	return rec != nil && rec.State == vm.StateRunning && rec.Paused != ""
}

// Over reports whether the last run of rec has ended.
func Over(rec *vm.Record) bool {
	return rec != nil && (rec.State == vm.StateStopped || rec.State == vm.StateError)
}

// Stamp returns t with the precision of the API server, so that comparisons and patches find no false difference.
func Stamp(t time.Time) metav1.Time {
	if t.IsZero() {
		return metav1.Time{}
	}
	return metav1.NewTime(t.Truncate(time.Second))
}

// Machine returns a record for the machine of a static pod. The record has no start time.
func Machine(pod *corev1.Pod) *vm.Record {
	there, _ := contract.ParseVMRuntime(pod.Annotations)
	return &vm.Record{ID: vm.ID(there.ID), State: vm.StateRunning, ImageType: vm.ImageDisk}
}

// Status returns the pod's status. From prev it keeps the start time, the transition times and the fields that others own. For
// the same view it returns the same status.
func (v View) Status(prev corev1.PodStatus, now time.Time) corev1.PodStatus {
	if DiskFault(v.Record) == vm.ReasonDiskFull { // the guest is paused
		v.Reach = Reach{Why: v.Record.Message}
	}
	if Paused(v.Record) {
		v.Reach = Reach{Why: pausedText(v.Record)}
	}
	s := *prev.DeepCopy()
	s.ObservedGeneration = v.Pod.Generation
	if s.StartTime == nil {
		s.StartTime = new(Stamp(now))
	}
	s.Reason, s.Message = "", ""
	if v.Pause.Refused != "" {
		s.Reason, s.Message = v.Pause.Refused, v.Pause.Message
	}
	if v.Verdict != nil {
		s.Reason, s.Message = v.Verdict.Reason, v.Verdict.Message
	}
	if v.Cut && !v.Again {
		s.Reason, s.Message = reasonStopped, "the VM was stopped from outside its pod before its containers ended"
	}
	s.HostIP, s.HostIPs = "", nil
	if v.HostIP != "" {
		s.HostIP, s.HostIPs = v.HostIP, []corev1.HostIP{{IP: v.HostIP}}
	}
	s.PodIP, s.PodIPs = "", nil
	if a, err := netip.ParseAddr(v.IP); err == nil {
		s.PodIP, s.PodIPs = a.String(), []corev1.PodIP{{IP: a.String()}}
		if v.Record != nil && len(v.Record.NICs) > 0 && v.Record.NICs[0].IPv6 != "" {
			s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: v.Record.NICs[0].IPv6})
		}
	}
	s.ContainerStatuses = nil
	if v.Record != nil || v.Verdict == nil {
		s.ContainerStatuses = []corev1.ContainerStatus{v.container()}
	}
	if convert.Several(v.Pod) || v.Record != nil && len(v.Record.Containers) > 0 {
		s.InitContainerStatuses = nil
		if s.ContainerStatuses != nil {
			s.InitContainerStatuses, s.ContainerStatuses = v.each(v.Pod.Spec.InitContainers), v.each(v.Pod.Spec.Containers)
		}
		if v.Asleep && v.Record == nil { // the VM is hibernated elsewhere; only the status has the states of the init containers
			s.InitContainerStatuses = prev.DeepCopy().InitContainerStatuses
		}
	}
	keepImages(s.ContainerStatuses, prev.ContainerStatuses)
	keepImages(s.InitContainerStatuses, prev.InitContainerStatuses)
	v.resources(s.ContainerStatuses, prev.ContainerStatuses, func(p *corev1.Pod) []corev1.Container { return p.Spec.Containers })
	v.resources(s.InitContainerStatuses, prev.InitContainerStatuses, func(p *corev1.Pod) []corev1.Container { return p.Spec.InitContainers })
	s.EphemeralContainerStatuses = v.ephemeral(prev.EphemeralContainerStatuses)
	s.Phase = v.phase(s)
	if s.Phase == corev1.PodPending && prev.Phase == corev1.PodRunning {
		s.Phase = corev1.PodRunning // a VM that wakes was Running before
	}
	s.Conditions = v.resizing(s, v.conditions(s, prev.Conditions, now), now)
	return s
}

// keepImages keeps the image names that the status already has for the same container, because the image of the pod's spec may
// change while the container runs.
func keepImages(now, before []corev1.ContainerStatus) {
	for i := range now {
		for _, b := range before {
			if b.Name == now[i].Name && VMOf(b.ContainerID) != "" && VMOf(b.ContainerID) == VMOf(now[i].ContainerID) && b.ImageID == now[i].ImageID {
				now[i].Image = b.Image
			}
		}
	}
}

// hibernatedState returns the state of a container whose VM is hibernated.
func hibernatedState() *corev1.ContainerStateWaiting {
	return &corev1.ContainerStateWaiting{Reason: ReasonHibernated, Message: "the VM is hibernated; it wakes when the annotation " + contract.KeyHibernate + " is removed"}
}

// pausedText says why a paused guest does not run. Precondition: Paused.
func pausedText(rec *vm.Record) string {
	if rec.Paused == vm.PausedAtStart {
		return "the VM was started paused"
	}
	return "the VM is paused"
}

func (v View) container() corev1.ContainerStatus {
	h := v.healthOf(v.name())
	c := corev1.ContainerStatus{Started: new(Up(v.Record) && h.Started && !h.Starting)}
	if len(v.Pod.Spec.Containers) > 0 {
		c.Name, c.Image = v.Pod.Spec.Containers[0].Name, convert.Image(v.Pod)
	}
	if v.Image.Name != "" {
		c.Image = v.Image.Name
	}
	if v.Last != nil {
		c.LastTerminationState.Terminated = v.Last.DeepCopy()
	}
	if v.Record != nil {
		c.ImageID = v.Image.ID
		c.ContainerID = contract.ContainerIDScheme + string(v.Record.ID)
		c.RestartCount = int32(min(v.Record.Restarts, 1<<30))
	}
	switch {
	case v.Asleep:
		c.State.Waiting = hibernatedState()
	case Up(v.Record) && h.Starting:
		c.State.Waiting = v.waiting()
	case Up(v.Record):
		c.Ready = v.Reach.Ready && *c.Started && h.Ready
		c.State.Running = &corev1.ContainerStateRunning{StartedAt: Stamp(v.Record.StartedAt)}
	case Over(v.Record) && !v.Again:
		c.State.Terminated = Terminated(v.Record)
		if v.Cut {
			c.State.Terminated.Reason = reasonStopped
		}
	case Over(v.Record):
		c.LastTerminationState.Terminated = Terminated(v.Record)
		c.State.Waiting = v.waiting()
	default:
		c.State.Waiting = v.waiting()
	}
	return c
}

func (v View) waiting() *corev1.ContainerStateWaiting {
	if v.Pause.Reason == "" && Paused(v.Record) {
		return &corev1.ContainerStateWaiting{Reason: ReasonPaused, Message: pausedText(v.Record)}
	}
	if v.Pause.Reason == "" {
		w := &corev1.ContainerStateWaiting{Reason: ReasonCreating}
		if Fault(v.Record) == vm.ReasonFailedMount {
			w.Message = v.Record.Message
		}
		return w
	}
	return &corev1.ContainerStateWaiting{Reason: v.Pause.Reason, Message: v.Pause.Message}
}

// Terminated returns how the last run of rec ended.
func Terminated(rec *vm.Record) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		ExitCode: ExitCode(rec), Reason: reasonCompleted,
		StartedAt: Stamp(rec.StartedAt), FinishedAt: Stamp(rec.StoppedAt),
		ContainerID: contract.ContainerIDScheme + string(rec.ID),
	}
	if t.ExitCode != 0 {
		t.Reason, t.Message = reasonError, rec.Message
	}
	return t
}

// ExitCode returns the exit code of the main process. If the code is not known, it returns 0 for an orderly shutdown and 137
// (killed) for any other end.
func ExitCode(rec *vm.Record) int32 {
	switch {
	case rec.ExitCode != nil:
		return int32(*rec.ExitCode)
	case rec.State == vm.StateStopped && (rec.Reason == vm.ReasonPoweredOff || rec.Reason == vm.ReasonStopped || rec.Reason == vm.ReasonExited):
		return 0
	}
	return 137
}

func (v View) phase(s corev1.PodStatus) corev1.PodPhase {
	switch {
	case v.Verdict != nil:
		return corev1.PodFailed
	case Over(v.Record) && !v.Again:
		if ExitCode(v.Record) == 0 && !v.Cut {
			return corev1.PodSucceeded
		}
		return corev1.PodFailed
	case Up(v.Record) && (!v.initialized() || !v.begun(s)):
		return corev1.PodPending
	case Up(v.Record), Over(v.Record), v.Asleep, v.Last != nil:
		return corev1.PodRunning
	}
	return corev1.PodPending
}

func (v View) name() string {
	if len(v.Pod.Spec.Containers) == 0 {
		return ""
	}
	return v.Pod.Spec.Containers[0].Name
}
