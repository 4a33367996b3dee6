package qemu

import (
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// handleVersion increases when an older driver cannot adopt what a newer one started.
const handleVersion = 1

// handle holds what is needed to find an instance again.
type handle struct {
	jail.Handle

	Resets bool `json:"resets,omitempty"` // a reset starts the guest again

	Graphics bool `json:"graphics,omitempty"` // it has a screen
	Width    int  `json:"width,omitempty"`    // see instance.width
	VSOCK    bool `json:"vsock,omitempty"`    // it has a virtio socket, whose context id is UID

	DiskRate vm.DiskRate `json:"diskRate,omitzero"` // of disks that are plugged

	Shares []shareHandle `json:"shares,omitempty"`
}

func decodeHandle(b hypervisor.Handle) (h handle, err error) {
	err = jail.Decode(b, &h, Name, handleVersion)
	return h, err
}

// reasonPanic is a reason in QEMU's SHUTDOWN event, beside those of package jail.
const reasonPanic = "guest-panic"

// ended translates a reason into an Exit of the contract.
func ended(reason string) hypervisor.Exit {
	e := jail.Ended(reason)
	e.GuestReset = e.GuestReset || reason == reasonPanic
	return e
}
