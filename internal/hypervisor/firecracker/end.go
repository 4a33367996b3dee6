package firecracker

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// The program ends when its guest asks for a reset by the keyboard controller, and when a CPU of the guest faults three times. It says which in its log. A guest
// cannot power it off. So our guests reset by three faults (the argument reboot=t of the kernel), also when they panic, and power off by the
// keyboard controller, as their agent does (vm.ArgOff).

// reasonNone is recorded as the reason of an end when the process has started, so that the log in the runtime folder is known to be its own.
const reasonNone = "running"

// What the program says at its end.
const (
	saysSuccess = "Firecracker exiting successfully. exit_code=0"
	saysFailure = "Firecracker exiting with error. exit_code=1"
	saysFaults  = "Unexpected exit reason on vcpu run: Shutdown"
)

// reasonOf returns how the guest ended, by the end of the log of its process; "" if that does not say.
func reasonOf(log []byte) string {
	last, faults := "", false
	for line := range bytes.Lines(log) {
		if line = bytes.TrimSpace(bytes.Trim(line, "\x00")); len(line) == 0 {
			continue
		}
		last = string(line)
		faults = faults || strings.HasSuffix(last, saysFaults)
	}
	switch {
	case faults && (strings.HasSuffix(last, saysSuccess) || strings.HasSuffix(last, saysFailure)): // which of the two depends on who is first, the CPU or the program
		return jail.ReasonReset
	case strings.HasSuffix(last, saysSuccess):
		return jail.ReasonShutdown
	}
	return ""
}

// readEnd is reasonOf for the log in the runtime folder dir.
func readEnd(dir string) (string, error) {
	text, err := jail.Tail(filepath.Join(dir, programLog), 0)
	if err != nil {
		return "", fmt.Errorf("read how the guest ended: %w", err)
	}
	return reasonOf(text), nil
}

// isEnd reports whether a line of the log is the last word of every process.
func isEnd(line string) bool { return strings.Contains(line, "exit_code=") }
