package podprovider

import (
	"context"
	"encoding/base64"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/postclone"
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

// slept reports whether the VM is hibernated or on its way there.
func (l *lifecycle) slept() bool {
	return l.life.State == contract.LifecycleHibernating || l.life.State == contract.LifecycleHibernated
}

// setLife sets the VM's lifecycle state, which its annotations will show.
func (l *lifecycle) setLife(state contract.LifecycleState, message string) {
	l.life.State, l.life.Message = state, message
	l.tidy = l.tidy && !l.slept()
}

// annotations returns the annotations that describe the VM. An empty value removes the key.
func (r *report) annotations(f facts, ip string) map[string]string {
	a := map[string]string{}
	if r.static { // whoever runs the machine wrote them
		return a
	}
	switch {
	case podstatus.Up(f.rec):
		a[contract.KeyID] = string(f.rec.ID)
		if ip != "" {
			a[contract.KeyIP] = ip
		}
	case r.sleeping(f):
		a[contract.KeyID], a[contract.KeyIP] = "", ""
	}
	if hint, known := r.hint(f); known {
		a[contract.KeyPostCloneHint] = hint
	}
	// Somebody may wait for the VM's lifecycle state. An ordinary Kubernetes pod has its conditions for that.
	if r.life.State != "" || contract.AsksSnapshot(f.pod.Annotations) || contract.Hibernate(f.pod.Annotations) {
		r.settleLife(f)
		a[contract.KeyLifecycleState], a[contract.KeyLifecycleObserved], a[contract.KeyLifecycleMessage] = string(r.life.State), r.life.Observed, r.life.Message
	}
	return a
}

// settleLife derives the state from the VM where no transition sets it.
func (r *report) settleLife(f facts) {
	sleep := contract.Hibernate(f.pod.Annotations)
	switch {
	case r.verdict != nil:
		r.life.State, r.life.Message = contract.LifecycleFailed, r.verdict.Message
	case podstatus.Up(f.rec) && itself(f.rec, r.health.Reach().Ready) && r.tidy && !sleep:
		r.life.State, r.life.Message = contract.LifecycleReady, ""
	case r.life.State == "":
		r.life.State = contract.LifecycleCreating
	}
	// A state counts for a generation only when it is the state that was asked for.
	if r.life.State == contract.LifecycleFailed || r.life.State == contract.LifecycleReady && !sleep || r.life.State == contract.LifecycleHibernated && sleep {
		r.life.Observed = contract.Generation(f.pod.Annotations)
	}
}

// sleeping reports whether the VM is hibernated, here or elsewhere.
func (l *lifecycle) sleeping(f facts) bool {
	return f.rec != nil && f.rec.State == vm.StateHibernated || f.rec == nil && l.life.State == contract.LifecycleHibernated
}

// hintDelay is how long a clone may take to set up its identity before a person is asked to help. An agent answers much
// sooner.
const hintDelay = 30 * time.Second

// hintAfter returns when to check whether rec needs a hint.
func hintAfter(rec *vm.Record) turn {
	if !estranged(rec) {
		return whenWoken
	}
	if left := time.Until(rec.StartedAt.Add(hintDelay)); left > 0 {
		return after(left)
	}
	return whenWoken
}

// hint returns the commands that a person must run in the guest, in base64; "" when nothing must be run. known is false
// when there is nothing to say about it.
func (r *report) hint(f facts) (text string, known bool) {
	if f.rec == nil || f.rec.Snapshot == "" && f.pod.Annotations[contract.KeyPostCloneHint] == "" {
		return "", false
	}
	if !estranged(f.rec) || r.health.Reach().Ready || time.Since(f.rec.StartedAt) < hintDelay {
		return "", true
	}
	commands := hintCommands(f.rec)
	if commands == "" {
		return "", true
	}
	return base64.StdEncoding.EncodeToString([]byte(commands)), true
}

// sayHint reports a hint once.
func (r *report) sayHint(hint string) {
	if hint == r.hinted {
		return
	}
	if r.hinted = hint; hint == "" {
		return
	}
	r.event(corev1.EventTypeWarning, eventHint, "VM %s was cloned, but no agent in it answers; open `cocoon vm console %s` and run the commands of the annotation %s (base64); then the VM becomes ready",
		r.vmName, r.vmName, contract.KeyPostCloneHint)
	r.log.Warn("identity of cloned guest must be set by hand", "vm", r.vmName)
}

// hintCommands returns the commands that give rec its own identity.
func hintCommands(rec *vm.Record) string {
	facts := postclone.Facts{Hypervisor: rec.Driver, ImageType: rec.ImageType, Image: rec.Spec.Image}
	for i, nic := range rec.NICs {
		facts.StaticNIC = facts.StaticNIC || nic.IP != "" && !nic.DHCP
		facts.FixedMAC = facts.FixedMAC || i < len(rec.Resume.MACs) && !strings.EqualFold(rec.Resume.MACs[i], nic.MAC)
	}
	text, err := postclone.Commands(postclone.Classify(facts), postclone.Clone{
		ID: rec.ID, Hostname: rec.Spec.Hostname, NICs: rec.NICs, MACs: rec.Resume.MACs, MachineID: rec.Resume.MachineID,
	})
	if err != nil {
		return ""
	}
	return text
}
