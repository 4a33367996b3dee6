package cloudhypervisor

import (
	"fmt"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// handleVersion increases when an older driver cannot adopt what a newer one started.
const handleVersion = 1

// handle holds what is needed to find an instance again.
type handle struct {
	jail.Handle

	Program string       `json:"program,omitempty"` // version of the program, which may have been replaced since
	Memory  int64        `json:"memory,omitempty"`  // of the guest, bytes
	Huge    bool         `json:"huge,omitempty"`    // it consists of huge pages
	Resets  bool         `json:"resets,omitempty"`  // a reset starts the guest again
	Agent   bool         `json:"agent,omitempty"`   // it has a channel for its agent
	Disks   []jail.Drive `json:"disks,omitempty"`   // without those that have a port
	Links   []carrier    `json:"links,omitempty"`   // of the launch

	Queues   int         `json:"queues,omitempty"` // of each disk; 0: an earlier release has started it, and nothing can be plugged
	DiskRate vm.DiskRate `json:"diskRate,omitzero"`
}

func decodeHandle(b hypervisor.Handle) (h handle, err error) {
	err = jail.Decode(b, &h, Name, handleVersion)
	return h, err
}

// reasonNone is recorded as the reason of an end when the process has started, so that the events in the runtime folder are known to be its own.
const reasonNone = "running"

// lastReason returns why the guest of a process that has ended ended, "" if nobody knows.
func (h handle) lastReason() (string, error) {
	reason, err := h.Recorded()
	if err != nil || reason != reasonNone {
		return reason, err
	}
	// Nobody has watched it. A guest that resets ends without us, and its events say so.
	l, err := h.life()
	if err != nil {
		return "", fmt.Errorf("read how the guest ended: %w", err)
	}
	if !h.Resets && l == lifeResetting {
		return jail.ReasonReset, nil
	}
	return "", nil
}

// life returns what the last events of the guest say about its life. The process may have made their log any size.
func (h handle) life() (life, error) {
	text, err := jail.Tail(filepath.Join(h.Dir, eventLog), 0)
	return lifeOf(text), err
}
