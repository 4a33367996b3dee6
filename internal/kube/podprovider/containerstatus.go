package podprovider

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// shownImage is the image that the status of a container shows; "" for what is not known.
type shownImage struct{ name, id string }

// containerImages returns the images of our VM's containers. Preconditions: mu is held, rec is set.
func (w *worker) containerImages() map[string]shownImage {
	out := map[string]shownImage{}
	for _, c := range slices.Concat(w.pod.Spec.InitContainers, w.pod.Spec.Containers) {
		if r := w.rec.Container(c.Name); r != nil {
			name, id := w.images[c.Image].shown(r.ImageDigest)
			out[c.Name] = shownImage{name, id}
		}
	}
	return out
}

// each returns the statuses of the listed containers of a VM with several.
func (v view) each(list []corev1.Container) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for i := range list {
		out = append(out, v.one(&list[i]))
	}
	return out
}

// known returns what the guest of our VM reported about a container; nil before its first report.
func (v view) known(name string) *vm.ContainerStatus {
	if v.rec == nil {
		return nil
	}
	if c := v.rec.Container(name); c != nil && c.Status.State != "" {
		return &c.Status
	}
	return nil
}

func (v view) one(c *corev1.Container) corev1.ContainerStatus {
	out := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Started: new(false)}
	s := v.known(c.Name)
	if img, ok := v.containers[c.Name]; ok {
		out.ImageID = img.id
		if img.name != "" {
			out.Image = img.name
		}
	}
	id := ""
	if s != nil {
		id = containerID(v.rec, c.Name)
		out.ContainerID, out.RestartCount = id, int32(min(s.Restarts, 1<<30))
		out.LastTerminationState.Terminated = ended(s.Last, id)
	}
	switch {
	case v.asleep && (s == nil || s.State != vm.ContainerTerminated):
		out.State.Waiting = hibernatedState()
	case !v.asleep && (s == nil || !up(v.rec) && !over(v.rec)):
		out.State.Waiting = v.waitingFor(c)
	case !v.asleep && over(v.rec) && v.again:
		if s.Exit != nil {
			out.LastTerminationState.Terminated = ended(s.Exit, id)
		}
		out.State.Waiting = v.waitingFor(c)
	case s.State == vm.ContainerRunning && v.healthOf(c.Name).starting:
		out.State.Waiting = &corev1.ContainerStateWaiting{Reason: reasonCreating}
	case s.State == vm.ContainerRunning:
		out.State.Running = &corev1.ContainerStateRunning{StartedAt: stamp(s.StartedAt)}
		h := v.healthOf(c.Name)
		out.Started, out.Ready = new(h.started), v.ready && h.started && h.ready
	case s.State == vm.ContainerTerminated:
		out.State.Terminated = ended(s.Exit, id)
		out.Ready = v.isInit(c) && !convert.IsSidecar(c) && s.Exit != nil && s.Exit.Code == 0
	default:
		out.State.Waiting = &corev1.ContainerStateWaiting{Reason: s.Reason, Message: s.Message}
	}
	return out
}

// containerID returns the ID of a container of rec: that of the VM, or that of one of its containers.
func containerID(rec *vm.Record, name string) string {
	id := contract.ContainerIDScheme + string(rec.ID)
	if rec.Container(name) == nil {
		return id
	}
	return id + "/" + name
}

// waitingFor returns why a container waits in a VM that is not up.
func (v view) waitingFor(c *corev1.Container) *corev1.ContainerStateWaiting {
	if w := v.waiting(); w.Reason != reasonCreating || len(v.pod.Spec.InitContainers) == 0 || v.isInit(c) && c.Name == v.pod.Spec.InitContainers[0].Name {
		return w
	}
	return &corev1.ContainerStateWaiting{Reason: vm.ContainerInitGoing}
}

func (v view) isInit(c *corev1.Container) bool {
	return slices.ContainsFunc(v.pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name })
}

func ended(x *vm.ContainerExit, id string) *corev1.ContainerStateTerminated {
	if x == nil {
		return nil
	}
	return &corev1.ContainerStateTerminated{
		ExitCode: int32(x.Code), Reason: x.Reason, Message: x.Message,
		StartedAt: stamp(x.StartedAt), FinishedAt: stamp(x.FinishedAt), ContainerID: id,
	}
}

// initialized reports whether the init containers are done. Apps start only then; once an app has started, they were done.
// A pod without init containers is initialized from the beginning.
func (v view) initialized() bool {
	return v.asleep || len(v.incomplete()) == 0 || slices.ContainsFunc(v.pod.Spec.Containers, func(c corev1.Container) bool {
		s := v.known(c.Name)
		return s != nil && !s.StartedAt.IsZero()
	})
}

// begun reports whether each of the pod's containers, except the init containers, has run, including its postStart hook.
func (v view) begun(s corev1.PodStatus) bool {
	return !slices.ContainsFunc(s.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Waiting != nil && c.LastTerminationState.Terminated == nil
	})
}

// incomplete returns the init containers that are not done.
func (v view) incomplete() (names []string) {
	for i := range v.pod.Spec.InitContainers {
		c := &v.pod.Spec.InitContainers[i]
		s := v.known(c.Name)
		done := s != nil && s.State == vm.ContainerTerminated && s.Exit != nil && s.Exit.Code == 0
		if convert.IsSidecar(c) {
			h := v.healthOf(c.Name)
			done = s != nil && s.State == vm.ContainerRunning && h.started && !h.starting
		}
		if !done {
			names = append(names, c.Name)
		}
	}
	return names
}
