// Package crilog writes the output of a container into a file as a kubelet reads it:
// RFC3339Nano stdout|stderr F|P TEXT, where P marks a part of a line (CRI, "kubelet/cri logs").
//
// It follows no container and knows none.
package crilog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxText is the longest text of one line in bytes; more is written as several parts, as containerd does.
const maxText = 16 << 10

// File is the log of one container. Safe for concurrent use.
type File struct {
	path string

	mu sync.Mutex
	f  *os.File
}

// Open opens the log at path, or makes it, with its folder. Only root can read it. What an interrupted write left of a line
// is removed.
func Open(path string) (*File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // as a kubelet makes it
		return nil, fmt.Errorf("make the folder of log %s: %w", path, err)
	}
	l := &File{path: path}
	if err := l.open(); err != nil {
		return nil, err
	}
	if err := l.mend(); err != nil {
		l.f.Close()
		return nil, err
	}
	return l, nil
}

func (l *File) open() error {
	f, err := os.OpenFile(l.path, os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return fmt.Errorf("open log %s: %w", l.path, err)
	}
	l.f = f
	return nil
}

// Reopen goes on in a new file at the path, after the old one was renamed.
func (l *File) Reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.f
	if err := l.open(); err != nil {
		return err
	}
	return old.Close()
}

// Close closes the file.
func (l *File) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.f.Close()
}

// Write appends output of a stream, stdout or stderr. A part of a line has no newline at its end.
func (l *File) Write(at time.Time, stream string, data []byte) error {
	var out bytes.Buffer
	for len(data) > 0 {
		text, rest := data, []byte(nil)
		end := bytes.IndexByte(data, '\n')
		if end >= 0 {
			text, rest = data[:end], data[end+1:]
		}
		tag := "F"
		switch {
		case len(text) > maxText:
			tag, text, rest = "P", data[:maxText], data[maxText:]
		case end < 0:
			tag = "P"
		}
		fmt.Fprintf(&out, "%s %s %s %s\n", at.Format(time.RFC3339Nano), stream, tag, text)
		data = rest
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.f.Write(out.Bytes()); err != nil {
		return fmt.Errorf("write log %s: %w", l.path, err)
	}
	return nil
}

// lastBytes is how much of the end of a log holds its last line.
const lastBytes = maxText + 1<<10

// mend removes the rest of a line without an end.
func (l *File) mend() error {
	size, tail, err := l.tail()
	if err != nil || len(tail) == 0 || tail[len(tail)-1] == '\n' {
		return err
	}
	keep := size - int64(len(tail)) + int64(bytes.LastIndexByte(tail, '\n')+1)
	if err := l.f.Truncate(keep); err != nil {
		return fmt.Errorf("remove an incomplete line from log %s: %w", l.path, err)
	}
	return nil
}

func (l *File) tail() (size int64, tail []byte, err error) {
	fi, err := l.f.Stat()
	if err != nil {
		return 0, nil, fmt.Errorf("read log %s: %w", l.path, err)
	}
	at := max(fi.Size()-lastBytes, 0)
	tail = make([]byte, fi.Size()-at)
	if _, err := l.f.ReadAt(tail, at); err != nil && !errors.Is(err, io.EOF) {
		return 0, nil, fmt.Errorf("read log %s: %w", l.path, err)
	}
	return fi.Size(), tail, nil
}

// Last returns the time of the last line that was written: of this file or, if that has none, of the one that was renamed last. Zero:
// there is none.
func (l *File) Last() (time.Time, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, tail, err := l.tail()
	if err != nil {
		return time.Time{}, err
	}
	if at := lastTime(tail); !at.IsZero() {
		return at, nil
	}
	return rotated(l.path)
}

// lastTime returns the time of the last line of text.
func lastTime(text []byte) time.Time {
	text = bytes.TrimSuffix(text, []byte("\n"))
	line := text[bytes.LastIndexByte(text, '\n')+1:]
	stamp, _, ok := bytes.Cut(line, []byte(" "))
	at, err := time.Parse(time.RFC3339Nano, string(stamp))
	if !ok || err != nil {
		return time.Time{}
	}
	return at
}

// rotated returns the time of the last line of the newest file that a kubelet renamed.
func rotated(path string) (time.Time, error) {
	old := newest(path)
	if old == nil {
		return time.Time{}, nil
	}
	defer old.Close()
	_, tail, err := (&File{path: path, f: old}).tail()
	return lastTime(tail), err
}

// newest opens the newest file that a kubelet renamed: PATH.TIMESTAMP, not yet compressed. nil: there is none that can be read.
func newest(path string) *os.File {
	names, err := filepath.Glob(path + ".[0-9]*[0-9]")
	if err != nil || len(names) == 0 {
		return nil
	}
	old, err := os.Open(names[len(names)-1]) // Glob sorts, and the kubelet's timestamps sort by time
	if err != nil {
		return nil
	}
	return old
}

// markName is the extended attribute with the mark of a log.
const markName = "user.cocoon.read"

// SetMark keeps how far the source of the log was read, in bytes, with the file. A file system without extended attributes keeps nothing.
func (l *File) SetMark(at int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := unix.Fsetxattr(int(l.f.Fd()), markName, strconv.AppendInt(nil, at, 10), 0)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("mark log %s: %w", l.path, err)
	}
	return nil
}

// Mark returns what SetMark has kept: with this file or, if that has none, with the one that was renamed last. 0: nothing.
func (l *File) Mark() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at := mark(l.f); at > 0 {
		return at
	}
	old := newest(l.path)
	if old == nil {
		return 0
	}
	defer old.Close()
	return mark(old)
}

func mark(f *os.File) int64 {
	text := make([]byte, 20)
	n, err := unix.Fgetxattr(int(f.Fd()), markName, text)
	if err != nil {
		return 0
	}
	at, err := strconv.ParseInt(string(text[:n]), 10, 64)
	if err != nil {
		return 0
	}
	return at
}
