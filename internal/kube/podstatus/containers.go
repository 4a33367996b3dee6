package podstatus

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// each returns the statuses of the listed containers, which the guest starts and observes.
func (v View) each(list []corev1.Container) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for i := range list {
		out = append(out, v.one(&list[i]))
	}
	return out
}

// known returns the status of a container that the guest reported last, or nil before the first report.
func (v View) known(name string) *vm.ContainerStatus {
	if v.Record == nil {
		return nil
	}
	c := v.Record.Container(name)
	switch {
	case c == nil || c.Status.State == "":
		return nil
	case Over(v.Record):
		return new(c.Status.Cut(v.Record.StoppedAt))
	}
	return &c.Status
}

func (v View) one(c *corev1.Container) corev1.ContainerStatus {
	out := corev1.ContainerStatus{Name: c.Name, Image: convert.ImageOf(v.Pod, c), Started: new(false)}
	s := v.known(c.Name)
	if img, ok := v.Images[c.Name]; ok {
		out.ImageID = img.ID
		if img.Name != "" {
			out.Image = img.Name
		}
	}
	var id, before string // of this run and of the one before it
	if s != nil {
		out.VolumeMounts = v.mounts(c)
		id, before = runID(v.Record, c.Name, s.Run()), runID(v.Record, c.Name, s.Run()-1)
		out.ContainerID, out.RestartCount = id, int32(min(s.Restarts, 1<<30))
		if s.State == vm.ContainerWaiting && s.Last != nil { // the next run has not begun
			before = id
		}
		out.LastTerminationState.Terminated = ended(s.Last, before)
		if !s.StartedAt.IsZero() {
			out.User = userOf(*v.Record.Container(c.Name))
		}
	}
	switch {
	case v.Asleep && (s == nil || s.State != vm.ContainerTerminated):
		out.State.Waiting = hibernatedState()
	case !v.Asleep && (s == nil || !Up(v.Record) && !Over(v.Record)):
		out.State.Waiting = v.waitingFor()
	case !v.Asleep && Over(v.Record) && v.Again:
		if s.Exit != nil {
			out.LastTerminationState.Terminated = ended(s.Exit, id)
		}
		out.State.Waiting = v.waitingFor()
	case s.State == vm.ContainerRunning && v.healthOf(c.Name).Starting:
		out.State.Waiting = &corev1.ContainerStateWaiting{Reason: ReasonCreating}
	case s.State == vm.ContainerRunning:
		out.State.Running = &corev1.ContainerStateRunning{StartedAt: Stamp(s.StartedAt)}
		h := v.healthOf(c.Name)
		out.Started, out.Ready = new(h.Started), v.Reach.Ready && h.Started && h.Ready
	case s.State == vm.ContainerTerminated:
		out.State.Terminated = ended(s.Exit, id)
		out.Ready = v.isInit(c) && !convert.IsSidecar(c) && s.Exit != nil && s.Exit.Code == 0
	default:
		out.State.Waiting = &corev1.ContainerStateWaiting{Reason: s.Reason, Message: s.Message}
	}
	return out
}

// VolumeKey returns the key of a volume in Images. No container has this name.
func VolumeKey(volume string) string { return "volume/" + volume }

// mounts returns the mounts of c, if it mounts the files of an image: their status says which image that is.
func (v View) mounts(c *corev1.Container) (out []corev1.VolumeMountStatus) {
	some := false
	for _, m := range c.VolumeMounts {
		s := corev1.VolumeMountStatus{Name: m.Name, MountPath: m.MountPath, ReadOnly: m.ReadOnly}
		if img, ok := v.Images[VolumeKey(m.Name)]; ok {
			some = true
			s.ReadOnly, s.VolumeStatus = true, &corev1.VolumeStatus{Image: &corev1.ImageVolumeStatus{ImageRef: img.ID}}
		}
		out = append(out, s)
	}
	if !some {
		return nil
	}
	return out
}

// ContainerID returns the ID of the current or last run of a container of rec: cocoon://VM for a container that is the VM,
// cocoon://VM/NAME for one of several. From the second run on, /RUN follows.
func ContainerID(rec *vm.Record, name string) string {
	if c := rec.Container(name); c != nil {
		return runID(rec, name, c.Status.Run())
	}
	return contract.ContainerIDScheme + string(rec.ID)
}

func runID(rec *vm.Record, name string, run int) string {
	id := contract.ContainerIDScheme + string(rec.ID)
	if !rec.RootContainer() {
		id += "/" + name
	}
	if run > 1 {
		id += "/" + strconv.Itoa(run)
	}
	return id
}

// VMOf returns the ID of the VM in the ID of a container; "" if the ID is not one of ours.
func VMOf(containerID string) vm.ID {
	id, ok := strings.CutPrefix(containerID, contract.ContainerIDScheme)
	if !ok {
		return ""
	}
	id, _, _ = strings.Cut(id, "/")
	return vm.ID(id)
}

// OwnersOf returns, for each VM, the pod whose status names the VM. It reads statuses, because only the node writes them. Users can
// write annotations. A static pod owns no VM, because the node copies its ID from an annotation. A pod that has ended owns no VM
// that another pod names.
func OwnersOf(pods []*corev1.Pod) map[vm.ID]types.UID {
	owners, ended := map[vm.ID]types.UID{}, map[vm.ID]bool{}
	for _, pod := range pods {
		if convert.Static(pod) {
			continue
		}
		over := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		for _, c := range pod.Status.ContainerStatuses {
			id := VMOf(c.ContainerID)
			if other := owners[id]; id != "" && (other == "" || ended[id] && !over || ended[id] == over && pod.UID < other) {
				owners[id], ended[id] = pod.UID, over
			}
		}
	}
	return owners
}

// waitingFor returns why a container waits in a VM that is not up. As with the kubelet, every container of a pod with init containers
// waits for the pod to be initialized, the first init container too.
func (v View) waitingFor() *corev1.ContainerStateWaiting {
	w := v.waiting()
	if w.Reason == ReasonCreating && len(v.Pod.Spec.InitContainers) > 0 {
		w.Reason = vm.ContainerInitGoing
	}
	return w
}

func (v View) isInit(c *corev1.Container) bool {
	return slices.ContainsFunc(v.Pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name })
}

func ended(x *vm.ContainerExit, id string) *corev1.ContainerStateTerminated {
	if x == nil {
		return nil
	}
	return &corev1.ContainerStateTerminated{
		ExitCode: int32(x.Code), Reason: x.Reason, Message: x.Message,
		StartedAt: Stamp(x.StartedAt), FinishedAt: Stamp(x.FinishedAt), ContainerID: id,
	}
}

// initialized reports whether the init containers are done. Apps start only then, so they are also done if an app has started.
// A pod without init containers is initialized from the beginning.
func (v View) initialized() bool {
	return v.Asleep || len(v.incomplete()) == 0 || slices.ContainsFunc(v.Pod.Spec.Containers, func(c corev1.Container) bool {
		s := v.known(c.Name)
		return s != nil && !s.StartedAt.IsZero()
	})
}

// begun reports whether each of the pod's app containers has started and its postStart hook has succeeded, now or in an
// earlier run.
func (v View) begun(s corev1.PodStatus) bool {
	return !slices.ContainsFunc(s.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Waiting != nil && c.LastTerminationState.Terminated == nil
	})
}

// incomplete returns the init containers that are not done.
func (v View) incomplete() (names []string) {
	for i := range v.Pod.Spec.InitContainers {
		c := &v.Pod.Spec.InitContainers[i]
		s := v.known(c.Name)
		done := s != nil && s.State == vm.ContainerTerminated && s.Exit != nil && s.Exit.Code == 0
		if convert.IsSidecar(c) {
			h := v.healthOf(c.Name)
			done = s != nil && s.State == vm.ContainerRunning && h.Started && !h.Starting
		}
		if !done {
			names = append(names, c.Name)
		}
	}
	return names
}
