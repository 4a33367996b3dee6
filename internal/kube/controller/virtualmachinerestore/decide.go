package virtualmachinerestore

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// action is what happens next to a restore: one change, which may be repeated after any failure.
type action int

// The actions, in the order in which a restore needs them. A machine that is new is created first, because its claims belong to it. One that
// exists is changed last, so it always has either all of its old claims or all of the new ones.
const (
	nothing action = iota
	stop           // the target is told to stop
	create         // the target is created, stopped
	lock           // the target names the restore as the one in progress
	claims         // the claims that are missing are created
	change         // the target gets its spec of the snapshot, with the new claims
	finish         // the restore is complete
	unlock         // the target no longer names the restore
)

// Bounds of the time until a restore in progress is looked at again: a tenth of the time that it has taken so far.
const (
	firstLook = 500 * time.Millisecond
	lastLook  = 30 * time.Second
)

// seen is what decide knows of a restore.
type seen struct {
	restore  *v1beta1.VirtualMachineRestore
	target   *v1.VirtualMachine // nil: there is none
	runs     bool               // the target has an instance
	snapshot *v1beta1.VirtualMachineSnapshot
	content  *v1beta1.VirtualMachineSnapshotContent
	made     []*corev1.PersistentVolumeClaim // one for each volumeBackup of the content; nil: it does not exist
	settled  bool                            // the claims are bound, or wait for their first pod
	refusal  string                          // why the restore can never be done, "" if it may
	obstacle string                          // why it cannot go on now, "" if it can
	now      time.Time
}

// step is what happens next to a restore.
type step struct {
	do     action
	wait   time.Duration // until the restore is looked at again; 0: when something changes
	status v1beta1.VirtualMachineRestoreStatus
}

// decide returns the next step of a restore. It reads no clock.
func decide(x seen) step {
	s := step{}
	if x.restore.Status != nil {
		s.status = *x.restore.Status.DeepCopy()
	}
	switch {
	case over(&s.status) || x.restore.DeletionTimestamp != nil:
		if x.locked() {
			s.do = unlock
		}
	case x.refusal != "":
		s.fail(x.refusal, x.now)
	default:
		s.progress(x)
	}
	return s
}

// over reports whether a restore has ended.
func over(s *v1beta1.VirtualMachineRestoreStatus) bool {
	if s.Complete != nil && *s.Complete {
		return true
	}
	for _, c := range s.Conditions {
		if c.Type == v1beta1.ConditionFailure && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

// locked reports whether the target names the restore.
func (x *seen) locked() bool {
	return x.target != nil && x.target.Status.RestoreInProgress != nil && *x.target.Status.RestoreInProgress == x.restore.Name
}

// restored reports whether the target has what the restore gives it. A target that was created still needs its claims.
func (x *seen) restored() bool {
	return x.target != nil && x.target.Annotations[lastRestore] == mark(x.restore)
}

// missing reports whether there are claims to create.
func (x *seen) missing() bool {
	for _, c := range x.made {
		if c == nil {
			return true
		}
	}
	return false
}

func (s *step) progress(x seen) {
	s.status.Complete = new(bool)
	s.wait = min(max(x.now.Sub(x.restore.CreationTimestamp.Time)/10, firstLook), lastLook)
	switch {
	case x.obstacle != "":
		s.waiting(x.obstacle, x.now)
		return
	case x.runs && !x.restored():
		s.notReady(x)
		return
	}
	s.status.Restores = volumes(x.restore, x.content)
	s.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Waiting for target update", x.now)
	switch {
	case x.target == nil:
		s.do = create
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Creating the target", x.now)
	case !x.locked() && (!x.restored() || x.missing() || !x.settled):
		s.do = lock
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Updating target spec", x.now)
	case x.missing():
		s.do = claims
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Creating new PVCs", x.now)
	case !x.settled:
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Waiting for new PVCs", x.now)
	case !x.restored():
		s.do = change
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Updating target spec", x.now)
	default:
		done, at := true, metav1.NewTime(x.now)
		s.do, s.status.Complete, s.status.RestoreTime = finish, &done, &at
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Operation complete", x.now)
		s.condition(v1beta1.ConditionReady, corev1.ConditionTrue, "Operation complete", x.now)
	}
}

// notReady decides what becomes of a restore whose target runs.
func (s *step) notReady(x seen) {
	policy := v1beta1.VirtualMachineRestoreWaitGracePeriodAndFail
	if p := x.restore.Spec.TargetReadinessPolicy; p != nil {
		policy = *p
	}
	of := x.restore.Spec.Target.Name
	rest := x.restore.CreationTimestamp.Add(v1beta1.DefaultGracePeriod).Sub(x.now)
	switch {
	case policy == v1beta1.VirtualMachineRestoreFailImmediate:
		s.fail(fmt.Sprintf("the VirtualMachine %s runs; stop it, and create another restore", of), x.now)
	case policy == v1beta1.VirtualMachineRestoreStopTarget:
		s.do = stop
		s.waiting(fmt.Sprintf("the VirtualMachine %s is being stopped", of), x.now)
	case policy == v1beta1.VirtualMachineRestoreWaitEventually:
		s.waiting(fmt.Sprintf("the VirtualMachine %s runs; stop it", of), x.now)
	case rest <= 0:
		s.fail(fmt.Sprintf("the VirtualMachine %s was not stopped within %s; stop it, and create another restore", of, v1beta1.DefaultGracePeriod), x.now)
	default:
		s.waiting(fmt.Sprintf("the VirtualMachine %s runs; stop it within %s after the restore was created", of, v1beta1.DefaultGracePeriod), x.now)
		s.wait = min(s.wait, rest)
	}
}

// waiting says why a restore does not go on.
func (s *step) waiting(why string, now time.Time) {
	s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, why, now)
	s.condition(v1beta1.ConditionReady, corev1.ConditionFalse, why, now)
}

// fail gives up.
func (s *step) fail(why string, now time.Time) {
	s.status.Complete = new(bool)
	s.waiting(why, now)
	s.condition(v1beta1.ConditionFailure, corev1.ConditionTrue, why, now)
	s.wait = firstLook
}

// condition sets a condition. KubeVirt's reasons are sentences.
func (s *step) condition(kind v1beta1.ConditionType, status corev1.ConditionStatus, reason string, now time.Time) {
	c := v1beta1.Condition{Type: kind, Status: status, Reason: reason, LastTransitionTime: metav1.NewTime(now)}
	s.status.Conditions = kubevirt.SetCondition(s.status.Conditions, c, func(c *v1beta1.Condition) (v1beta1.ConditionType, corev1.ConditionStatus, *metav1.Time) {
		return c.Type, c.Status, &c.LastTransitionTime
	})
}

// reason returns the reason of a condition, "" if there is none.
func reason(s *v1beta1.VirtualMachineRestoreStatus, kind v1beta1.ConditionType) string {
	if s == nil {
		return ""
	}
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c.Reason
		}
	}
	return ""
}
