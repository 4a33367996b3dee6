package virtualmachineinstancereplicaset

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Pauses after failures. A pause is as long as the failures in a row have lasted, so it doubles each time, within these bounds.
const (
	firstStartPause = 10 * time.Second // before an instance is replaced that ended at once
	maxStartPause   = 5 * time.Minute
	firstRetryPause = 5 * time.Second // before an instance is created again that the API server refused
	maxRetryPause   = time.Minute
	settled         = 30 * time.Second // an instance that has run for so long has started
)

// An instance whose node is away never ends. It is replaced after its grace period and a delay.
const (
	defaultGrace = 30 * time.Second // that of a pod
	mostDelay    = 30 * time.Second
)

// mostWrites bounds the instances that one step creates, and those that it deletes. The next step follows from their changes.
const mostWrites = 20

// seen is what decide knows of a set.
type seen struct {
	set      *v1.VirtualMachineInstanceReplicaSet
	selector labels.Selector
	all      []*v1.VirtualMachineInstance // of the namespace
	refusal  string                       // why Cocoon cannot run such instances, "" if it can
	now      time.Time
}

// step is what happens next to a set.
type step struct {
	adopt   []*v1.VirtualMachineInstance // they become the set's
	release []*v1.VirtualMachineInstance // they are no longer the set's
	remove  []*v1.VirtualMachineInstance // they are deleted
	create  int                          // instances to create
	wait    time.Duration                // until the set is looked at again; 0: when something changes
	status  v1.VirtualMachineInstanceReplicaSetStatus
}

// writes reports whether the step changes instances.
func (s *step) writes() bool {
	return len(s.adopt)+len(s.release)+len(s.remove)+s.create > 0
}

// decide returns the next step of a set. It reads no clock.
//
// An instance that shuts down counts as a replica until it is gone or its time is over. Its replacement is created after that. So there are
// never more VMs than replicas. Two managers that do not know of each other choose the same names; see name.
func decide(x seen) step {
	s := step{status: *x.set.Status.DeepCopy()}
	var alive, finished, leaving []*v1.VirtualMachineInstance
	for _, vmi := range x.all {
		mine, matches := metav1.IsControlledBy(vmi, x.set), x.selector.Matches(labels.Set(vmi.Labels))
		switch {
		case mine && !matches:
			if x.set.DeletionTimestamp == nil && vmi.DeletionTimestamp == nil {
				s.release = append(s.release, vmi)
			}
			continue
		case !mine && (!matches || metav1.GetControllerOfNoCopy(vmi) != nil || vmi.DeletionTimestamp != nil || vmi.IsFinal() || x.set.DeletionTimestamp != nil):
			continue
		case !mine:
			s.adopt = append(s.adopt, vmi)
		}
		switch {
		case vmi.DeletionTimestamp != nil:
			leaving = append(leaving, vmi)
		case vmi.IsFinal():
			finished = append(finished, vmi)
		default:
			alive = append(alive, vmi)
		}
	}
	s.count(x, alive)
	if x.set.DeletionTimestamp == nil && !x.set.Spec.Paused {
		s.scale(x, alive, finished, leaving)
	}
	s.describe(x, alive)
	return s
}

// count sets the numbers of the status.
func (s *step) count(x seen, alive []*v1.VirtualMachineInstance) {
	s.status.Replicas, s.status.ReadyReplicas, s.status.LabelSelector = int32(len(alive)), 0, "" //nolint:gosec // instances of a namespace
	for _, vmi := range alive {
		if ready(vmi) {
			s.status.ReadyReplicas++
		}
	}
	if _, selectable := x.selector.Requirements(); selectable {
		s.status.LabelSelector = x.selector.String()
	}
}

// scale decides what is created and deleted.
func (s *step) scale(x seen, alive, finished, leaving []*v1.VirtualMachineInstance) {
	want := replicas(x.set)
	if len(alive) >= want {
		s.remove = append(finished, surplus(alive, len(alive)-want)...)
		s.remove = s.remove[:min(len(s.remove), mostWrites)]
		s.drop(ReasonCreateFailed)
		return
	}
	if x.refusal != "" {
		return
	}
	s.replace(x, finished)
	s.create = want - len(alive) - len(finished) - s.shuttingDown(leaving, x.now)
	s.create = min(max(s.create, 0), mostWrites)
	if c := s.failure(); c != nil && c.Reason == ReasonCreateFailed && s.create > 0 {
		if rest := s.pause(firstRetryPause, maxRetryPause) - x.now.Sub(c.LastProbeTime.Time); rest > 0 {
			s.create = 0
			s.again(rest)
		}
	}
}

// shuttingDown counts the instances that may still end in time.
func (s *step) shuttingDown(leaving []*v1.VirtualMachineInstance, now time.Time) (n int) {
	for _, vmi := range leaving {
		grace := defaultGrace
		if g := vmi.Spec.TerminationGracePeriodSeconds; g != nil {
			grace = time.Duration(max(*g, 1)) * time.Second
		}
		if rest := vmi.DeletionTimestamp.Add(grace + mostDelay).Sub(now); rest > 0 {
			s.again(rest)
			n++
		}
	}
	return n
}

// surplus returns n instances to delete: those that are on no node, then those that are not ready, then the newest.
func surplus(alive []*v1.VirtualMachineInstance, n int) []*v1.VirtualMachineInstance {
	rank := func(vmi *v1.VirtualMachineInstance) int {
		switch {
		case vmi.Status.NodeName == "":
			return 0
		case !ready(vmi):
			return 1
		}
		return 2
	}
	all := slices.SortedFunc(slices.Values(alive), func(a, b *v1.VirtualMachineInstance) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name))
	})
	return all[:n]
}

// replace deletes finished instances. One that ended at once stays for a while, unless the template has changed.
func (s *step) replace(x seen, finished []*v1.VirtualMachineInstance) {
	slices.SortFunc(finished, func(a, b *v1.VirtualMachineInstance) int {
		return cmp.Or(ended(a).Compare(ended(b)), cmp.Compare(a.Name, b.Name))
	})
	for _, vmi := range finished {
		if early(vmi) && apiequality.Semantic.DeepEqual(vmi.Spec, kubevirt.SpecOf(vmi, x.set.Spec.Template)) {
			if c := s.failure(); c == nil || c.Reason != ReasonCreateFailed { // that one is cleared first: it bounds the creations
				s.fail(ReasonStartFailed, reasonOf(vmi), ended(vmi), ended(vmi))
			}
			if rest := s.pause(firstStartPause, maxStartPause) - x.now.Sub(ended(vmi)); rest > 0 {
				s.again(rest)
				continue
			}
		}
		if len(s.remove) < mostWrites {
			s.remove = append(s.remove, vmi)
		}
	}
}

// pause returns how long to wait after the last failure. Preconditions: there is one.
func (s *step) pause(first, most time.Duration) time.Duration {
	c := s.failure()
	return min(max(c.LastProbeTime.Sub(c.LastTransitionTime.Time), first), most)
}

// again makes the set be looked at again after d at the latest.
func (s *step) again(d time.Duration) {
	if s.wait == 0 || d < s.wait {
		s.wait = d
	}
}

// ended returns when a finished instance ended.
func ended(vmi *v1.VirtualMachineInstance) time.Time { return kubevirt.Since(vmi, vmi.Status.Phase) }

// early reports whether a finished instance ended before it had started.
func early(vmi *v1.VirtualMachineInstance) bool {
	began := kubevirt.Since(vmi, v1.Running)
	return !ended(vmi).IsZero() && (began.IsZero() || ended(vmi).Sub(began) < settled)
}

// reasonOf says why a finished instance is not replaced at once.
func reasonOf(vmi *v1.VirtualMachineInstance) string {
	text := fmt.Sprintf("the instance %s ended with the phase %s before it had run for %s", vmi.Name, vmi.Status.Phase, settled)
	if c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceSynchronized); c != nil && c.Message != "" {
		return text + ": " + c.Message
	}
	if c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceReady); c != nil && c.Message != "" {
		return text + ": " + c.Message
	}
	return text
}

// describe sets the conditions that do not depend on the step.
func (s *step) describe(x seen, alive []*v1.VirtualMachineInstance) {
	if x.set.Spec.Paused {
		s.set(condition{Type: v1.VirtualMachineInstanceReplicaSetReplicaPaused, Reason: ReasonPaused, Message: "spec.paused is true: no instance is created or deleted", LastTransitionTime: metav1.NewTime(x.now)})
	} else {
		s.clear(v1.VirtualMachineInstanceReplicaSetReplicaPaused)
	}
	if x.refusal != "" {
		s.fail(kubevirt.ReasonNotSupported, x.refusal, x.now, time.Time{})
		return
	}
	s.drop(kubevirt.ReasonNotSupported)
	if s.started(x, alive) {
		s.drop(ReasonStartFailed)
	}
}

// started reports whether all instances have started.
func (s *step) started(x seen, alive []*v1.VirtualMachineInstance) bool {
	if c := s.failure(); c == nil || c.Reason != ReasonStartFailed {
		return true
	}
	if len(alive) < replicas(x.set) {
		return false
	}
	for _, vmi := range alive {
		began := kubevirt.Since(vmi, v1.Running)
		if began.IsZero() {
			return false
		}
		if rest := began.Add(settled).Sub(x.now); rest > 0 {
			s.again(rest)
			return false
		}
	}
	return true
}

func replicas(set *v1.VirtualMachineInstanceReplicaSet) int {
	if set.Spec.Replicas == nil {
		return 1
	}
	return max(int(*set.Spec.Replicas), 0)
}

func ready(vmi *v1.VirtualMachineInstance) bool {
	c := kubevirt.Condition(vmi, v1.VirtualMachineInstanceReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

type condition = v1.VirtualMachineInstanceReplicaSetCondition

// failure returns the condition ReplicaFailure, nil if there is none.
func (s *step) failure() *condition {
	for i := range s.status.Conditions {
		if s.status.Conditions[i].Type == v1.VirtualMachineInstanceReplicaSetReplicaFailure {
			return &s.status.Conditions[i]
		}
	}
	return nil
}

// fail notes a failure that was there at a time. The time of the transition is that of the first failure in a row for the reason.
func (s *step) fail(reason, message string, since, at time.Time) {
	s.set(condition{
		Type: v1.VirtualMachineInstanceReplicaSetReplicaFailure, Reason: reason, Message: message,
		LastTransitionTime: metav1.NewTime(since), LastProbeTime: metav1.NewTime(at),
	})
}

// drop drops the condition ReplicaFailure if it is there for the reason.
func (s *step) drop(reason string) {
	if c := s.failure(); c != nil && c.Reason == reason {
		s.clear(c.Type)
	}
}

// set sets a condition to true.
func (s *step) set(c condition) {
	c.Status = corev1.ConditionTrue
	for i, old := range s.status.Conditions {
		if old.Type == c.Type {
			if old.Reason == c.Reason {
				c.LastTransitionTime = old.LastTransitionTime
			}
			s.status.Conditions[i] = c
			return
		}
	}
	s.status.Conditions = append(s.status.Conditions, c)
}

func (s *step) clear(kind v1.VirtualMachineInstanceReplicaSetConditionType) {
	s.status.Conditions = slices.DeleteFunc(s.status.Conditions, func(c condition) bool { return c.Type == kind })
}
