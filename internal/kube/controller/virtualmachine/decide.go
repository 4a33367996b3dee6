package virtualmachine

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Bounds of the pause before an instance that failed without ever running is replaced: 10 s times the square of the failures in a
// row, and up to half of it more, as in KubeVirt.
const (
	firstPause = 10 * time.Second
	maxPause   = 5 * time.Minute
)

// step is what happens next to a VirtualMachine.
type step struct {
	start  bool                             // its instance is created
	live   *v1.VirtualMachineInstanceSpec   // nil: the spec of its instance stays
	told   *v1.VirtualMachineInstanceStatus // nil: nothing is asked of its instance
	stop   bool                             // its instance is deleted
	wait   time.Duration                    // until the machine is looked at again; 0: when something changes
	status v1.VirtualMachineStatus

	template *v1.VirtualMachineInstanceSpec // without interfaces that the guest has given back; nil: the template stays
}

// seen is what decide knows of a machine.
type seen struct {
	vm       *v1.VirtualMachine
	template *v1.VirtualMachineInstanceTemplateSpec // of the next instance; nil: it is not known
	vmi      *v1.VirtualMachineInstance             // nil: there is none
	refusal  string                                 // why Cocoon cannot run such a machine, "" if it can
	reason   string                                 // for the condition, if there is a refusal
	staged   bool                                   // changes wait for a restart: the rollout strategy is Stage
	data     data
	now      time.Time
	jitter   float64 // from 0 to 1
}

// decide returns the next step of a machine. It reads no clock.
func decide(x seen) step {
	vm, vmi, now := x.vm, x.vmi, x.now
	s := step{status: *vm.Status.DeepCopy()}
	strategy, err := vm.RunStrategy()
	changed := vm.Status.RunStrategy != strategy
	s.failures(vmi, now, x.jitter)
	switch {
	case vm.DeletionTimestamp != nil:
		s.stop = vmi != nil
	case err != nil:
	case vmi == nil:
		s.begin(strategy, changed, now)
	case vmi.DeletionTimestamp == nil:
		s.end(vmi, strategy)
	}
	asked := s.start
	if s.start && (x.refusal != "" || x.data.holds() || vm.Status.RestoreInProgress != nil) { // once the machine is changed, its volumes are complete, or it is restored, it starts
		s.start, s.status.StateChangeRequests = false, vm.Status.StateChangeRequests
		strategy = vm.Status.RunStrategy
	}
	s.describe(x, strategy)
	s.dump(x)
	s.status.PrintableStatus = s.printable(x, asked)
	return s
}

// request returns the index of the first request of the kind, -1 if there is none.
func (s *step) request(action v1.StateChangeRequestAction) int {
	return slices.IndexFunc(s.status.StateChangeRequests, func(r v1.VirtualMachineStateChangeRequest) bool { return r.Action == action })
}

// begin decides whether an instance is created. There is none, so requests to stop are done.
func (s *step) begin(strategy v1.VirtualMachineRunStrategy, changed bool, now time.Time) {
	s.status.StateChangeRequests = slices.DeleteFunc(s.status.StateChangeRequests, func(r v1.VirtualMachineStateChangeRequest) bool { return r.Action == v1.StopRequest })
	requested := s.request(v1.StartRequest) >= 0
	switch strategy {
	case v1.RunStrategyAlways:
		s.start = true
	case v1.RunStrategyOnce:
		s.start = changed
	case v1.RunStrategyRerunOnFailure: // a failure leaves a request to start; see end
		s.start = changed || requested
	case v1.RunStrategyManual:
		s.start = requested
	default:
		s.status.StateChangeRequests, s.status.StartFailure = nil, nil
		return
	}
	if f := s.status.StartFailure; s.start && f != nil && f.RetryAfterTimestamp != nil {
		if s.wait = f.RetryAfterTimestamp.Sub(now); s.wait > 0 {
			s.start = false
			return
		}
		s.wait = 0
	}
	if s.start {
		s.status.StateChangeRequests = nil
	}
}

// end decides whether the instance is deleted.
func (s *step) end(vmi *v1.VirtualMachineInstance, strategy v1.VirtualMachineRunStrategy) {
	if i := s.request(v1.StopRequest); i >= 0 {
		if uid := s.status.StateChangeRequests[i].UID; uid != nil && *uid == vmi.UID {
			s.stop = true
			return
		}
		s.status.StateChangeRequests = slices.Delete(s.status.StateChangeRequests, i, i+1) // of an instance that has gone
	}
	final := vmi.IsFinal()
	if !final { // a request to start has been fulfilled
		s.status.StateChangeRequests = slices.DeleteFunc(s.status.StateChangeRequests, func(r v1.VirtualMachineStateChangeRequest) bool { return r.Action == v1.StartRequest })
	}
	switch strategy {
	case v1.RunStrategyAlways:
		s.stop = final
	case v1.RunStrategyRerunOnFailure:
		if s.stop = vmi.Status.Phase == v1.Failed; s.stop && s.request(v1.StartRequest) < 0 {
			s.status.StateChangeRequests = append(s.status.StateChangeRequests, v1.VirtualMachineStateChangeRequest{Action: v1.StartRequest})
		}
	case v1.RunStrategyManual, v1.RunStrategyOnce:
		if s.request(v1.StartRequest) >= 0 {
			s.stop = final // a new instance takes its place
		}
	default:
		s.stop = true
	}
}

// failures counts instances that failed without ever running.
func (s *step) failures(vmi *v1.VirtualMachineInstance, now time.Time, jitter float64) {
	if vmi == nil {
		return
	}
	if kubevirt.Ran(vmi) {
		s.status.StartFailure = nil
		return
	}
	f := s.status.StartFailure
	if vmi.Status.Phase != v1.Failed || f != nil && f.LastFailedVMIUID == vmi.UID {
		return
	}
	n := 1
	if f != nil {
		n = f.ConsecutiveFailCount + 1
	}
	pause := min(firstPause*time.Duration(min(n, 10)*min(n, 10)), maxPause)
	pause = min(pause+time.Duration(float64(pause)*jitter/2), maxPause)
	after := metav1.NewTime(now.Add(pause))
	s.status.StartFailure = &v1.VirtualMachineStartFailure{ConsecutiveFailCount: n, LastFailedVMIUID: vmi.UID, RetryAfterTimestamp: &after}
}

// describe sets what people read.
func (s *step) describe(x seen, strategy v1.VirtualMachineRunStrategy) {
	vm, vmi, now := x.vm, x.vmi, x.now
	if s.wait == 0 { // a start that waits is still to come
		s.status.RunStrategy = strategy
	}
	s.status.Created = vmi != nil
	s.status.ObservedGeneration, s.status.DesiredGeneration = vm.Generation, vm.Generation
	ready := vmi != nil && vmi.DeletionTimestamp == nil && isTrue(kubevirt.Condition(vmi, v1.VirtualMachineInstanceReady))
	s.status.Ready = ready
	why, text := "VMINotExists", "there is no instance"
	if vmi != nil || s.start { // the instance that is about to be there changes nothing of it
		why, text = "GuestNotRunning", "the guest does not run"
	}
	if vmi != nil {
		if c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceReady); c != nil {
			why, text = cmp.Or(c.Reason, why), cmp.Or(c.Message, text)
		}
	}
	s.set(v1.VirtualMachineReady, ready, why, text, now)
	s.paused(vmi, now)
	switch {
	case vmi == nil || vmi.DeletionTimestamp != nil:
		s.drop(v1.VirtualMachineRestartRequired)
	case x.template == nil:
	case changed(vmi, x.template):
		next, why := grown(x)
		if s.live = next; next == nil {
			text := "the template has changed; the change is effective after a restart"
			if why != "" {
				text += ": " + why
			}
			s.set(v1.VirtualMachineRestartRequired, true, "RestartRequired", text, now)
		}
	default:
		s.drop(v1.VirtualMachineRestartRequired)
		s.refusedSize(vmi, now)
	}
	s.detached(x)
	if x.refusal != "" {
		s.set(v1.VirtualMachineFailure, true, x.reason, x.refusal, now)
	} else {
		s.drop(v1.VirtualMachineFailure)
	}
}

// changed reports whether the instance is not what the template says now. A request may have started it paused, and volumes may have
// been added while it ran, which are in its status only.
func changed(vmi *v1.VirtualMachineInstance, template *v1.VirtualMachineInstanceTemplateSpec) bool {
	is, want := compared(vmi, template)
	return !apiequality.Semantic.DeepEqual(is, kubevirt.Known(want, is))
}

func compared(vmi *v1.VirtualMachineInstance, template *v1.VirtualMachineInstanceTemplateSpec) (is, want v1.VirtualMachineInstanceSpec) {
	is, want = vmi.Spec, kubevirt.SpecOf(vmi, template)
	want.StartStrategy = is.StartStrategy
	for _, v := range vmi.Status.VolumeStatus {
		if v.HotplugVolume != nil {
			want = kubevirt.Without(want, v.Name)
		}
	}
	return is, want
}

// detached sets what the machine and its instance are without the interfaces that the guest has given back.
func (s *step) detached(x seen) {
	if x.vmi == nil || x.vmi.DeletionTimestamp != nil || x.vmi.Status.Phase != v1.Running || x.vm.Spec.Template == nil || x.vm.DeletionTimestamp != nil {
		return
	}
	if next := kubevirt.Detached(x.vmi.Spec, x.vmi); s.live == nil && !apiequality.Semantic.DeepEqual(next, x.vmi.Spec) {
		s.live = &next
		return
	}
	if next := kubevirt.Detached(x.vm.Spec.Template.Spec, x.vmi); !apiequality.Semantic.DeepEqual(next, x.vm.Spec.Template.Spec) {
		s.template = &next
	}
}

// grown returns the next spec of an instance that gets CPUs, memory or interfaces while it runs; nil if the change needs a restart, and why.
func grown(x seen) (next *v1.VirtualMachineInstanceSpec, why string) {
	if x.vmi.Status.Phase != v1.Running || x.refusal != "" {
		return nil, ""
	}
	next, why = kubevirt.Live(compared(x.vmi, x.template))
	if next != nil && x.staged {
		return nil, "the rollout strategy of the cluster is Stage"
	}
	for _, kind := range []v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceVCPUChange, v1.VirtualMachineInstanceMemoryChange} {
		if c := kubevirt.Condition(x.vmi, kind); next != nil && c != nil && c.Status == corev1.ConditionFalse {
			return nil, "an earlier change is not effective: " + c.Message
		}
	}
	return next, why
}

// refusedSize requires a restart if the guest cannot have what its instance says while it runs.
func (s *step) refusedSize(vmi *v1.VirtualMachineInstance, now time.Time) {
	for _, kind := range []v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceVCPUChange, v1.VirtualMachineInstanceMemoryChange} {
		c := kubevirt.Condition(vmi, kind)
		if c != nil && c.Status == corev1.ConditionFalse && (c.Reason == kubevirt.ReasonNotResized || c.Reason == corev1.PodReasonInfeasible) {
			s.set(v1.VirtualMachineRestartRequired, true, "RestartRequired", "the running guest cannot have its new size; the change is effective after a restart: "+c.Message, now)
		}
	}
}

// paused tells that the guest is paused, with the words of its instance.
func (s *step) paused(vmi *v1.VirtualMachineInstance, now time.Time) {
	if vmi != nil {
		if c := kubevirt.Condition(vmi, v1.VirtualMachineInstancePaused); isTrue(c) {
			s.set(v1.VirtualMachinePaused, true, c.Reason, c.Message, now)
			return
		}
	}
	s.drop(v1.VirtualMachinePaused)
}

// startsPaused reports whether somebody asked to start the machine paused.
func startsPaused(vm *v1.VirtualMachine) bool {
	return slices.ContainsFunc(vm.Status.StateChangeRequests, func(r v1.VirtualMachineStateChangeRequest) bool {
		return r.Action == v1.StartRequest && r.Data[v1.StartRequestDataPausedKey] == v1.StartRequestDataPausedTrue
	})
}

// switchesOn reports whether a machine that is off has to become one that always runs, because a request starts it paused. Such a
// request cannot change the run strategy itself: the strategy and the requests are written separately.
func switchesOn(vm *v1.VirtualMachine, vmi *v1.VirtualMachineInstance) bool {
	strategy, err := vm.RunStrategy()
	return err == nil && strategy == v1.RunStrategyHalted && vmi == nil && vm.DeletionTimestamp == nil && startsPaused(vm)
}

// switchOn makes vm one that always runs.
func switchOn(vm *v1.VirtualMachine) {
	always, on := v1.RunStrategyAlways, true
	if vm.Spec.Running != nil {
		vm.Spec.Running = &on
	} else {
		vm.Spec.RunStrategy = &always
	}
}

// printable returns the column Status: the first in KubeVirt's order that is true. asked says that the machine would start if nothing held it.
func (s *step) printable(x seen, asked bool) v1.VirtualMachinePrintableStatus {
	vm, vmi := x.vm, x.vmi
	running := vmi != nil && vmi.Status.Phase == v1.Running
	stopping := vmi != nil && !vmi.IsFinal() && (vmi.DeletionTimestamp != nil || s.stop)
	pull := ""
	unschedulable := false
	if vmi != nil {
		if c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceSynchronized); c != nil {
			pull = c.Reason
		}
		c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceConditionType(corev1.PodScheduled))
		unschedulable = c != nil && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	}
	switch {
	case vm.DeletionTimestamp != nil:
		return v1.VirtualMachineStatusTerminating
	case stopping:
		return v1.VirtualMachineStatusStopping
	case running && isTrue(kubevirt.Condition(vmi, v1.VirtualMachineInstancePaused)):
		return v1.VirtualMachineStatusPaused
	case running:
		return v1.VirtualMachineStatusRunning
	case pull == kubevirt.ReasonNoClaim:
		return v1.VirtualMachineStatusPvcNotFound
	case x.data.failed:
		return v1.VirtualMachineStatusDataVolumeError
	case unschedulable:
		return v1.VirtualMachineStatusUnschedulable
	case x.data.making:
		return v1.VirtualMachineStatusProvisioning
	case x.data.unbound && (asked || vmi != nil && !vmi.IsFinal()):
		return v1.VirtualMachineStatusWaitingForVolumeBinding
	case pull == string(v1.VirtualMachineStatusErrImagePull), pull == string(v1.VirtualMachineStatusImagePullBackOff):
		return v1.VirtualMachinePrintableStatus(pull)
	case vmi != nil && !vmi.IsFinal(), s.start:
		return v1.VirtualMachineStatusStarting
	case s.status.StartFailure != nil && (s.wait > 0 || vmi != nil && vmi.Status.Phase == v1.Failed):
		return v1.VirtualMachineStatusCrashLoopBackOff
	}
	return v1.VirtualMachineStatusStopped
}

func isTrue(c *v1.VirtualMachineInstanceCondition) bool {
	return c != nil && c.Status == corev1.ConditionTrue
}

func (s *step) set(kind v1.VirtualMachineConditionType, yes bool, reason, message string, now time.Time) {
	c := v1.VirtualMachineCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now)}
	if yes {
		c.Status = corev1.ConditionTrue
		if kind == v1.VirtualMachineReady {
			c.Reason, c.Message = "", ""
		}
	}
	s.status.Conditions = kubevirt.SetCondition(s.status.Conditions, c, func(c *v1.VirtualMachineCondition) (v1.VirtualMachineConditionType, corev1.ConditionStatus, *metav1.Time) {
		return c.Type, c.Status, &c.LastTransitionTime
	})
}

func (s *step) drop(kind v1.VirtualMachineConditionType) {
	s.status.Conditions = slices.DeleteFunc(s.status.Conditions, func(c v1.VirtualMachineCondition) bool { return c.Type == kind })
}

// instance returns the VirtualMachineInstance of vm from its template.
func instance(vm *v1.VirtualMachine, template *v1.VirtualMachineInstanceTemplateSpec, base kubevirt.Base, now time.Time) *v1.VirtualMachineInstance {
	vmi := kubevirt.Instance(vm, v1.VirtualMachineGroupVersionKind, template, vm.Name, now)
	vmi.Spec = kubevirt.Present(vmi.Spec)
	base.Annotate(&vmi.ObjectMeta)
	if startsPaused(vm) {
		paused := v1.StartStrategyPaused
		vmi.Spec.StartStrategy = &paused
	}
	return vmi
}
