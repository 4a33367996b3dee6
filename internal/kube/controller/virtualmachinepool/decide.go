package virtualmachinepool

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// What the API server refuses is tried again after a pause. It is as long as the failures in a row have lasted, so it doubles each time, within
// these bounds.
const (
	firstPause = 5 * time.Second
	maxPause   = time.Minute
)

// mostWrites bounds the machines of each kind of change of one step. The next step follows from their changes.
const mostWrites = 20

// seen is what decide knows of a pool.
type seen struct {
	pool      *poolv1.VirtualMachinePool
	selector  labels.Selector
	all       []*v1.VirtualMachine          // of the namespace
	instances map[string]*metav1.ObjectMeta // of machines of the pool that need a restart
	refusal   string                        // why Cocoon cannot run such machines, "" if it can
	now       time.Time
}

// step is what happens next to a pool.
type step struct {
	release []*v1.VirtualMachine // they are no longer the pool's
	remove  []*v1.VirtualMachine // they are deleted
	update  []*v1.VirtualMachine // they become what the template says now
	restart []*v1.VirtualMachine // their instances are of an older revision
	create  int                  // machines to create
	wait    time.Duration        // until the pool is looked at again; 0: when something changes
	status  poolv1.VirtualMachinePoolStatus
}

// writes reports whether the step changes machines.
func (s *step) writes() bool {
	return len(s.release)+len(s.remove)+len(s.update)+len(s.restart)+s.create > 0
}

// decide returns the next step of a pool. It reads no clock.
//
// A machine that is being deleted counts as one until it is gone, so that its name, and the disks that go with it, are free for its
// replacement. A pool takes over no machine that it has not made: a later scale down would delete it with its disks.
func decide(x seen) step {
	s := step{status: *x.pool.Status.DeepCopy()}
	var alive []*v1.VirtualMachine
	leaving := 0
	for _, vm := range x.all {
		switch mine := metav1.IsControlledBy(vm, x.pool); {
		case !mine:
		case vm.DeletionTimestamp != nil:
			leaving++
		case x.selector.Matches(labels.Set(vm.Labels)):
			alive = append(alive, vm)
		case x.pool.DeletionTimestamp == nil && x.refusal == "": // with another selector, which cannot be, it would lose all
			s.release = append(s.release, vm)
		}
	}
	s.count(x, alive)
	if x.pool.DeletionTimestamp == nil && !x.pool.Spec.Paused {
		s.scale(x, alive, leaving)
	}
	s.describe(x)
	return s
}

// count sets the numbers of the status.
func (s *step) count(x seen, alive []*v1.VirtualMachine) {
	s.status.Replicas, s.status.ReadyReplicas, s.status.LabelSelector = int32(len(alive)), 0, "" //nolint:gosec // machines of a namespace
	for _, vm := range alive {
		if vm.Status.Ready {
			s.status.ReadyReplicas++
		}
	}
	if _, selectable := x.selector.Requirements(); selectable {
		s.status.LabelSelector = x.selector.String()
	}
}

// scale decides what is created, deleted and changed.
func (s *step) scale(x seen, alive []*v1.VirtualMachine, leaving int) {
	want := replicas(x.pool)
	if n := len(alive) - want; n > 0 && shrinks(x.pool) {
		s.remove = surplus(x.pool, alive, min(n, mostWrites))
	}
	if x.refusal != "" {
		return
	}
	s.create = min(max(want-len(alive)-leaving, 0), mostWrites)
	for _, vm := range alive {
		if outdated(x.pool, vm) && !slices.Contains(s.remove, vm) && len(s.update) < mostWrites {
			s.update = append(s.update, vm)
		}
	}
	s.renew(x, alive)
	if s.create == 0 && len(s.update) == 0 {
		s.drop(ReasonCreateFailed)
		s.drop(ReasonUpdateFailed)
		return
	}
	if c := s.failure(); c != nil && (c.Reason == ReasonCreateFailed || c.Reason == ReasonUpdateFailed) {
		if rest := s.pause() - x.now.Sub(c.LastProbeTime.Time); rest > 0 {
			s.create, s.update, s.wait = 0, nil, rest
		}
	}
}

// renew decides which machines restart because of a change of the template. One that is not ready restarts at once; of the others, at most
// maxUnavailable are not ready at a time.
func (s *step) renew(x seen, alive []*v1.VirtualMachine) {
	if u := x.pool.Spec.UpdateStrategy; u != nil && (u.Unmanaged != nil || u.Opportunistic != nil) {
		return
	}
	free := unavailable(x.pool)
	var stale []*v1.VirtualMachine
	for _, vm := range alive {
		away := slices.Contains(s.remove, vm) || !vm.Status.Ready && !off(vm) || len(vm.Status.StateChangeRequests) > 0
		if away {
			free--
		}
		switch {
		case slices.Contains(s.remove, vm) || slices.Contains(s.update, vm) || !restarts(x, vm):
		case !away:
			stale = append(stale, vm)
		case len(s.restart) < mostWrites:
			s.restart = append(s.restart, vm)
		}
	}
	var policy *poolv1.VirtualMachinePoolSelectionPolicy
	if u := x.pool.Spec.UpdateStrategy; u != nil && u.Proactive != nil {
		policy = u.Proactive.SelectionPolicy
	}
	stale = inOrder(x.pool, stale, policy)
	s.restart = append(s.restart, stale[:max(min(len(stale), free, mostWrites-len(s.restart)), 0)]...)
}

// outdated reports whether the machine is to become what the template says now.
func outdated(pool *poolv1.VirtualMachinePool, vm *v1.VirtualMachine) bool {
	if u := pool.Spec.UpdateStrategy; u != nil && u.Unmanaged != nil {
		return false
	}
	return kubevirt.Ordinal(pool, vm.Name) >= 0 && vm.Labels[v1.VirtualMachinePoolRevisionName] != kubevirt.Revision(pool)
}

// stale reports whether vm has the condition RestartRequired: its instance has an older spec.
func stale(vm *v1.VirtualMachine) bool {
	if vm.Status.ObservedGeneration != vm.Generation {
		return false
	}
	return slices.ContainsFunc(vm.Status.Conditions, func(c v1.VirtualMachineCondition) bool {
		return c.Type == v1.VirtualMachineRestartRequired && c.Status == corev1.ConditionTrue
	})
}

// restarts reports whether the pool restarts vm: its instance has an older revision of the template, and differs. The pool does not restart a
// machine that a user has changed by hand, or that runs once.
func restarts(x seen, vm *v1.VirtualMachine) bool {
	vmi := x.instances[vm.Name]
	if vmi == nil || !stale(vm) || len(vm.Status.StateChangeRequests) > 0 || vmi.Labels[v1.VirtualMachinePoolRevisionName] == kubevirt.Revision(x.pool) {
		return false
	}
	strategy, err := vm.RunStrategy()
	return err == nil && (strategy == v1.RunStrategyAlways || strategy == v1.RunStrategyManual || strategy == v1.RunStrategyRerunOnFailure)
}

// off reports whether the machine is meant to be off.
func off(vm *v1.VirtualMachine) bool {
	strategy, err := vm.RunStrategy()
	return err == nil && strategy == v1.RunStrategyHalted
}

// unavailable returns how many machines may be not ready while others restart.
func unavailable(pool *poolv1.VirtualMachinePool) int {
	most := intstr.FromString("100%")
	if m := pool.Spec.MaxUnavailable; m != nil {
		most = *m
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(&most, replicas(pool), false)
	if err != nil { // it is refused
		return 1
	}
	return max(n, 1)
}

// shrinks reports whether the pool deletes machines that are too many.
func shrinks(pool *poolv1.VirtualMachinePool) bool {
	s := pool.Spec.ScaleInStrategy
	return s == nil || s.Unmanaged == nil && s.Opportunistic == nil
}

// surplus returns at most n machines to delete. Without a policy, these are the ones that are not ready, then those with the highest ordinals.
func surplus(pool *poolv1.VirtualMachinePool, alive []*v1.VirtualMachine, n int) []*v1.VirtualMachine {
	var policy *poolv1.VirtualMachinePoolSelectionPolicy
	if s := pool.Spec.ScaleInStrategy; s != nil && s.Proactive != nil {
		policy = s.Proactive.SelectionPolicy
	}
	all := inOrder(pool, alive, policy)
	if policy == nil || policy.SortPolicy == nil {
		slices.Reverse(all)
		slices.SortStableFunc(all, func(a, b *v1.VirtualMachine) int {
			switch {
			case a.Status.Ready == b.Status.Ready:
				return 0
			case b.Status.Ready:
				return -1
			}
			return 1
		})
	}
	return all[:min(n, len(all))]
}

// inOrder returns the machines that a policy selects, in its order; without one, all by their ordinals. "Random" is an order that two
// managers agree upon.
func inOrder(pool *poolv1.VirtualMachinePool, of []*v1.VirtualMachine, policy *poolv1.VirtualMachinePoolSelectionPolicy) (all []*v1.VirtualMachine) {
	by, selector := poolv1.VirtualMachinePoolSortPolicyAscendingOrder, labels.Everything()
	if policy != nil && policy.SortPolicy != nil {
		by = *policy.SortPolicy
	}
	if policy != nil && policy.Selectors != nil && policy.Selectors.LabelSelector != nil {
		var err error
		if selector, err = metav1.LabelSelectorAsSelector(policy.Selectors.LabelSelector); err != nil { // it is refused
			selector = labels.Nothing()
		}
	}
	for _, vm := range of {
		if selector.Empty() || vm.Spec.Template != nil && selector.Matches(labels.Set(vm.Spec.Template.ObjectMeta.Labels)) {
			all = append(all, vm)
		}
	}
	slices.SortFunc(all, func(a, b *v1.VirtualMachine) int {
		var first int
		ordinal := cmp.Compare(kubevirt.Ordinal(pool, a.Name), kubevirt.Ordinal(pool, b.Name))
		switch by {
		case poolv1.VirtualMachinePoolSortPolicyAscendingOrder:
			first = ordinal
		case poolv1.VirtualMachinePoolSortPolicyDescendingOrder:
			first = -ordinal
		case poolv1.VirtualMachinePoolSortPolicyNewest:
			first = b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
		case poolv1.VirtualMachinePoolSortPolicyOldest:
			first = a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
		case poolv1.VirtualMachinePoolSortPolicyRandom:
			x, y := sha256.Sum256([]byte(a.UID)), sha256.Sum256([]byte(b.UID))
			first = slices.Compare(x[:], y[:])
		}
		return cmp.Or(first, ordinal, cmp.Compare(a.Name, b.Name))
	})
	return all
}

// describe sets the conditions that do not depend on the step.
func (s *step) describe(x seen) {
	if x.pool.Spec.Paused {
		s.set(condition{Type: poolv1.VirtualMachinePoolReplicaPaused, Reason: ReasonPaused, Message: "spec.paused is true: no machine is created, changed or deleted", LastTransitionTime: metav1.NewTime(x.now)})
	} else {
		s.clear(poolv1.VirtualMachinePoolReplicaPaused)
	}
	if x.refusal != "" {
		s.fail(kubevirt.ReasonNotSupported, x.refusal, x.now)
		return
	}
	s.drop(kubevirt.ReasonNotSupported)
}

func replicas(pool *poolv1.VirtualMachinePool) int {
	if pool.Spec.Replicas == nil {
		return 1
	}
	return max(int(*pool.Spec.Replicas), 0)
}

type condition = poolv1.VirtualMachinePoolCondition

// failure returns the condition ReplicaFailure, nil if there is none.
func (s *step) failure() *condition {
	for i := range s.status.Conditions {
		if s.status.Conditions[i].Type == poolv1.VirtualMachinePoolReplicaFailure {
			return &s.status.Conditions[i]
		}
	}
	return nil
}

// pause returns how long to wait after the last failure. Preconditions: there is one.
func (s *step) pause() time.Duration {
	c := s.failure()
	return min(max(c.LastProbeTime.Sub(c.LastTransitionTime.Time), firstPause), maxPause)
}

// fail notes a failure. The time of the transition is that of the first failure in a row for the reason.
func (s *step) fail(reason, message string, now time.Time) {
	c := condition{Type: poolv1.VirtualMachinePoolReplicaFailure, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now)}
	if reason != kubevirt.ReasonNotSupported { // that one is not tried again
		c.LastProbeTime = metav1.NewTime(now)
	}
	s.set(c)
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

func (s *step) clear(kind poolv1.VirtualMachinePoolConditionType) {
	s.status.Conditions = slices.DeleteFunc(s.status.Conditions, func(c condition) bool { return c.Type == kind })
}
