package virtualmachinesnapshot

import (
	"fmt"
	"slices"
	"time"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// action is what happens next to a snapshot: one change, which may be repeated after any failure.
type action int

// The actions, in the order in which a snapshot needs them.
const (
	nothing action = iota
	lock           // the machine names the snapshot as the one in progress
	begin          // the content is created
	note           // the status says in which state the machine is, before anything of it is taken
	take           // the VolumeSnapshots that are missing are created
	finish         // all volumes are kept: the content gets its time
	refresh        // the status of the content changes
	unlock         // the machine no longer names the snapshot
	discard        // the content of a snapshot that failed is deleted
)

// Bounds of the time until a snapshot in progress is looked at again: a tenth of the time that it has taken so far.
const (
	firstLook = 500 * time.Millisecond
	lastLook  = 30 * time.Second
)

// volume is a volume of the machine.
type volume struct {
	name     string
	claim    *corev1.PersistentVolumeClaim // nil: it has none, or none that can be kept
	excluded bool                          // it has a claim, and its storage class has no snapshots, or other machines share it
}

// seen is what decide knows of a snapshot.
type seen struct {
	snapshot *v1beta1.VirtualMachineSnapshot
	vm       *v1.VirtualMachine         // nil: there is none
	vmi      *v1.VirtualMachineInstance // nil: there is none
	content  *v1beta1.VirtualMachineSnapshotContent
	taken    []*volumesnapshotv1.VolumeSnapshot // one for each volumeBackup of the content; nil: it does not exist
	volumes  []volume                           // of the machine, until there is a content
	obstacle string                             // why the next action is impossible now, "" if it is not
	now      time.Time
}

// step is what happens next to a snapshot.
type step struct {
	do      action
	wait    time.Duration // until the snapshot is looked at again; 0: when something changes
	status  v1beta1.VirtualMachineSnapshotStatus
	content v1beta1.VirtualMachineSnapshotContentStatus // for refresh and finish
}

// decide returns the next step of a snapshot. It reads no clock.
func decide(x seen) step {
	s := step{}
	if x.snapshot.Status != nil {
		s.status = *x.snapshot.Status.DeepCopy()
	}
	if x.content != nil && x.content.Status != nil {
		s.content = *x.content.Status.DeepCopy()
	}
	switch {
	case s.status.Phase == v1beta1.Failed:
		s.failed(x)
	case s.status.Phase == v1beta1.Succeeded:
		s.succeeded(x)
	case x.snapshot.DeletionTimestamp != nil: // somebody's finalizer holds it
		s.status.Phase = v1beta1.Deleting
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "VM snapshot is deleting", x.now)
		if x.locked() {
			s.do = unlock
		}
	case x.late():
		s.fail(x)
	default:
		s.progress(x)
	}
	return s
}

// locked reports whether the machine names the snapshot.
func (x *seen) locked() bool {
	return x.vm != nil && x.vm.Status.SnapshotInProgress != nil && *x.vm.Status.SnapshotInProgress == x.snapshot.Name
}

// online reports whether the machine runs.
func (x *seen) online() bool { return x.vmi != nil && !x.vmi.IsFinal() }

// age is how long ago the snapshot was asked for.
func (x *seen) age() time.Duration { return x.now.Sub(x.snapshot.CreationTimestamp.Time) }

// deadline returns when the snapshot fails, zero for never.
func (x *seen) deadline() time.Duration {
	if d := x.snapshot.Spec.FailureDeadline; d != nil {
		return d.Duration
	}
	return v1beta1.DefaultFailureDeadline
}

// late reports whether the deadline has passed. What has been kept by then is not thrown away.
func (x *seen) late() bool { return x.deadline() > 0 && x.age() >= x.deadline() && !x.kept() }

// kept reports whether all volumes are kept.
func (x *seen) kept() bool {
	return x.content != nil && !slices.ContainsFunc(x.taken, func(v *volumesnapshotv1.VolumeSnapshot) bool {
		return v == nil || v.Status == nil || v.Status.CreationTime == nil
	})
}

// ready reports whether all VolumeSnapshots can be used.
func (x *seen) ready() bool {
	return x.content != nil && !slices.ContainsFunc(x.taken, func(v *volumesnapshotv1.VolumeSnapshot) bool {
		return v == nil || v.Status == nil || v.Status.ReadyToUse == nil || !*v.Status.ReadyToUse
	})
}

// progress decides the next step of a snapshot that is being taken.
func (s *step) progress(x seen) {
	s.status.Phase = v1beta1.InProgress
	s.status.ReadyToUse = ptr(false)
	s.wait = min(max(x.age()/10, firstLook), lastLook)
	if d := x.deadline(); d > 0 {
		s.wait = min(s.wait, max(d-x.age(), time.Millisecond))
	}
	problem := x.problem()
	switch {
	case x.kept(): // whatever has become of the machine since
		s.do, problem = finish, ""
	case problem != "":
	case !x.locked():
		s.do = lock
	case x.content == nil:
		s.do = begin
	case slices.Contains(x.taken, nil):
		s.do = take
	}
	if x.vm != nil && problem == "" && s.status.SourceUID == nil {
		s.status.SourceUID = ptr(x.vm.UID)
	}
	if x.vm != nil && !slices.ContainsFunc(x.taken, func(v *volumesnapshotv1.VolumeSnapshot) bool { return v != nil }) {
		s.indicate(x)
		if s.do == take && (x.snapshot.Status == nil || !slices.Equal(x.snapshot.Status.SourceIndications, s.status.SourceIndications)) {
			s.do = note
		}
	}
	if x.content != nil {
		s.status.VirtualMachineSnapshotContentName = ptr(x.content.Name)
	}
	s.report(x, problem)
	s.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Not ready", x.now)
	switch {
	case problem != "":
		s.err(problem, x.now)
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "In error state", x.now)
	case s.do == note, s.do == take: // take says whether it could
	case x.locked():
		s.status.Error = nil
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Source locked and operation in progress", x.now)
	default:
		s.status.Error = nil
		s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Source not locked", x.now)
	}
	if s.do == finish {
		if s.content.CreationTime == nil { // else a manager was killed after it had finished
			s.content.CreationTime = ptr(metav1.NewTime(x.now))
		}
		s.complete(x)
	}
}

// problem says why a snapshot in progress cannot go on now, "" if it can.
func (x *seen) problem() string {
	of := x.snapshot.Spec.Source.Name
	switch {
	case x.vm == nil || x.vm.DeletionTimestamp != nil:
		return fmt.Sprintf("the VirtualMachine %s does not exist", of)
	case x.snapshot.Status != nil && x.snapshot.Status.SourceUID != nil && *x.snapshot.Status.SourceUID != x.vm.UID:
		return fmt.Sprintf("the VirtualMachine %s is not the one of which the snapshot was begun", of)
	case x.vm.Status.SnapshotInProgress != nil && !x.locked():
		return fmt.Sprintf("the snapshot %s of VirtualMachine %s is in progress", *x.vm.Status.SnapshotInProgress, of)
	case x.vm.Status.RestoreInProgress != nil:
		return fmt.Sprintf("the VirtualMachine %s is being restored by VirtualMachineRestore %s", of, *x.vm.Status.RestoreInProgress)
	case x.obstacle != "":
		return x.obstacle
	}
	for _, v := range x.taken {
		if v == nil || v.Status == nil || v.Status.Error == nil || v.Status.CreationTime != nil {
			continue
		}
		why := "it failed"
		if m := v.Status.Error.Message; m != nil {
			why = *m
		}
		return fmt.Sprintf("VolumeSnapshot %s of claim %s: %s", v.Name, claimOf(v), why)
	}
	return ""
}

func claimOf(v *volumesnapshotv1.VolumeSnapshot) string {
	if c := v.Spec.Source.PersistentVolumeClaimName; c != nil {
		return *c
	}
	return ""
}

// Texts of the indications.
var meanings = map[v1beta1.Indication]string{
	v1beta1.VMSnapshotOnlineSnapshotIndication:  "the VM ran when the snapshot was taken",
	v1beta1.VMSnapshotGuestAgentIndication:      "the agent of the guest froze its file systems",
	v1beta1.VMSnapshotNoGuestAgentIndication:    "the guest has no agent that could freeze its file systems: the disks are as after a power cut",
	v1beta1.VMSnapshotPausedIndication:          "the VM was paused: what the guest had not written yet is not on the disks",
	v1beta1.VMSnapshotQuiesceTimeoutIndication:  "the file systems of the guest were thawed before all disks were kept: the disks may be of different instants",
	v1beta1.VMSnapshotPartialSnapshotIndication: "some claims are not in the snapshot, because their storage class has no snapshots, or other machines share them; status.snapshotVolumes.excludedVolumes names them",
}

// indicate says in which state the machine is.
func (s *step) indicate(x seen) {
	s.status.Indications, s.status.SourceIndications = nil, nil //nolint:staticcheck // tools of earlier versions read the first
	if !x.online() {
		return
	}
	s.indication(v1beta1.VMSnapshotOnlineSnapshotIndication)
	switch {
	case isTrue(x.vmi, v1.VirtualMachineInstancePaused):
		s.indication(v1beta1.VMSnapshotPausedIndication)
	case isTrue(x.vmi, v1.VirtualMachineInstanceAgentConnected):
		s.indication(v1beta1.VMSnapshotGuestAgentIndication)
	default:
		s.indication(v1beta1.VMSnapshotNoGuestAgentIndication)
	}
}

func (s *step) indication(i v1beta1.Indication) {
	if has(&s.status, i) {
		return
	}
	s.status.Indications = append(s.status.Indications, i) //nolint:staticcheck // see indicate
	s.status.SourceIndications = append(s.status.SourceIndications, v1beta1.SourceIndication{Indication: i, Message: meanings[i]})
}

// has reports whether the status has an indication.
func has(s *v1beta1.VirtualMachineSnapshotStatus, i v1beta1.Indication) bool {
	return slices.ContainsFunc(s.SourceIndications, func(x v1beta1.SourceIndication) bool { return x.Indication == i })
}

func isTrue(vmi *v1.VirtualMachineInstance, kind v1.VirtualMachineInstanceConditionType) bool {
	c := kubevirt.Condition(vmi, kind)
	return c != nil && c.Status == corev1.ConditionTrue
}

// report describes the VolumeSnapshots in the status of the content, and makes refresh the action if that is all there is to do.
func (s *step) report(x seen, problem string) {
	if x.content == nil {
		return
	}
	var all []v1beta1.VolumeSnapshotStatus
	for _, v := range x.taken {
		if v == nil {
			continue
		}
		one := v1beta1.VolumeSnapshotStatus{VolumeSnapshotName: v.Name}
		if st := v.Status; st != nil {
			one.CreationTime, one.ReadyToUse = st.CreationTime, st.ReadyToUse
			if st.Error != nil {
				one.Error = &v1beta1.Error{Time: st.Error.Time, Message: st.Error.Message}
			}
		}
		all = append(all, one)
	}
	s.content.VolumeSnapshotStatus = all
	s.content.ReadyToUse = ptr(x.ready())
	s.content.Error = newer(s.content.Error, problem, x.now)
	if s.do == nothing {
		s.do = refresh
	}
}

// complete notes that the volumes are kept.
func (s *step) complete(x seen) {
	s.status.Phase, s.status.CreationTime, s.status.Error = v1beta1.Succeeded, s.content.CreationTime, nil
	s.content.Error = nil
	s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Operation complete", x.now)
	s.usable(x)
	lists := &v1beta1.SnapshotVolumesLists{}
	kept := map[string]bool{}
	for _, b := range x.content.Spec.VolumeBackups {
		kept[b.VolumeName] = true
	}
	if m := x.content.Spec.Source.VirtualMachine; m != nil && m.Spec.Template != nil {
		for i := range m.Spec.Template.Spec.Volumes {
			v := &m.Spec.Template.Spec.Volumes[i]
			if kept[v.Name] {
				lists.IncludedVolumes = append(lists.IncludedVolumes, v.Name)
				continue
			}
			lists.ExcludedVolumes = append(lists.ExcludedVolumes, v.Name)
			if kubevirt.ClaimOf(v) != "" {
				s.indication(v1beta1.VMSnapshotPartialSnapshotIndication)
			}
		}
	}
	s.status.SnapshotVolumes = lists
}

// usable notes whether the snapshot can be used.
func (s *step) usable(x seen) {
	s.status.ReadyToUse = ptr(x.ready())
	if x.ready() {
		s.condition(v1beta1.ConditionReady, corev1.ConditionTrue, "Ready", x.now)
	} else {
		s.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Not ready", x.now)
	}
}

// succeeded decides what follows once the volumes are kept.
func (s *step) succeeded(x seen) {
	switch {
	case x.locked():
		s.do = unlock
	case x.content == nil:
		s.err("its content was deleted; delete the snapshot, too", x.now)
		s.usable(x)
	case x.content.Status == nil || x.content.Status.CreationTime == nil: // its writing failed
		s.content.CreationTime = s.status.CreationTime
		s.report(x, "")
	case !x.ready():
		s.wait = lastLook
		if x.age() < lastLook {
			s.wait = firstLook
		}
		problem := ""
		if slices.Contains(x.taken, nil) {
			problem = "a VolumeSnapshot of it was deleted; delete the snapshot, too"
			s.wait = 0
		}
		s.report(x, problem)
		s.err(problem, x.now)
		s.usable(x)
	case s.status.ReadyToUse == nil || !*s.status.ReadyToUse:
		s.report(x, "")
		s.status.Error = nil
		s.usable(x)
	}
}

// fail gives up.
func (s *step) fail(x seen) {
	text := fmt.Sprintf("snapshot deadline exceeded: it was not taken within %s", x.deadline())
	if s.status.Error != nil && s.status.Error.Message != nil {
		text += ": " + *s.status.Error.Message
	}
	s.status.Phase, s.status.ReadyToUse = v1beta1.Failed, ptr(false)
	s.err(text, x.now)
	s.condition(v1beta1.ConditionFailure, corev1.ConditionTrue, text, x.now)
	s.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Operation failed", x.now)
	s.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Not ready", x.now)
	s.wait = firstLook
}

// failed decides what follows after a failure: nothing of it is left.
func (s *step) failed(x seen) {
	switch {
	case x.locked():
		s.do = unlock
	case x.content != nil && x.content.DeletionTimestamp == nil:
		s.do = discard
	}
}

// retains reports whether the content outlives the snapshot.
func retains(snapshot *v1beta1.VirtualMachineSnapshot) bool {
	p := snapshot.Spec.DeletionPolicy
	return p != nil && *p == v1beta1.VirtualMachineSnapshotContentRetain
}

// err sets or drops the error of the snapshot.
func (s *step) err(text string, now time.Time) { s.status.Error = newer(s.status.Error, text, now) }

// newer returns an error with the text, which is old if it has the same text.
func newer(old *v1beta1.Error, text string, now time.Time) *v1beta1.Error {
	switch {
	case text == "":
		return nil
	case old != nil && old.Message != nil && *old.Message == text:
		return old
	}
	return &v1beta1.Error{Time: ptr(metav1.NewTime(now)), Message: ptr(text)}
}

func (s *step) condition(kind v1beta1.ConditionType, status corev1.ConditionStatus, reason string, now time.Time) {
	c := v1beta1.Condition{Type: kind, Status: status, Reason: reason, LastTransitionTime: metav1.NewTime(now)}
	s.status.Conditions = kubevirt.SetCondition(s.status.Conditions, c, func(c *v1beta1.Condition) (v1beta1.ConditionType, corev1.ConditionStatus, *metav1.Time) {
		return c.Type, c.Status, &c.LastTransitionTime
	})
}

func ptr[T any](v T) *T { return &v }
