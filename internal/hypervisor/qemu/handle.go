package qemu

import (
	"encoding/json"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// handleVersion increases when an older driver cannot adopt what a newer one started.
const handleVersion = 1

// handle holds what is needed to find an instance again.
type handle struct {
	Driver  string `json:"driver"`
	Version int    `json:"version"`
	ID      vm.ID  `json:"id"`
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"` // start time of the process, clock ticks since boot
	UUID    string `json:"uuid"`  // among the arguments of the process
	Dir     string `json:"dir"`
	UID     uint32 `json:"uid"`
	Resets  bool   `json:"resets,omitempty"` // a reset starts the guest again

	Graphics bool `json:"graphics,omitempty"` // it has a screen
	Width    int  `json:"width,omitempty"`    // see instance.width
	VSOCK    bool `json:"vsock,omitempty"`    // it has a virtio socket, whose context id is UID

	Shares []shareHandle `json:"shares,omitempty"`
	Cgroup *jail.Place   `json:"cgroup,omitempty"` // nil: the driver's own
}

func (h handle) encode() (hypervisor.Handle, error) {
	b, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode handle: %w", err)
	}
	return b, nil
}

func decodeHandle(b hypervisor.Handle) (handle, error) {
	var h handle
	if err := json.Unmarshal(b, &h); err != nil {
		return handle{}, errdefs.Invalidf("handle %.60q is not a handle of the qemu driver: %w", b, err)
	}
	switch {
	case h.Driver != Name:
		return handle{}, errdefs.Invalidf("handle is of driver %q, not of %s", h.Driver, Name)
	case h.Version != handleVersion:
		return handle{}, errdefs.Invalidf("handle has version %d; this driver knows %d", h.Version, handleVersion)
	case h.PID <= 1 || h.ID == "" || h.Dir == "" || h.UUID != jail.UUID(h.ID):
		return handle{}, errdefs.Invalidf("handle %.200q is incomplete", b)
	}
	return h, nil
}

// The reasons in QEMU's SHUTDOWN event that the guest itself caused.
const (
	reasonShutdown = "guest-shutdown"
	reasonReset    = "guest-reset"
	reasonPanic    = "guest-panic"
)

// ended translates a reason into an Exit of the contract.
func ended(reason string) hypervisor.Exit {
	return hypervisor.Exit{
		GuestShutdown: reason == reasonShutdown,
		GuestReset:    reason == reasonReset || reason == reasonPanic,
		Code:          -1,
	}
}
