package podprovider

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// action is the next thing that a worker does for its pod.
type action int

const (
	actRemove         action = iota // removes the VM of a pod that is being deleted
	actRest                         // nothing: the pod has ended
	actReport                       // reports the verdict on a pod that has ended
	actAttend                       // watches the machine of a static pod
	actForget                       // forgets a VM that is gone and can be had again
	actGiveUp                       // evicts a pod whose VM is gone
	actExpire                       // stops a pod that has used up its active deadline
	actCreate                       // creates the VM, or resumes it from elsewhere
	actStart                        // starts a VM that never ran
	actShow                         // shows the VM as it is
	actKeep                         // keeps a running VM monitored and its volumes up to date
	actStopForKill                  // stops the VM because a probe or hook demands that
	actHibernate                    // hibernates the VM
	actStore                        // stores the state of the hibernated VM where it should be
	actWake                         // wakes the VM
	actFinish                       // reports that the run was the last one
	actSchedule                     // decides when the next run begins
	actRestart                      // begins the next run
	actRestartManaged               // begins the next run of a managed VM, in place
)

// sight is all that a worker knows of its pod and the pod's VM when it decides what to do.
type sight struct {
	pod     *corev1.Pod // as the API server has it, without the status
	rec     *vm.Record  // nil: the pod has no VM (yet)
	lost    bool        // the engine reports that the VM is gone
	leaving bool        // the pod is being removed
	ended   bool        // the pod has reached a phase that it never leaves
	judged  bool        // there is a verdict on the pod
	static  bool        // the pod stands for a machine that the node does not run
	node    abilities
	left    time.Duration // of the pod's active deadline
	kill    bool          // a probe or hook demands that the VM is stopped
	answers bool          // the guest answers at its address
	killed  time.Time     // start of the run that we ended and that another run follows
	stored  bool          // the state of the hibernated VM is where it should be
	waits   waits
}

// abilities are what the node can do.
type abilities struct {
	snapshots bool // it can hibernate VMs
	remote    bool // it has a registry
}

// waits are how long to wait before things are tried again. Negative and zero: no longer.
type waits struct {
	hibernate, wake time.Duration
	start           time.Duration
	scheduled       bool // start belongs to the last end of the VM
}

// decide returns what a worker does next and, for an action that only shows or keeps the VM, when it looks again without
// being woken. It is pure.
func decide(s sight) (action, turn) {
	switch {
	case s.leaving:
		return actRemove, whenWoken
	case s.ended:
		return actRest, whenWoken
	case s.judged:
		return actReport, whenWoken
	case s.static:
		return actAttend, whenWoken
	case s.lost && (s.rec.StartedAt.IsZero() || s.rec.State == vm.StateHibernated && s.node.remote):
		return actForget, whenWoken
	case s.lost:
		return actGiveUp, whenWoken
	case s.left <= 0:
		return actExpire, whenWoken
	case s.rec == nil:
		return actCreate, whenWoken
	}
	switch s.rec.State {
	case vm.StateCreated:
		return actStart, whenWoken
	case vm.StateRunning:
		return s.running()
	case vm.StateHibernated:
		return s.hibernated()
	case vm.StateStopped, vm.StateError:
		return s.stopped()
	case vm.StateCreating:
	}
	return actShow, whenWoken
}

func (s sight) running() (action, turn) {
	switch {
	case s.kill:
		return actStopForKill, whenWoken
	case !contract.Hibernate(s.pod.Annotations) || !s.node.snapshots:
		return actKeep, whenWoken
	case !podstatus.Up(s.rec) || !itself(s.rec, s.answers): // its identity is not set up yet, and must be before a save
		return actKeep, whenWoken
	case s.waits.hibernate > 0:
		return actKeep, after(s.waits.hibernate)
	}
	return actHibernate, whenWoken
}

func (s sight) hibernated() (action, turn) {
	switch sleep := contract.Hibernate(s.pod.Annotations); {
	case !s.node.snapshots, sleep && s.stored:
		return actShow, whenWoken
	case sleep && s.waits.hibernate > 0:
		return actShow, after(s.waits.hibernate)
	case sleep:
		return actStore, whenWoken
	case s.waits.wake > 0:
		return actShow, after(s.waits.wake)
	}
	return actWake, whenWoken
}

func (s sight) stopped() (action, turn) {
	ask, _ := contract.ParseVMSpec(s.pod.Annotations)
	switch {
	case !s.restarts():
		return actFinish, whenWoken
	case ask.Managed:
		return actRestartManaged, whenWoken
	case !s.waits.scheduled:
		return actSchedule, whenWoken
	case s.waits.start > 0:
		return actShow, after(s.waits.start)
	}
	return actRestart, whenWoken
}

// restarts applies the pod's restart policy to the end of its VM. A run that we ended ourselves, because of a probe or
// hook, counts as failed.
func (s sight) restarts() bool {
	switch s.pod.Spec.RestartPolicy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return podstatus.ExitCode(s.rec) != 0 || s.killed.Equal(s.rec.StartedAt) || cut(s.rec, s.killed)
	default:
		return true
	}
}

// cut reports whether somebody else ended the run of rec, for example with `cocoon down`. Such a run did not succeed,
// whatever its exit code is. killed is the start of the run that we ended ourselves.
func cut(rec *vm.Record, killed time.Time) bool {
	return podstatus.Over(rec) && rec.Reason == vm.ReasonStopped && !killed.Equal(rec.StartedAt)
}

// estranged reports whether rec resumed from another VM's state and has not been given its own identity yet.
func estranged(rec *vm.Record) bool {
	return rec != nil && rec.State == vm.StateRunning && rec.Cloned && rec.Resume != nil && rec.Resume.Clone
}

// itself reports whether rec's guest has its own identity. A guest that boots its own image may have no agent, and then
// nobody records its identity. Such a guest counts as itself if it never was another VM, or if it answers at its address.
func itself(rec *vm.Record, answers bool) bool {
	return rec.Resume == nil || rec.ImageType == vm.ImageDisk && (answers || !estranged(rec))
}
