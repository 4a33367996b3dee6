package pid1

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

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

// lastSaid returns the end of the last line of a log, which often says why a program has ended. The console has room for so much of it.
func lastSaid(path string) string {
	const most = 400
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return ""
	}
	defer f.Close()
	at := int64(0)
	if info, err := f.Stat(); err == nil {
		at = max(0, info.Size()-most)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, at, most))
	if err != nil {
		return ""
	}
	text = bytes.TrimSpace(text)
	return strings.ToValidUTF8(string(text[bytes.LastIndexByte(text, '\n')+1:]), "?")
}

func lastLines(text []byte, lines int) []byte {
	all := bytes.SplitAfter(text, []byte("\n"))
	if n := len(all); len(all[n-1]) == 0 {
		all = all[:n-1]
	}
	return priority.ReplaceAll(bytes.Join(all[max(0, len(all)-lines):], nil), nil)
}
