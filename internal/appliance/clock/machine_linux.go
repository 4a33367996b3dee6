package clock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
)

// Host is the clock of this machine.
type Host struct {
	RTC  string // device of the clock that runs while the machine is off
	Last string // file with the last time that was known, which the clock is never set before at a start
}

// Step implements Machine.
func (h *Host) Step(d time.Duration) error {
	to := time.Now().Add(d)
	tv := unix.NsecToTimeval(to.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	h.keep(to)
	return h.synchronized()
}

// Slew implements Machine.
func (h *Host) Slew(d time.Duration) error {
	t := unix.Timex{Modes: unix.ADJ_OFFSET_SINGLESHOT, Offset: d.Microseconds()}
	if _, err := unix.Adjtimex(&t); err != nil {
		return fmt.Errorf("let the clock run towards the right time: %w", err)
	}
	h.keep(time.Now())
	return h.synchronized()
}

// synchronized tells the kernel that the clock is right, which then sets the other clock by it.
func (h *Host) synchronized() error {
	t := unix.Timex{Modes: unix.ADJ_STATUS | unix.ADJ_MAXERROR | unix.ADJ_ESTERROR}
	if _, err := unix.Adjtimex(&t); err != nil {
		return fmt.Errorf("tell the kernel that the clock is set: %w", err)
	}
	return nil
}

// keep stores the time for the next start. That is a help only.
func (h *Host) keep(t time.Time) {
	_ = atomicfile.WriteFile(h.Last, []byte(strconv.FormatInt(t.Unix(), 10)+"\n"), 0o600)
	f, err := os.OpenFile(h.RTC, os.O_WRONLY, 0)
	if err != nil {
		return // there is none
	}
	defer f.Close()
	u := t.UTC()
	_ = unix.IoctlSetRTCTime(int(f.Fd()), &unix.RTCTime{ //nolint:gosec // parts of a time
		Sec: int32(u.Second()), Min: int32(u.Minute()), Hour: int32(u.Hour()), Mday: int32(u.Day()), Mon: int32(u.Month()) - 1, Year: int32(u.Year()) - 1900,
	})
}

// Floor sets the clock to the last time that was known, if it is before that: a machine without a battery begins in 1970.
func (h *Host) Floor() error {
	text, err := os.ReadFile(h.Last)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	last, bad := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if bad != nil || last <= time.Now().Unix() {
		return nil //nolint:nilerr // a damaged file says nothing
	}
	tv := unix.Timeval{Sec: last}
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set the clock to the last time that was known: %w", err)
	}
	return nil
}
