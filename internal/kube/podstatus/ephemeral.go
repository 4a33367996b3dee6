package podstatus

import (
	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// TakesEphemeral reports whether ephemeral containers can run in the VM of pod. rec is nil while the pod has no VM.
func TakesEphemeral(pod *corev1.Pod, rec *vm.Record) bool {
	return !convert.Static(pod) && (rec == nil || rec.ImageType != vm.ImageDisk)
}

// EphemeralOf returns the ephemeral container called name that rec's VM has; nil: it has none.
func EphemeralOf(rec *vm.Record, name string) *vm.Ephemeral {
	if rec == nil {
		return nil
	}
	for i := range rec.Ephemeral {
		if rec.Ephemeral[i].Record.Name == name {
			return &rec.Ephemeral[i]
		}
	}
	return nil
}

// ephemeral returns the statuses of the ephemeral containers. They have no effect on the pod's conditions and phase. The status
// before has the name of an image that the View does not know. The View learns it after the container is in the VM's record, so
// a name that it knows wins.
func (v View) ephemeral(before []corev1.ContainerStatus) (out []corev1.ContainerStatus) {
	for i := range v.Pod.Spec.EphemeralContainers {
		c := &v.Pod.Spec.EphemeralContainers[i]
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Started: new(false)}
		if img, ok := v.Images[c.Name]; ok {
			s.ImageID = img.ID
			if img.Name != "" {
				s.Image = img.Name
			}
		}
		v.standing(c, &s)
		out = append(out, s)
		if v.Images[c.Name].Name == "" {
			keepImages(out[i:], before)
		}
	}
	return out
}

// standing fills in the state of an ephemeral container.
func (v View) standing(c *corev1.EphemeralContainer, s *corev1.ContainerStatus) {
	e, pause := EphemeralOf(v.Record, c.Name), v.Pause.Ephemeral[c.Name]
	switch {
	case e != nil:
		s.ContainerID = contract.ContainerIDScheme + string(v.Record.ID) + "/" + c.Name
	case !TakesEphemeral(v.Pod, v.Record):
		s.State.Terminated = neverRan(ReasonUnserved, NoEphemeral)
		return
	case pause.Refused != "":
		s.State.Terminated = neverRan(pause.Refused, pause.Message)
		return
	case pause.Reason != "":
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: pause.Reason, Message: pause.Message}
		return
	case v.Asleep:
		s.State.Waiting = hibernatedState()
		return
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: ReasonCreating}
		return
	}
	switch now := e.Record.Status; {
	case now.State == vm.ContainerTerminated:
		s.State.Terminated = ended(now.Exit, s.ContainerID)
	case v.Asleep:
		s.State.Waiting = hibernatedState()
	case now.State == vm.ContainerRunning:
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: Stamp(now.StartedAt)}
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: now.Reason, Message: now.Message}
	}
}

// exitCannotRun is the exit code of a container that cannot run.
const exitCannotRun = 128

func neverRan(reason, message string) *corev1.ContainerStateTerminated {
	return &corev1.ContainerStateTerminated{ExitCode: exitCannotRun, Reason: reason, Message: message}
}
