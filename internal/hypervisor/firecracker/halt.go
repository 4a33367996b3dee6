package firecracker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// A program in the guest that powers it off itself, past the agent, only halts it: its kernel says so, and then the CPUs stand still for ever, with their interrupts off. The
// program does not notice. So what the guest has said last is looked at now and then. Only one whose CPUs have not run for even a nanosecond meanwhile is halted: an idle
// guest has timers.

// haltLook is how often a guest is looked at, and haltLooks how often it has to be found standing.
const (
	haltLook  = 2 * time.Second
	haltLooks = 4
)

// halts are the last words of a kernel that has halted.
var halts = [][]byte{[]byte("reboot: System halted"), []byte("reboot: Power down")}

// halt is what is known of one guest that may have halted.
type halt struct {
	size  int64  // of the console's log
	ran   string // for how long each CPU has run
	looks int
}

// over reports whether the guest has halted for good. It is called every haltLook.
func (i *instance) over(ctx context.Context, h *halt) bool {
	path := i.ConsoleLog()
	st, err := os.Stat(path)
	if err != nil {
		return false
	}
	if st.Size() != h.size {
		*h = halt{size: st.Size()}
		return false
	}
	if h.looks < 0 || h.size == 0 { // seen before, and it is something else
		return false
	}
	if h.ran == "" {
		if text, err := jail.Tail(path, 0); err != nil || !saysHalted(text) {
			h.looks = -1
			return false
		}
	}
	ran, err := i.ran()
	if s, serr := i.state(ctx); err != nil || serr != nil || s != stateRunning || ran != h.ran {
		h.ran, h.looks = ran, 0
		return false
	}
	h.looks++
	return h.looks >= haltLooks
}

// saysHalted reports whether a console's last line is that of a kernel that halts.
func saysHalted(text []byte) bool {
	text = bytes.TrimRight(text, "\x00\r\n ")
	line := text[bytes.LastIndexByte(text, '\n')+1:]
	for _, h := range halts {
		if bytes.HasSuffix(line, h) {
			return true
		}
	}
	return false
}

// ran returns for how long each CPU of the guest has run.
func (i *instance) ran() (string, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", i.h.PID))
	if err != nil {
		return "", err
	}
	var all []string
	for _, task := range tasks {
		name, err := os.ReadFile(filepath.Join(task, "comm"))
		if err != nil {
			return "", err
		}
		if !strings.HasPrefix(string(name), "fc_vcpu") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(task, "schedstat"))
		if err != nil {
			return "", err
		}
		all = append(all, string(text))
	}
	if len(all) == 0 {
		return "", errors.New("it has no CPUs")
	}
	return strings.Join(all, ""), nil
}
