package pid1

import (
	"bytes"
	"regexp"

	"golang.org/x/sys/unix"
)

// readAll is SYSLOG_ACTION_READ_ALL of syslog(2): the end of the kernel's log, which stays there.
const readAll = 3

// priority is what begins a line of the kernel's log.
var priority = regexp.MustCompile(`(?m)^<\d+>`)

// KernelLog returns the last lines of the kernel's log, which has those of process 1; nothing without the right to read it.
func KernelLog(lines int) []byte {
	text := make([]byte, 32<<10)
	n, err := unix.Klogctl(readAll, text)
	if err != nil {
		return nil
	}
	return lastLines(text[:n], lines)
}

func lastLines(text []byte, lines int) []byte {
	all := bytes.SplitAfter(text, []byte("\n"))
	if n := len(all); len(all[n-1]) == 0 {
		all = all[:n-1]
	}
	return priority.ReplaceAll(bytes.Join(all[max(0, len(all)-lines):], nil), nil)
}
