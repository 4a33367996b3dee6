package podprovider

import (
	"context"
	"encoding/base64"
	"fmt"
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

// publish computes the status and requests a write of it. hold is how long the write may be delayed for a newer status.
func (r *report) publish(hold time.Duration) {
	f := r.look()
	v := podstatus.View{
		Pod: f.pod, Gates: f.gates, HostIP: r.cfg.Node.IP, Record: f.rec, Pause: r.pause, Last: r.last, Again: r.again,
		Logins: f.logins, Networks: r.network.text(), Reach: r.health.Reach(), Verdict: r.verdict, Asleep: r.sleeping(f),
		Resize: r.resize, Health: r.health.Shown(f.pod, f.rec), Cut: f.removal == nil && r.verdict == nil && stoppedOutside(f.rec, r.killed),
	}
	v.Pause.Ephemeral = r.debug
	if f.rec != nil {
		v.Image, v.Images = r.images[convert.Image(f.pod)].shown(f.rec.ImageDigest), r.containerImages(f)
	}
	if r.static && r.verdict == nil && r.pause.Refused == "" {
		v.Record, v.IP = podstatus.Machine(f.pod), r.address(f)
	} else if f.rec != nil && !podstatus.Over(f.rec) {
		v.IP = r.address(f)
	} else if f.rec != nil || v.Asleep {
		v.IP = f.status.PodIP // a stopped VM keeps its last address
	}
	status := v.Status(f.status, time.Now())
	r.show(status)
	annotations := r.annotations(f, v.IP)
	r.sayHint(annotations[contract.KeyPostCloneHint])
	r.sayFault(v.Record)
	r.sayBackOff(f)
	r.sayConfigError(f)
	if r.begun {
		hold = 0
	}
	r.begun = r.begun || hold == 0
	r.writer.set(status, annotations, hold)
}

// containerImages returns the images of the containers and volumes of f's VM. Precondition: f has a VM.
func (r *report) containerImages(f facts) map[string]podstatus.Image {
	out := map[string]podstatus.Image{}
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		if x := f.rec.Container(c.Name); x != nil {
			out[c.Name] = r.images[convert.ImageOf(f.pod, &c)].shown(x.ImageDigest)
		}
	}
	for _, v := range convert.ImageVolumes(f.pod) {
		if i := slices.IndexFunc(f.rec.ImageVolumes, func(x vm.ImageVolume) bool { return x.Volume == v.Name }); i >= 0 {
			out[podstatus.VolumeKey(v.Name)] = r.images[v.Image.Reference].shown(f.rec.ImageVolumes[i].ImageDigest)
		}
	}
	for _, c := range f.pod.Spec.EphemeralContainers {
		if x := podstatus.EphemeralOf(f.rec, c.Name); x != nil {
			out[c.Name] = r.images[c.Image].shown(x.Record.ImageDigest)
		}
	}
	return out
}

// supported reports whether the node can provide what pod asks for. Otherwise it refuses the pod.
func (r *report) supported(pod *corev1.Pod) bool {
	if convert.WrongOS(pod) {
		r.refuse(reasonWrongOS, "Failed to admit pod as the OS field doesn't match node OS")
		return false
	}
	if errs := convert.Check(pod); len(errs) > 0 {
		r.refuse(reasonNotSupported, errs.ToAggregate().Error())
		return false
	}
	return true
}

// refuse shows why this node cannot run the pod. The pod stays Pending until it is changed or deleted. It does not become
// Failed, because a controller would immediately replace it by another pod that is refused.
func (r *report) refuse(reason, message string) turn {
	pause := podstatus.Pause{Reason: reasonConfigError, Message: message, Refused: reason}
	if r.pause.Reason != pause.Reason || r.pause.Message != pause.Message || r.pause.Refused != pause.Refused {
		r.log.Warn("pod refused", "err", message)
		r.event(corev1.EventTypeWarning, reason, "%s", message)
		r.Metrics.lifecycle.WithLabelValues("create", "refused").Inc()
	}
	r.pause = pause
	r.publish(0)
	return whenWoken
}

// retry shows why the container waits, and returns when to try again. The delay grows from base to most.
func (r *report) retry(ctx context.Context, reason string, err error, base, most time.Duration) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if r.pause.Reason != reason || r.pause.Message != err.Error() {
		kind := eventFailed
		if reason == reasonImageMissing {
			kind = reasonImageMissing
		}
		if reason == podstatus.ReasonCreating { // the message is complete without the reason
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

// succeeded resets the back-off after a successful attempt.
func (r *report) succeeded() { r.tries, r.pause = wait.Backoff{}, podstatus.Pause{} }

// sayFault sends an Event when the running VM gets a fault, or when the fault is over.
func (r *report) sayFault(rec *vm.Record) {
	was, fault := r.faultTold, podstatus.Fault(rec)
	if fault == was {
		return
	}
	r.faultTold = fault
	switch {
	case fault != "":
		r.event(corev1.EventTypeWarning, fault, "VM %s: %s", r.vmName, rec.Message)
	case rec == nil || rec.State != vm.StateRunning || was == vm.ReasonNoDrivers:
	case was == vm.ReasonFailedMount:
		r.event(corev1.EventTypeNormal, eventMounted, "The volumes of VM %s are mounted", r.vmName)
	case was == vm.ReasonClockWrong:
		r.event(corev1.EventTypeNormal, eventClockWell, "The clock of VM %s is right again", r.vmName)
	default:
		r.event(corev1.EventTypeNormal, eventDiskWell, "The disk of VM %s works again", r.vmName)
	}
}

// sayBackOff announces once per run that the guest waits before it starts a container again. The first pause is none.
func (r *report) sayBackOff(f facts) {
	if f.rec == nil || r.static {
		return
	}
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		x := f.rec.Container(c.Name)
		if x == nil || x.Status.State != vm.ContainerWaiting || x.Status.Reason != vm.ContainerCrashLoop || x.Status.Restarts == 0 || r.heldBack[c.Name] == x.Status.Run() {
			continue
		}
		r.heldBack[c.Name] = x.Status.Run()
		r.event(corev1.EventTypeWarning, eventBackOff, "Back-off restarting failed container %s", c.Name)
	}
}

// sayConfigError announces once what a container lacks before the guest can start it.
func (r *report) sayConfigError(f facts) {
	if f.rec == nil || r.static {
		return
	}
	for _, c := range slices.Concat(f.pod.Spec.InitContainers, f.pod.Spec.Containers) {
		x := f.rec.Container(c.Name)
		if x == nil || x.Status.State != vm.ContainerWaiting || x.Status.Reason != vm.ContainerConfigError || r.lacks[c.Name] == x.Status.Message {
			continue
		}
		r.lacks[c.Name] = x.Status.Message
		r.event(corev1.EventTypeWarning, eventFailed, "Error: %s", x.Status.Message)
	}
}

// slept reports whether the VM is hibernated or hibernating.
func (l *lifecycle) slept() bool {
	return l.life.State == contract.LifecycleHibernating || l.life.State == contract.LifecycleHibernated
}

// setLife sets the VM's lifecycle state for the annotations.
func (l *lifecycle) setLife(state contract.LifecycleState, message string) {
	l.life.State, l.life.Message = state, message
	l.tidy = l.tidy && !l.slept()
}

// annotations returns the annotations that describe the VM. An empty value removes the key.
func (r *report) annotations(f facts, ip string) map[string]string {
	a := map[string]string{}
	if r.static { // the creator of the pod wrote them
		return a
	}
	switch {
	case podstatus.Up(f.rec):
		a[contract.KeyID] = string(f.rec.ID)
		if ip != "" {
			a[contract.KeyIP] = ip
		}
		a[contract.KeyNetworkStatus] = networkStatus(f, ip)
	case r.sleeping(f):
		a[contract.KeyID], a[contract.KeyIP], a[contract.KeyNetworkStatus] = "", "", ""
	}
	if r.rebooted.ID != "" {
		a[contract.KeyRebooted] = r.rebooted.String()
	}
	if r.dumped.File != "" {
		a[contract.KeyMemoryDumped] = r.dumped.String()
	}
	if f.rec != nil {
		a[contract.KeyCID] = contract.CIDText(f.rec.CID)
		a[contract.KeyKernelSums] = contract.KernelSumsText(f.rec.KernelSums.Kernel, f.rec.KernelSums.Initrd)
	}
	a[contract.KeyPlugged] = contract.PluggedText(r.plugged)
	if hint, known := r.hint(f); known {
		a[contract.KeyPostCloneHint] = hint
	}
	if r.life.State != "" || r.pause.Refused != "" || awaitsLife(f.pod) {
		r.settleLife(f)
		a[contract.KeyLifecycleState], a[contract.KeyLifecycleObserved], a[contract.KeyLifecycleMessage] = string(r.life.State), r.life.Observed, r.life.Message
	}
	return a
}

// networkStatus describes the interfaces of f's VM, whose first address is ip if it is known.
func networkStatus(f facts, ip string) string {
	var list []contract.NetworkStatus
	for i, nic := range f.rec.Plugged() {
		n := contract.NetworkStatus{Name: nic.Network, Interface: fmt.Sprintf("eth%d", i), MAC: nic.MAC, Default: i == 0}
		if i > 0 {
			ip = nic.IP
		}
		if nic.LinkDown {
			n.Link = contract.LinkDown
		}
		for _, address := range []string{ip, nic.IPv6} {
			if address != "" {
				n.IPs = append(n.IPs, address)
			}
		}
		list = append(list, n)
	}
	return contract.NetworkStatusText(list)
}

// awaitsLife reports whether the pod's annotations show the VM's lifecycle state, because a controller or user may wait for
// it. For other pods the conditions are enough.
func awaitsLife(pod *corev1.Pod) bool {
	return contract.AsksSnapshot(pod.Annotations) || contract.Hibernate(pod.Annotations)
}

// settleLife derives the lifecycle state from the VM, unless a transition has set it.
func (r *report) settleLife(f facts) {
	sleep := contract.Hibernate(f.pod.Annotations)
	switch {
	case r.verdict != nil:
		r.life.State, r.life.Message = contract.LifecycleFailed, r.verdict.Message
	case r.pause.Refused != "":
		r.life.State, r.life.Message = contract.LifecycleFailed, r.pause.Message
	case r.life.State == contract.LifecycleFailed && !awaitsLife(f.pod): // the pod is no longer refused
		r.life = contract.Lifecycle{}
	case podstatus.Up(f.rec) && hasIdentity(f.rec, r.health.Reach().Ready) && r.tidy && !sleep:
		r.life.State, r.life.Message = contract.LifecycleReady, ""
	case r.life.State == "", r.life.State == contract.LifecycleFailed:
		r.life.State, r.life.Message = contract.LifecycleCreating, ""
	}
	// The generation is observed only when the VM has the wanted state, or has failed.
	if r.life.State == contract.LifecycleFailed || r.life.State == contract.LifecycleReady && !sleep || r.life.State == contract.LifecycleHibernated && sleep {
		r.life.Observed = contract.Generation(f.pod.Annotations)
	}
}

// sleeping reports whether the VM is hibernated, on this node or elsewhere.
func (l *lifecycle) sleeping(f facts) bool {
	return f.rec != nil && f.rec.State == vm.StateHibernated || f.rec == nil && l.life.State == contract.LifecycleHibernated
}

// hintDelay is how long a clone may take to set its identity before a hint asks the user to do it. An agent needs much less
// time.
const hintDelay = 30 * time.Second

// hintAfter returns when to check whether rec needs a hint.
func hintAfter(rec *vm.Record) turn {
	if !lacksIdentity(rec) {
		return whenWoken
	}
	if left := time.Until(rec.StartedAt.Add(hintDelay)); left > 0 {
		return after(left)
	}
	return whenWoken
}

// hint returns the commands that the user must run in the guest, in base64. It returns "" if none are needed. known is false
// while that is not known.
func (r *report) hint(f facts) (text string, known bool) {
	if f.rec == nil || f.rec.Snapshot == "" && f.pod.Annotations[contract.KeyPostCloneHint] == "" {
		return "", false
	}
	if !lacksIdentity(f.rec) || r.health.Reach().Ready || time.Since(f.rec.StartedAt) < hintDelay {
		return "", true
	}
	commands := hintCommands(f.rec)
	if commands == "" {
		return "", true
	}
	return base64.StdEncoding.EncodeToString([]byte(commands)), true
}

// sayHint sends an Event with a hint, once.
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

// hintCommands returns the commands that set the identity of rec's guest.
func hintCommands(rec *vm.Record) string {
	facts := postclone.Facts{Hypervisor: rec.Driver, ImageType: rec.ImageType, Image: rec.Spec.Image, Windows: rec.Spec.IsWindows()}
	for i, nic := range rec.NICs {
		facts.StaticNIC = facts.StaticNIC || nic.IP != "" && !nic.DHCP
		facts.FixedMAC = facts.FixedMAC || i < len(rec.Resume.MACs) && !strings.EqualFold(rec.Resume.MACs[i], nic.MAC)
	}
	text, err := postclone.Commands(postclone.Classify(facts), postclone.Clone{
		ID: rec.ID, Hostname: rec.Spec.Hostname, NICs: vm.GuestNICs(rec.NICs), MACs: rec.Resume.MACs, MachineID: rec.Resume.MachineID,
	})
	if err != nil {
		return ""
	}
	return text
}
