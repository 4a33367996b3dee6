package datavolume

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/claimnode"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

// Reasons of conditions and Events.
const (
	ReasonNotSupported = kubevirt.ReasonNotSupported
	ReasonOccupied     = "ErrResourceExists" // a claim that is not the DataVolume's has its name; as in CDI
	ReasonLost         = "ClaimLost"
	ReasonError        = "Error" // KubeVirt looks for this one
	ReasonWaits        = "WaitForFirstConsumer"
	ReasonNoNode       = "NoNodeWithRoom"
	ReasonPending      = "Pending"
	ReasonBound        = "Bound"
	ReasonCompleted    = "Completed"
	ReasonImporting    = "ImportInProgress"
	ReasonCloning      = "CloneInProgress"
	ReasonUpload       = "UploadReady"
	ReasonUploadLater  = "UploadScheduled"
)

// seen is what decide knows of a DataVolume.
type seen struct {
	dv       *v1beta1.DataVolume
	refusal  string                        // why there can be no volume; "": there can
	claim    *corev1.PersistentVolumeClaim // of that name; nil: there is none
	mine     bool                          // the claim is the DataVolume's
	class    *storagev1.StorageClass       // of claim, nil if it is not known
	failure  string                        // why the last attempt to make the volume has failed; "": none has
	failures int32
	progress int    // of the running attempt, in percent; 0: not known
	note     string // why nobody has chosen a node, "" if nobody has to
	now      time.Time
}

// decide returns the status of a DataVolume. It reads no clock.
func decide(x seen) v1beta1.DataVolumeStatus {
	s := state{status: *x.dv.Status.DeepCopy(), now: x.now}
	s.status.Progress = cmp.Or(s.status.Progress, unknown)
	done := complete(&x.dv.Status)
	switch {
	case x.refusal != "":
		s.fail(ReasonNotSupported, x.refusal)
	case x.claim != nil && !x.mine:
		s.phase(v1beta1.Pending, ReasonOccupied, "the claim "+x.claim.Name+" exists and is not of this DataVolume; delete one of them")
	case x.claim == nil && done: // another one would be empty, or have the first content again
		s.fail(ReasonLost, "the claim of the volume was deleted; delete the DataVolume, too")
	case x.claim == nil:
		s.phase(v1beta1.Pending, ReasonPending, "the claim is not there yet")
	case x.claim.Status.Phase == corev1.ClaimLost:
		s.fail(ReasonLost, "the claim has lost its volume")
	case x.claim.Status.Phase == corev1.ClaimBound:
		s.succeed(x)
	default:
		s.pending(x)
	}
	return s.status
}

// Progress of a volume.
const (
	whole   = "100.0%"
	unknown = "N/A"
)

// complete reports whether the volume has ever been complete. The progress says so, also when the claim was lost afterwards.
func complete(s *v1beta1.DataVolumeStatus) bool { return s.Progress == whole }

type state struct {
	status v1beta1.DataVolumeStatus
	now    time.Time
}

// pending describes a claim that has no volume yet.
func (s *state) pending(x seen) {
	s.status.ClaimName = x.claim.Name
	s.status.RestartCount = max(s.status.RestartCount, x.failures)
	if x.awaited() {
		s.await(x)
		return
	}
	if claimnode.Waits(x.claim, x.class) && claimnode.Of(x.claim) == "" {
		reason, text := ReasonWaits, "the volume is made on the node of the first pod that uses the claim"
		if x.note != "" {
			reason, text = ReasonNoNode, x.note
		}
		s.phase(v1beta1.WaitForFirstConsumer, reason, text)
		return
	}
	phase, reason, text := v1beta1.ImportInProgress, ReasonImporting, "the volume is being made"
	if kubevirt.Copied(&x.dv.Spec) {
		phase, reason = v1beta1.CloneInProgress, ReasonCloning
	}
	s.missing(phase, reason, text)
	s.status.Progress = unknown
	if x.progress > 0 {
		s.status.Progress = v1beta1.DataVolumeProgress(fmt.Sprintf("%d.0%%", x.progress))
	}
	if x.failure != "" {
		s.set(v1beta1.DataVolumeRunning, corev1.ConditionFalse, ReasonError, x.failure)
	} else {
		s.set(v1beta1.DataVolumeRunning, corev1.ConditionTrue, reason, text)
	}
}

// awaited reports whether the disk of the volume has not been uploaded yet.
func (x *seen) awaited() bool {
	return kubevirt.Uploaded(&x.dv.Spec) && x.claim.Annotations[contract.KeyVolumeUpload] == ""
}

// await describes a claim whose disk has not been uploaded yet.
func (s *state) await(x seen) {
	s.status.Progress = unknown
	if x.claim.Annotations[upload.AnnReady] == "true" {
		s.phase(v1beta1.UploadReady, ReasonUpload, "the disk can be uploaded, as by `virtctl image-upload`")
		return
	}
	reason, text := ReasonUploadLater, "the disk cannot be uploaded yet"
	s.missing(v1beta1.UploadScheduled, reason, text)
	if x.failure != "" {
		reason, text = ReasonError, x.failure
	}
	s.set(v1beta1.DataVolumeRunning, corev1.ConditionFalse, reason, text)
}

func (s *state) succeed(x seen) {
	s.status.ClaimName, s.status.Progress = x.claim.Name, whole
	s.status.Phase = v1beta1.Succeeded
	s.set(v1beta1.DataVolumeBound, corev1.ConditionTrue, ReasonBound, "the claim "+x.claim.Name+" is bound")
	s.set(v1beta1.DataVolumeReady, corev1.ConditionTrue, "", "")
	s.set(v1beta1.DataVolumeRunning, corev1.ConditionFalse, ReasonCompleted, "the volume is complete")
}

// missing sets a phase in which there is no volume.
func (s *state) missing(p v1beta1.DataVolumePhase, reason, text string) {
	s.status.Phase = p
	s.set(v1beta1.DataVolumeBound, corev1.ConditionFalse, reason, text)
	s.set(v1beta1.DataVolumeReady, corev1.ConditionFalse, reason, text)
}

// phase sets a phase in which there is no volume and nobody makes it.
func (s *state) phase(p v1beta1.DataVolumePhase, reason, text string) {
	s.missing(p, reason, text)
	s.set(v1beta1.DataVolumeRunning, corev1.ConditionFalse, reason, text)
}

// fail sets a phase from which nothing leads away.
func (s *state) fail(reason, text string) { s.phase(v1beta1.Failed, reason, text) }

func (s *state) set(kind v1beta1.DataVolumeConditionType, is corev1.ConditionStatus, reason, text string) {
	c := v1beta1.DataVolumeCondition{Type: kind, Status: is, Reason: reason, Message: text, LastTransitionTime: metav1.NewTime(s.now), LastHeartbeatTime: metav1.NewTime(s.now)}
	for i, old := range s.status.Conditions {
		if old.Type != kind {
			continue
		}
		if old.Status == is {
			c.LastTransitionTime = old.LastTransitionTime
		}
		if old.Status == is && old.Reason == reason && old.Message == text { // a heartbeat alone is no change
			return
		}
		s.status.Conditions[i] = c
		return
	}
	s.status.Conditions = append(s.status.Conditions, c)
}

// Reasons of the Events of a claim whose volume is made: those of the library with which nodes make volumes.
const (
	eventBegun  = "Provisioning"
	eventFailed = "ProvisioningFailed"
)

// attempts reads from the Events of a claim why the last attempt to make its volume has failed, unless one has begun since; how many have failed; and
// how far the running one is.
func (x *seen) attempts(of []corev1.Event) {
	var failed, begun, told time.Time
	x.failure, x.failures, x.progress = "", 0, 0
	for _, e := range of {
		at := e.LastTimestamp.Time
		switch {
		case e.Reason == eventFailed:
			x.failures += max(e.Count, 1)
			if x.failure == "" || at.After(failed) {
				x.failure, failed = e.Message, at
			}
		case e.Reason == eventBegun && at.After(begun):
			begun = at
		}
		if done, err := strconv.Atoi(e.Annotations[contract.KeyVolumeProgress]); err == nil && at.After(told) {
			x.progress, told = min(max(done, 0), 99), at // 100 is for a volume that is there
		}
	}
	if begun.After(failed) {
		x.failure = ""
	}
	if told.Before(begun) || !told.After(failed) {
		x.progress = 0
	}
}

// message returns what a condition says.
func message(s *v1beta1.DataVolumeStatus, kind v1beta1.DataVolumeConditionType) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c.Message
		}
	}
	return ""
}
