package podprovider

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

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
