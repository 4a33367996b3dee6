package cloudhypervisor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// handleVersion increases when an older driver cannot adopt what a newer one started.
const handleVersion = 1

// handle holds what is needed to find an instance again.
type handle struct {
	Driver  string      `json:"driver"`
	Version int         `json:"version"`
	ID      vm.ID       `json:"id"`
	PID     int         `json:"pid"`
	Start   uint64      `json:"start"` // start time of the process, clock ticks since boot
	UUID    string      `json:"uuid"`  // in the name of the process
	Dir     string      `json:"dir"`
	UID     uint32      `json:"uid"`
	Program string      `json:"program,omitempty"` // version of the program, which may have been replaced since
	Memory  int64       `json:"memory,omitempty"`  // of the guest, bytes
	Huge    bool        `json:"huge,omitempty"`    // it consists of huge pages
	Resets  bool        `json:"resets,omitempty"`  // a reset starts the guest again
	Agent   bool        `json:"agent,omitempty"`   // it has a channel for its agent
	Links   []carrier   `json:"links,omitempty"`
	Cgroup  *jail.Place `json:"cgroup,omitempty"` // nil: the driver's own
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
		return handle{}, errdefs.Invalidf("handle %.60q is not a handle of the driver of Cloud Hypervisor: %w", b, err)
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

// The reasons of an end that the guest itself caused.
const (
	reasonShutdown = "guest-shutdown"
	reasonReset    = "guest-reset"

	reasonNone = "running" // recorded when the process has started, so that the events in the runtime folder are known to be its own
)

// ended translates a reason into an Exit of the contract.
func ended(reason string) hypervisor.Exit {
	return hypervisor.Exit{GuestShutdown: reason == reasonShutdown, GuestReset: reason == reasonReset, Code: -1}
}

func (h handle) record(reason string) error {
	return jail.End{PID: h.PID, Start: h.Start, Reason: reason}.Write(h.Dir)
}

// lastReason returns why the guest of a process that has ended ended, "" if nobody knows.
func (h handle) lastReason() (string, error) {
	reason, err := jail.ReadEnd(h.Dir, h.PID, h.Start)
	if err != nil || reason != reasonNone {
		return reason, err
	}
	// Nobody has watched it. A guest that resets ends without us, and its events say so.
	text, err := os.ReadFile(filepath.Join(h.Dir, eventLog))
	if err != nil {
		return "", fmt.Errorf("read how the guest ended: %w", err)
	}
	if !h.Resets && lifeOf(text) == lifeResetting {
		return reasonReset, nil
	}
	return "", nil
}
