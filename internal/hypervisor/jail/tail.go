package jail

import (
	"errors"
	"io"
	"os"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

const (
	tailBytes = 16 << 10 // how much of the end of a log is read
	lineBytes = 500      // how much of what a program says is shown
)

// Tail returns the end of a log, but nothing before the offset from. A log that does not exist is empty.
func Tail(path string, from int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(from, end-tailBytes), tailBytes))
}

// LastLine returns the last line in a log after the offset from that says something and is not to be skipped, as OneLine shows it; "" if there is none.
func LastLine(path string, from int64, skip func(line string) bool) (last string) {
	text, err := Tail(path, from)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if line = OneLine(line); line != "" && !skip(line) {
			last = line
		}
	}
	return last
}

// OneLine makes what a program says fit to show.
func OneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	s = strings.Join(strings.Fields(s), " ")
	return strings.ToValidUTF8(s[:min(len(s), lineBytes)], "")
}
