package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
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
	Cgroup *cgroupNote   `json:"cgroup,omitempty"` // nil: the driver's own
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
	case h.PID <= 1 || h.ID == "" || h.Dir == "" || h.UUID != uuidOf(h.ID):
		return handle{}, errdefs.Invalidf("handle %.200q is incomplete", b)
	}
	return h, nil
}

// exitFile records, next to the sockets, how the guest ended. It is written before the process may end.
const exitFile = "exit.json"

// note is the content of the exit file. Pid and start time bind it to one run.
type note struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`
	Reason string `json:"reason"` // QEMU's term, e.g. guest-shutdown
}

func (h handle) writeNote(reason string) error {
	if err := writeFile(filepath.Join(h.Dir, exitFile), note{h.PID, h.Start, reason}); err != nil {
		return fmt.Errorf("record the end of the guest: %w", err)
	}
	return nil
}

// writeFile replaces a file of a runtime folder. It does not sync: the file is for a daemon that was down. After a power cut there is nothing to
// adopt.
func writeFile(path string, content any) error {
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// readNote returns "" if no end of this exact run was recorded.
func (h handle) readNote() (string, error) {
	b, err := os.ReadFile(filepath.Join(h.Dir, exitFile))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read how the guest ended: %w", err)
	}
	var n note
	if err := json.Unmarshal(b, &n); err != nil {
		return "", errdefs.DataLossf("read how the guest ended: %w", err)
	}
	if n.PID != h.PID || n.Start != h.Start {
		return "", nil
	}
	return n.Reason, nil
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
