package pid1

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// pstoreDir has what the kernel said when it ended a run of the machine, where firmware can keep that.
const pstoreDir = "/sys/fs/pstore"

// mountPstore mounts it. A kernel without it is no error.
func mountPstore() error {
	err := unix.Mount("pstore", pstoreDir, "pstore", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("mount %s: %w", pstoreDir, err)
	}
	return nil
}

// LastWords returns why the kernel has ended an earlier run of this machine, as it has said itself; "": it has not, or the firmware keeps nothing.
func LastWords() string { return lastWords(pstoreDir) }

// panicked matches the line of a panic.
var panicked = regexp.MustCompile(`Kernel panic - not syncing: ([^\n]{1,200})`)

// maxRecord bounds what is read of a record, in bytes.
const maxRecord = 1 << 20

func lastWords(dir string) string {
	files, err := filepath.Glob(filepath.Join(dir, "dmesg-*"))
	if err != nil {
		return ""
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Clean(file))
		if err != nil {
			continue
		}
		if m := panicked.FindSubmatch(text[:min(len(text), maxRecord)]); m != nil {
			return strings.ToValidUTF8(strings.TrimSpace(string(m[1])), "?")
		}
	}
	return ""
}

// ClearLastWords removes what LastWords reads, so that it is not taken for the words of a later run.
func ClearLastWords() error {
	files, err := filepath.Glob(filepath.Join(pstoreDir, "dmesg-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		errs = append(errs, os.Remove(file))
	}
	return errors.Join(errs...)
}
