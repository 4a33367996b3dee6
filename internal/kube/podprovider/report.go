package podprovider

import (
	"context"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// report is what a worker tells about its pod: by the status, the annotations and Events.
type report struct {
	*common
	*podState
	health *podhealth.Health // has its own lock

	verdict *podstatus.Verdict
	pause   podstatus.Pause
	tries   wait.Backoff                     // after failed attempts at what is tried now
	last    *corev1.ContainerStateTerminated // the end of the run before this one
	again   bool                             // another run follows
	killed  time.Time                        // start of the run that we ended and that another run follows
	images  map[string]pulled                // by the name that the pod asks for
	lifecycle
	announced
}

// announced is what was reported already.
type announced struct {
	begun    bool      // a status
	told     time.Time // start of a run
	diskTold string    // disk fault
	hinted   string    // hint for a clone
}

// newReport returns the report for s. It takes from the pod's status what an earlier process knew.
func newReport(c *common, s *podState) *report {
	r := &report{common: c, podState: s, health: c.newHealth(s), images: map[string]pulled{}}
	f := s.look()
	r.life, _ = contract.ParseLifecycle(f.pod.Annotations)
	status := f.status.ContainerStatuses
	if len(status) > 0 {
		r.last = status[0].LastTerminationState.Terminated.DeepCopy()
		r.begun = true
	}
	if f.rec != nil {
		r.health.Resume(&f.status, f.rec)
		r.told = f.rec.StartedAt
		if len(status) > 0 && status[0].ContainerID == contract.ContainerIDScheme+string(f.rec.ID) {
			r.images[convert.Image(f.pod)] = pulled{name: status[0].Image, id: f.rec.ImageDigest, ref: status[0].ImageID}
		}
	}
	if f.status.Phase == corev1.PodFailed && f.status.Reason != "" {
		r.verdict = &podstatus.Verdict{Reason: f.status.Reason, Message: f.status.Message}
	}
	return r
}

// publish computes the status and requests its write. hold is how long the write may wait for a newer status.
func (r *report) publish(hold time.Duration) {
	f := r.look()
	v := podstatus.View{
		Pod: f.pod, Gates: f.gates, HostIP: r.cfg.Node.IP, Record: f.rec, Pause: r.pause, Last: r.last, Again: r.again,
		Reach: r.health.Reach(), Verdict: r.verdict, Asleep: r.sleeping(f),
		Health: r.health.Shown(f.pod, f.rec), Cut: f.removal == nil && r.verdict == nil && cut(f.rec, r.killed),
	}
	if f.rec != nil {
		v.Image, v.Images = r.images[convert.Image(f.pod)].shown(f.rec.ImageDigest), r.containerImages(f)
	}
	if r.static && r.verdict == nil {
		v.Record, v.IP = podstatus.Machine(f.pod), r.address(f)
	} else if f.rec != nil && !podstatus.Over(f.rec) {
		v.IP = r.address(f)
	} else if f.rec != nil || v.Asleep {
		v.IP = f.status.PodIP // a stopped VM keeps the address that it had
	}
	status := v.Status(f.status, time.Now())
	r.show(status)
	annotations := r.annotations(f, v.IP)
	r.sayHint(annotations[contract.KeyPostCloneHint])
	r.sayDisk(v.Record)
	if r.begun {
		hold = 0
	}
	r.begun = r.begun || hold == 0
	r.writer.set(status, annotations, hold)
}

// containerImages returns the images of our VM's containers. Preconditions: f has a VM.
func (r *report) containerImages(f facts) map[string]podstatus.Image {
	out := map[string]podstatus.Image{}
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		if x := f.rec.Container(c.Name); x != nil {
			out[c.Name] = r.images[c.Image].shown(x.ImageDigest)
		}
	}
	return out
}

// refuse ends the pod before anything was done for it.
func (r *report) refuse(reason, message string) {
	r.log.Warn("pod refused", "err", message)
	r.verdict = &podstatus.Verdict{Reason: reason, Message: message}
	r.event(corev1.EventTypeWarning, reason, "%s", message)
	r.Metrics.lifecycle.WithLabelValues("create", "refused").Inc()
	r.publish(0)
}

// retry shows why the container waits and returns when to try again: after base, then twice as long each time.
func (r *report) retry(ctx context.Context, reason string, err error, base, most time.Duration) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if r.pause.Reason != reason || r.pause.Message != err.Error() {
		kind := eventFailed
		if reason == reasonImageMissing {
			kind = reasonImageMissing
		}
		if reason == podstatus.ReasonCreating { // the error is complete without the reason
			r.event(corev1.EventTypeWarning, eventFailedMount, "%s", err)
		} else {
			r.event(corev1.EventTypeWarning, kind, "Error: %s: %s", reason, err)
		}
		r.log.Warn("vm not created", "op", reason, "err", err)
	}
	r.pause = podstatus.Pause{Reason: reason, Message: err.Error()}
	r.publish(0)
	return after(step(&r.tries, base, most))
}

// succeeded ends the retries of what was tried last.
func (r *report) succeeded() { r.tries, r.pause = wait.Backoff{}, podstatus.Pause{} }

// late returns how much of the active deadline of f's pod is left; a very long time when it has none.
func (r *report) late(f facts) time.Duration {
	limit := f.pod.Spec.ActiveDeadlineSeconds
	if limit == nil || f.status.StartTime == nil || podstatus.Over(f.rec) && !r.again {
		return math.MaxInt64
	}
	return time.Until(f.status.StartTime.Add(time.Duration(*limit) * time.Second))
}

// sayDisk announces that a disk has a fault, or that the fault is over.
func (r *report) sayDisk(rec *vm.Record) {
	fault := podstatus.DiskFault(rec)
	if fault == r.diskTold {
		return
	}
	r.diskTold = fault
	switch {
	case fault != "":
		r.event(corev1.EventTypeWarning, fault, "VM %s: %s", r.vmName, rec.Message)
	case rec != nil && rec.State == vm.StateRunning:
		r.event(corev1.EventTypeNormal, eventDiskWell, "The disk of VM %s works again", r.vmName)
	}
}
