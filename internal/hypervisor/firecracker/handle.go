package firecracker

import (
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// handleVersion increases when an older driver cannot adopt what a newer one started.
const handleVersion = 1

// handle holds what is needed to find an instance again.
type handle struct {
	jail.Handle

	Memory int64        `json:"memory"`          // of the guest, bytes
	Agent  bool         `json:"agent,omitempty"` // it has a channel for its agent
	Disks  []jail.Drive `json:"disks,omitempty"`
	Links  []tap        `json:"links,omitempty"`
	Pager  *pagerOf     `json:"pager,omitempty"` // nil: its memory was there when it began

	Program string `json:"program,omitempty"` // version of the program, which may have been replaced since; "": an earlier build has started it
	Format  string `json:"format,omitempty"`  // of the state that it saves
}

// tap is where an interface of a guest is.
type tap struct {
	Place int    `json:"place"`
	Name  string `json:"name"`
	NetNS string `json:"netns,omitempty"`
}

func decodeHandle(b hypervisor.Handle) (h handle, err error) {
	err = jail.Decode(b, &h, Name, handleVersion)
	return h, err
}

// lastReason returns why the guest of a process that has ended ended, "" if nobody knows.
func (h handle) lastReason() (string, error) {
	reason, err := h.Recorded()
	if err != nil || reason != reasonNone {
		return reason, err
	}
	return readEnd(h.Dir) // the log is of the same run
}
