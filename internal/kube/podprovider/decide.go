package podprovider

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// action is the next thing that a worker does for its pod.
type action int

const (
	actRemove         action = iota // removes the VM of a pod that is being deleted
	actNone                         // does nothing, because the pod has ended
	actReport                       // reports the verdict on a pod that has ended
	actMonitorMachine               // monitors the machine of a static pod
	actForget                       // drops the record of a lost VM that can be created again without loss
	actGiveUp                       // evicts a pod whose VM is lost
	actExpire                       // stops a pod that has exceeded its active deadline
	actReject                       // fails a new pod whose ports of the node another pod has
	actCreate                       // creates the VM, or resumes it from elsewhere
	actStart                        // starts a VM that never ran
	actShow                         // only updates the pod's status
	actKeep                         // monitors a running VM and keeps its volumes up to date
	actAddContainers                // adds ephemeral containers to a running VM
	actResize                       // gives the containers of a running VM the resources of the pod
	actPause                        // pauses the guest of a running VM
	actUnpause                      // lets the paused guest continue
	actPlug                         // plugs a volume into the running VM, or takes one away
	actConnect                      // attaches the running VM to a network, or detaches it from one
	actReboot                       // starts the guest again, in its process
	actDump                         // writes the memory of the guest to a volume
	actStopForKill                  // stops the VM because a probe or hook requires that
	actHibernate                    // hibernates the VM
	actStore                        // stores the state of the hibernated VM in the registry, if the node has one
	actWake                         // wakes the VM
	actFinish                       // reports that no run follows
	actSchedule                     // decides when the next run begins
	actRestart                      // begins the next run
	actRestartManaged               // begins the next run of a managed VM, in place
)

// observation is the input of decide: the state of the pod and of its VM.
type observation struct {
	pod     *corev1.Pod // as the API server has it, without the status
	rec     *vm.Record  // nil: the pod has no VM (yet)
	lost    bool        // the engine reports that the VM is gone
	clash   bool        // another pod has a port of the node that this new pod wants, and a new pod in its place does not follow at once
	leaving bool        // the pod is being removed
	ended   bool        // the pod is Succeeded or Failed
	judged  bool        // the pod has a verdict
	static  bool        // the pod represents a machine that the node does not run
	node    abilities
	left    time.Duration // time until the pod's active deadline
	reboot  bool          // somebody asked to start the guest again
	dump    bool          // somebody asked for the memory of the guest
	kill    bool          // a probe or hook requires that the VM is stopped
	answers bool          // the guest answers at its address
	killed  time.Time     // start of the run that was stopped for a probe or hook
	stored  bool          // the state of the hibernated VM is stored; see actStore
	adds    bool          // the VM lacks ephemeral containers of the pod that nobody adds at the moment
	plug    bool          // the VM has other plugged volumes than the pod says
	connect bool          // the VM has other networks than the pod says
	resize  bool          // containers of the VM have other resources than in the pod, and the VM can change that
	waits   waits
}

// abilities says what the node can do.
type abilities struct {
	snapshots bool // the node can hibernate VMs
	remote    bool // the node has a registry
}

// waits holds the delays before the next attempts. An attempt is due if its delay is zero or negative.
type waits struct {
	hibernate, wake time.Duration
	add, resize     time.Duration
	plug, connect   time.Duration
	dump            time.Duration
	pause           time.Duration // also for unpausing
	start           time.Duration
	scheduled       bool // start is set for the last end of the VM
}

// decide returns the next action of a worker and, for actShow and actKeep, when the worker decides again if nothing wakes it.
// It is pure.
func decide(s observation) (action, turn) {
	switch {
	case s.leaving:
		return actRemove, whenWoken
	case s.ended:
		return actNone, whenWoken
	case s.judged:
		return actReport, whenWoken
	case s.static:
		return actMonitorMachine, whenWoken
	case s.lost && (s.rec.StartedAt.IsZero() || s.rec.State == vm.StateHibernated && s.node.remote):
		return actForget, whenWoken
	case s.lost:
		return actGiveUp, whenWoken
	case s.left <= 0:
		return actExpire, whenWoken
	case s.clash && s.rec == nil:
		return actReject, whenWoken
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

func (s observation) running() (action, turn) {
	what, next := s.runs()
	if s.dump {
		next = sooner(next, after(s.waits.dump))
	}
	return what, next
}

func (s observation) runs() (action, turn) {
	switch {
	case s.kill:
		return actStopForKill, whenWoken
	case s.unsettledPause() && s.waits.pause <= 0:
		if contract.Paused(s.pod.Annotations) {
			return actPause, whenWoken
		}
		return actUnpause, whenWoken
	case s.unsettledPause():
		return actKeep, after(s.waits.pause)
	case s.reboot:
		return actReboot, whenWoken
	case s.dump && s.waits.dump <= 0:
		return actDump, whenWoken
	case !contract.Hibernate(s.pod.Annotations) || !s.node.snapshots:
		return s.keeps()
	case !podstatus.Up(s.rec) || !hasIdentity(s.rec, s.answers): // a VM can be saved only when its guest has its own identity
		return actKeep, whenWoken
	case s.waits.hibernate > 0:
		return actKeep, after(s.waits.hibernate)
	}
	return actHibernate, whenWoken
}

// unsettledPause reports whether the guest is paused and must not be, or the other way around. Precondition: the VM runs.
func (s observation) unsettledPause() bool {
	return contract.Paused(s.pod.Annotations) != podstatus.Paused(s.rec)
}

// keeps returns the action for a running VM that continues to run. A guest that is not set up gets no container, no resources, no volume and no network, and
// neither does one that is paused.
func (s observation) keeps() (action, turn) {
	next := whenWoken
	switch {
	case !podstatus.Up(s.rec) || s.rec.Resume != nil || podstatus.Paused(s.rec):
		return actKeep, whenWoken
	case s.resize && s.waits.resize <= 0:
		return actResize, whenWoken
	case s.adds && s.waits.add <= 0:
		return actAddContainers, whenWoken
	case s.plug && s.waits.plug <= 0:
		return actPlug, whenWoken
	case s.connect && s.waits.connect <= 0:
		return actConnect, whenWoken
	}
	if s.resize {
		next = sooner(next, after(s.waits.resize))
	}
	if s.adds {
		next = sooner(next, after(s.waits.add))
	}
	if s.plug {
		next = sooner(next, after(s.waits.plug))
	}
	if s.connect {
		next = sooner(next, after(s.waits.connect))
	}
	return actKeep, next
}

func (s observation) hibernated() (action, turn) {
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

func (s observation) stopped() (action, turn) {
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

// restarts applies the restart policies of the pod to the end of its VM. A run that was stopped for a probe or hook counts as failed.
// If containers have policies of their own and have ended by themselves, their guest has applied the policies already.
func (s observation) restarts() bool {
	code := int(podstatus.ExitCode(s.rec))
	failed := s.killed.Equal(s.rec.StartedAt) || stoppedOutside(s.rec, s.killed)
	if convert.OwnRestarts(s.pod) && len(s.rec.Containers) > 0 && s.rec.ExitCode != nil && !failed {
		return false
	}
	return convert.AnyRestarts(s.pod, code, failed || code != 0)
}

// stoppedOutside reports whether the run of rec was stopped from outside the pod, for example with `cocoon down`. Such a run
// counts as failed, even with exit code 0. killed is the start of the run that was stopped for a probe or hook.
func stoppedOutside(rec *vm.Record, killed time.Time) bool {
	return podstatus.Over(rec) && rec.Reason == vm.ReasonStopped && !killed.Equal(rec.StartedAt)
}

// lacksIdentity reports whether rec is a running clone whose guest still has the identity of the VM that it was cloned from.
func lacksIdentity(rec *vm.Record) bool {
	return rec != nil && rec.State == vm.StateRunning && rec.Cloned && rec.Resume != nil && rec.Resume.Clone
}

// hasIdentity reports whether the guest of rec has its own identity. A disk guest may have no agent that sets its identity.
// Such a guest has its own identity if it is not a clone, or if it answers at its address.
func hasIdentity(rec *vm.Record, answers bool) bool {
	return rec.Resume == nil || rec.ImageType == vm.ImageDisk && (answers || !lacksIdentity(rec))
}
