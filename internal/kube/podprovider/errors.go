package podprovider

import (
	"errors"

	vkerr "github.com/virtual-kubelet/virtual-kubelet/errdefs"
)

// vkNotFound returns an error of the only class that virtual-kubelet handles.
func vkNotFound(namespace, name string) error {
	return vkerr.NotFoundf("pod %s/%s is not on this node", namespace, name)
}

// The reasons of pods and containers that are not in package podstatus or podhealth. If the kubelet has a reason for the case,
// it is the same.
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
	reasonWrongOS       = "PodOSNotSupported"
	reasonPorts         = "NodePorts"
	reasonVMRejected    = "VMRejected"
	reasonVMGone        = "VMGone"
	reasonCooldown      = "RestartCooldown"
	reasonRestartFailed = "RestartFailed"
	reasonInspect       = "VMInspectTimeout"
	reasonDeadline      = "DeadlineExceeded"
	reasonElsewhere     = "StateElsewhere"
	reasonUnclaimed     = "NodeNotClaimed"
	reasonLeftover      = "VMLeftBehind"

	eventStarted       = "Started"
	eventPulling       = "Pulling"
	eventPulled        = "Pulled"
	eventLostSecrets   = "FailedToRetrieveImagePullSecret"
	eventBackOff       = "BackOff"
	eventFailed        = "Failed"
	eventFailedKill    = "FailedKillPod"
	eventFailedMount   = "FailedMount"
	eventMounted       = "VolumesMounted"
	eventFailedUnmount = "FailedUnMount" // as the kubelet spells it
	eventRestarted     = "Restarted"
	eventAdopted       = "Adopted"

	eventResizeCompleted  = "ResizeCompleted"
	eventResizeDeferred   = "ResizeDeferred"
	eventResizeError      = "ResizeError"
	eventResizeInfeasible = "ResizeInfeasible"

	eventStandIn = "BackendStandIn"

	eventHibernated          = "Hibernated"
	eventPaused              = "Paused"
	eventPauseFailed         = "PauseFailed"
	eventPlugged             = "VolumePlugged"
	eventPlugFailed          = "VolumePlugFailed"
	eventUnplugged           = "VolumeUnplugged"
	eventUnplugFailed        = "VolumeUnplugFailed"
	eventDumped              = "MemoryDumped"
	eventDumpFailed          = "MemoryDumpFailed"
	eventConnected           = "NetworkAttached"
	eventConnectFailed       = "NetworkAttachFailed"
	eventDisconnected        = "NetworkDetached"
	eventDisconnectFailed    = "NetworkDetachFailed"
	eventLinkSet             = "LinkSet"
	eventLinkFailed          = "LinkSetFailed"
	eventRebooted            = "Rebooted"
	eventRebootFailed        = "RebootFailed"
	eventUnpaused            = "Unpaused"
	eventUnpauseFailed       = "UnpauseFailed"
	eventHibernateFailed     = "HibernateFailed"
	eventHibernatePushFailed = "HibernatePushFailed"
	eventStateDropped        = "HibernateStateDropped"
	eventWoken               = "Woken"
	eventWakeFailed          = "WakeFailed"
	eventDataLoss            = "DataLoss"
	eventDiskWell            = "DiskRecovered"
	eventClockWell           = "ClockRecovered"
	eventTagLeft             = "HibernateTagLeft"
	eventForkPushFailed      = "ForkPushFailed"
	eventHint                = "PostCloneHint"
)

// leftover means that a VM cannot be created, because the VM of a deleted pod has its name and the node may not remove that
// VM.
type leftover struct{ error }

func (l leftover) Unwrap() error { return l.error }

// waiting returns the reason in a container's status while a failed Launch is retried.
func waiting(err error) string {
	if _, ok := errors.AsType[leftover](err); ok {
		return reasonLeftover
	}
	return reasonCreateError
}
