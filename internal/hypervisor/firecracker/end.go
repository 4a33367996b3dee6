package firecracker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor"
)

// The program ends when its guest asks for a reset by the keyboard controller, and when a CPU of the guest faults three times. It says which in its log. A guest
// cannot power it off. So our guests reset by three faults (the argument reboot=t of the kernel), also when they panic, and power off by the
// keyboard controller, as their agent does (vm.ArgOff).

// The reasons of an end that the guest itself caused.
const (
	reasonShutdown = "guest-shutdown"
	reasonReset    = "guest-reset"

	reasonNone = "running" // recorded when the process has started, so that the log in the runtime folder is known to be its own
)

// ended translates a reason into an Exit of the contract.
func ended(reason string) hypervisor.Exit {
	return hypervisor.Exit{GuestShutdown: reason == reasonShutdown, GuestReset: reason == reasonReset, Code: -1}
}

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
		return reasonReset
	case strings.HasSuffix(last, saysSuccess):
		return reasonShutdown
	}
	return ""
}

// maxEnd is how much of the end of a log is read, in bytes.
const maxEnd = 16 << 10

// readEnd is reasonOf for the log in the runtime folder dir.
func readEnd(dir string) (string, error) {
	text, err := tail(filepath.Join(dir, programLog))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read how the guest ended: %w", err)
	}
	return reasonOf(text), nil
}

// tail returns the end of a log.
func tail(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, end-maxEnd), maxEnd))
}

// lastLine returns the last line of a log that says something, short enough for an error.
func lastLine(path string) (last string) {
	text, err := tail(path)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if line = oneLine(line); line != "" && !strings.Contains(line, "exit_code=") {
			last = line
		}
	}
	return last
}
