package logfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// writer writes the log in a folder. Safe for concurrent use.
type writer struct {
	dir string
	max int64 // bytes of a file

	mu   sync.Mutex
	f    *os.File
	size int64
	lost int64 // bytes of output that could not be written
	buf  []byte
}

// open opens the log in dir, or makes it. What an interrupted write left of a line is removed.
func open(dir string, limit int64) (*writer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of a log: %w", err)
	}
	w := &writer{dir: dir, max: limit}
	if err := w.open(); err != nil {
		return nil, err
	}
	if err := w.mend(); err != nil {
		return nil, errors.Join(fmt.Errorf("remove an unfinished line of log %s: %w", dir, err), w.f.Close())
	}
	return w, nil
}

func (w *writer) open() error {
	f, err := os.OpenFile(filepath.Join(w.dir, current), os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("open a log: %w", err)
	}
	fi, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("open a log: %w", err), f.Close())
	}
	w.f, w.size = f, fi.Size()
	return nil
}

// mend removes the rest of a line without an end. Readers take whole lines only.
func (w *writer) mend() error {
	at := max(w.size-maxLine, 0)
	tail := make([]byte, w.size-at)
	if _, err := w.f.ReadAt(tail, at); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	keep := at + int64(bytes.LastIndexByte(tail, '\n')+1)
	if keep == w.size {
		return nil
	}
	w.size = keep
	return w.f.Truncate(keep)
}

// write appends output. A container must not wait for a disk that is full, or die of it: what cannot be written is counted, and the
// number stands in the log as soon as that can be written again.
func (w *writer) write(at time.Time, stream string, data []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = w.buf[:0]
	if w.lost > 0 {
		w.buf = appendEntry(w.buf, at, stderr, fmt.Appendf(nil, "[%d bytes of output were lost, because the log could not be written]\n", w.lost))
	}
	w.buf = appendEntry(w.buf, at, stream, data)
	if err := w.put(w.buf); err != nil {
		w.lost += int64(len(data))
		return
	}
	w.lost = 0
}

func (w *writer) put(lines []byte) error {
	if w.size > 0 && w.size+int64(len(lines)) > w.max {
		if err := w.rotate(); err != nil {
			return err
		}
	}
	n, err := w.f.Write(lines)
	w.size += int64(n)
	if err == nil || n == 0 {
		return err
	}
	// A part of a line must not be followed by another line.
	w.size -= int64(n)
	return errors.Join(err, w.f.Truncate(w.size))
}

// rotate makes the file the older one, and begins a new one.
func (w *writer) rotate() error {
	if err := os.Rename(filepath.Join(w.dir, current), filepath.Join(w.dir, older)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	old := w.f
	if err := w.open(); err != nil {
		return err
	}
	return old.Close()
}

func (w *writer) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.f.Close()
}
