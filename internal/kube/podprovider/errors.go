package podprovider

import (
	"errors"

	vkerr "github.com/virtual-kubelet/virtual-kubelet/errdefs"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// vkNotFound returns an error of the one class that virtual-kubelet acts upon.
func vkNotFound(namespace, name string) error {
	return vkerr.NotFoundf("pod %s/%s is not on this node", namespace, name)
}

// The reasons of pods and containers that are not in package podstatus or podhealth, in the kubelet's words where the
// kubelet has one.
const (
	reasonConfigError   = "CreateContainerConfigError"
	reasonCreateError   = "CreateContainerError"
	reasonImageMissing  = "ErrImageNeverPull"
	reasonErrPull       = "ErrImagePull"
	reasonPullBackOff   = "ImagePullBackOff"
	reasonInvalidImage  = "InvalidImageName"
	reasonCrashLoop     = "CrashLoopBackOff"
	reasonRunError      = "RunContainerError"
	reasonNotSupported  = "PodNotSupported"
	reasonVMRejected    = "VMRejected"
	reasonVMGone        = "VMGone"
	reasonCooldown      = "RestartCooldown"
	reasonRestartFailed = "RestartFailed"
	reasonInspect       = "VMInspectTimeout"
	reasonDeadline      = "DeadlineExceeded"
	reasonElsewhere     = "StateElsewhere"
	reasonUnclaimed     = "NodeNotClaimed"
	reasonLeftover      = "VMLeftBehind"

	eventStarted     = "Started"
	eventPulling     = "Pulling"
	eventPulled      = "Pulled"
	eventLostSecrets = "FailedToRetrieveImagePullSecret"
	eventBackOff     = "BackOff"
	eventFailed      = "Failed"
	eventFailedKill  = "FailedKillPod"
	eventFailedMount = "FailedMount"
	eventRestarted   = "Restarted"
	eventAdopted     = "Adopted"

	eventHibernated          = "Hibernated"
	eventHibernateFailed     = "HibernateFailed"
	eventHibernatePushFailed = "HibernatePushFailed"
	eventWoken               = "Woken"
	eventWakeFailed          = "WakeFailed"
	eventDataLoss            = "DataLoss"
	eventDiskWell            = "DiskRecovered"
	eventTagLeft             = "HibernateTagLeft"
	eventForkPushFailed      = "ForkPushFailed"
	eventHint                = "PostCloneHint"
)

// leftover means that a VM cannot be created: the VM of a deleted pod has its name, and the node may not remove that VM.
type leftover struct{ error }

func (l leftover) Unwrap() error { return l.error }

// waiting returns how a failed Launch shows in the pod. What can never work ends the pod; everything else is retried.
func waiting(err error) (reason string, never bool) {
	if _, ok := errors.AsType[leftover](err); ok {
		return reasonLeftover, false
	}
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument, errdefs.Unsupported:
		return reasonVMRejected, true
	default:
		return reasonCreateError, false
	}
}
