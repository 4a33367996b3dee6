package pid1

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// watchdogTimeout is how long a machine that nobody feeds goes on.
	watchdogTimeout = 60 * time.Second
	watchdogDevices = "/dev/watchdog[0-9]*"
	watchdogClass   = "/sys/class/watchdog"
	cardReset       = 0x20 // WDIOF_CARDRESET: the watchdog has reset the machine
)

// watchdogs are the devices that reset the machine if nobody feeds them. The initramfs has started them, and they run on until somebody disarms them: also when
// process 1 dies.
type watchdogs struct {
	mu   sync.Mutex
	open map[string]*os.File
}

// find opens the devices that are not open yet, and returns how many are. One that cannot be opened hinders no other.
func (w *watchdogs) find(pattern string) (int, error) {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return 0, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		w.open = map[string]*os.File{}
	}
	var errs []error
	for _, path := range paths {
		if w.open[path] != nil {
			continue
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		w.open[path] = f
		// A device that knows no other timeout than its own keeps that; process 1 feeds it every few seconds.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.WDIOC_SETTIMEOUT, int(watchdogTimeout/time.Second)); err != nil && !errors.Is(err, unix.ENOTTY) {
			errs = append(errs, fmt.Errorf("set the timeout of %s: %w", path, err))
		}
	}
	return len(w.open), errors.Join(errs...)
}

// feed has the machine go on for watchdogTimeout.
func (w *watchdogs) feed() error { return w.write("\x00") }

// disarm stops the devices: a machine that was halted must not start again.
func (w *watchdogs) disarm() error {
	err := w.write("V")
	w.mu.Lock()
	defer w.mu.Unlock()
	for path, f := range w.open {
		err = errors.Join(err, f.Close())
		delete(w.open, path)
	}
	return err
}

func (w *watchdogs) write(text string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var errs []error
	for _, f := range w.open {
		_, err := f.WriteString(text)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (w *watchdogs) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.open)
}

// ResetByWatchdog reports whether a watchdog has ended the run of this machine before this one. A machine that has only the kernel's own watchdog cannot tell.
func ResetByWatchdog() bool { return resetByWatchdog(watchdogClass) }

func resetByWatchdog(class string) bool {
	files, err := filepath.Glob(filepath.Join(class, "*", "bootstatus"))
	if err != nil {
		return false
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Clean(file))
		if err != nil {
			continue
		}
		if bits, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 32); err == nil && bits&cardReset != 0 {
			return true
		}
	}
	return false
}
