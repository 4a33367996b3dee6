package update

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
)

// reportFile is beside the databases, and not in one of them: those may go back with the system.
const reportFile = "trial.json"

// report is what a version on trial writes about itself, for the version that runs after it.
type report struct {
	UID    string  `json:"uid"`
	Starts []start `json:"starts"`
}

// start is one of its starts that got as far as the daemon.
type start struct {
	Boot    string `json:"boot_id"`
	Failing string `json:"failing,omitempty"` // the gate that did not hold at last, and why
	Ended   string `json:"ended,omitempty"`   // why it gave up
	Log     string `json:"log,omitempty"`     // its last lines, when this was written
}

func (u *Updater) readReport() report {
	var r report
	text, err := os.ReadFile(filepath.Join(u.cfg.Evidence.Dir, reportFile))
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			u.cfg.Log.Warn("what a version on trial has written about itself cannot be read", "err", err)
		}
		return report{}
	}
	return r
}

// note changes what is written about this start. That it cannot be written is no reason to stop. Preconditions: mu is held, or nobody else has u.
func (u *Updater) note(change func(*start)) {
	r := u.readReport()
	if r.UID != u.cfg.Boot.UID {
		r = report{UID: u.cfg.Boot.UID}
	}
	if n := len(r.Starts); n == 0 || r.Starts[n-1].Boot != u.cfg.Evidence.BootID {
		r.Starts = append(r.Starts, start{Boot: u.cfg.Evidence.BootID})
	}
	last := &r.Starts[len(r.Starts)-1]
	last.Log = u.cfg.Evidence.Said()
	change(last)
	text, err := json.Marshal(r)
	if err == nil {
		err = os.MkdirAll(u.cfg.Evidence.Dir, 0o700)
	}
	if err == nil {
		err = atomicfile.WriteFile(filepath.Join(u.cfg.Evidence.Dir, reportFile), text, 0o600)
	}
	if err != nil {
		u.cfg.Log.Warn("what becomes of the trial is not written down", "err", err)
	}
}

// explain says why the update was rolled back, and what the end of its log is.
func (u *Updater) explain() (because, log string) {
	var starts []start
	if r := u.readReport(); r.UID == u.record.UID {
		starts = r.Starts
	}
	var b strings.Builder
	fmt.Fprintf(&b, "version %s did not start", u.record.Version)
	if n := len(starts); n == 0 {
		fmt.Fprintf(&b, ": in %d starts it did not get as far as its daemon", Tries)
	} else {
		b.Reset()
		last := starts[n-1]
		log = last.Log
		switch {
		case last.Ended != "":
			fmt.Fprintf(&b, "version %s ran, and %s", u.record.Version, last.Ended)
		default:
			fmt.Fprintf(&b, "version %s ran, and stopped before somebody confirmed it", u.record.Version)
		}
		if last.Failing != "" {
			fmt.Fprintf(&b, "; what did not hold: %s", last.Failing)
		}
		if last.Ended != "" {
			return b.String(), log // it has restarted by itself
		}
	}
	if u.cfg.Evidence.Watchdog() {
		b.WriteString("; it hung, and the watchdog restarted the machine")
	}
	if crash := u.cfg.Evidence.Crash(); crash != "" {
		fmt.Fprintf(&b, "; the kernel's last words: %s", crash)
	}
	return b.String(), log
}
