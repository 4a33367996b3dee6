package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// EndFile records, in the runtime folder, how the guest ended. It is written before the process may end.
const EndFile = "exit.json"

// The reasons of an end that the guest itself caused, as QEMU calls them.
const (
	ReasonShutdown = "guest-shutdown"
	ReasonReset    = "guest-reset"
)

// Ended translates a reason into an Exit of the contract.
func Ended(reason string) hypervisor.Exit {
	return hypervisor.Exit{GuestShutdown: reason == ReasonShutdown, GuestReset: reason == ReasonReset, Code: -1}
}

// End is the content of EndFile. Pid and start time bind it to one run.
type End struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`
	Reason string `json:"reason"` // ReasonShutdown, ReasonReset, or a term of the driver
}

// Write records the end in the runtime folder dir.
func (e End) Write(dir string) error {
	if err := WriteFile(filepath.Join(dir, EndFile), e); err != nil {
		return fmt.Errorf("record the end of the guest: %w", err)
	}
	return nil
}

// ReadEnd returns the reason of the end of the run with this pid and start time; "" if no end of exactly this run was recorded.
func ReadEnd(dir string, pid int, start uint64) (reason string, err error) {
	e, err := readEnd(dir)
	if err != nil || e.PID != pid || e.Start != start {
		return "", err
	}
	return e.Reason, nil
}

// readEnd reads EndFile; all is zero if there is none.
func readEnd(dir string) (e End, err error) {
	b, err := os.ReadFile(filepath.Join(dir, EndFile))
	if errors.Is(err, os.ErrNotExist) {
		return End{}, nil
	}
	if err != nil {
		return End{}, fmt.Errorf("read how the guest ended: %w", err)
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return End{}, errdefs.DataLossf("read how the guest ended: %w", err)
	}
	return e, nil
}
