// Package serial reads the log of a VM's serial console, a file that another process appends to, as log entries.
//
// The writer may truncate or replace the file to bound it. New output is noticed through inotify, not by polling. The
// package writes nothing and knows nothing of VMs.
package serial

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
)

// maxLine bounds one entry in bytes: output without newlines is split into pieces of this size.
const maxLine = 64 << 10

// Read calls fn for each line of the file at path: the last tail lines, or when negative all from the offset from on, then with follow the new
// ones, until ended is closed and everything is read. A missing file counts as empty. The console has no times:
// entries have none, and they are numbered from the first that is delivered.
func Read(ctx context.Context, path string, tail int, from int64, follow bool, ended <-chan struct{}, fn func(guest.LogEntry) error) error {
	r := &reader{path: path, fn: fn}
	defer r.close()
	if !follow {
		if err := r.start(tail, from); err != nil {
			return fmt.Errorf("read console log: %w", err)
		}
		return r.drain(ctx, true)
	}
	w, err := watch(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("follow console log: %w", err)
	}
	defer w.Close()
	if err := r.start(tail, from); err != nil {
		return fmt.Errorf("follow console log: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = w.SetReadDeadline(time.Now()) })
	defer stop()
	over := make(chan struct{})
	defer close(over)
	go func() { // ends with this call
		select {
		case <-ended:
			_ = w.SetReadDeadline(time.Now())
		case <-over:
		}
	}()
	return r.follow(ctx, w, ended)
}

type reader struct {
	path string
	fn   func(guest.LogEntry) error
	file *os.File
	buf  *bufio.Reader
	at   int64  // offset up to which the file was read
	part []byte // of a line that is not complete yet
	seq  uint64
}

// start opens the file where the last tail lines begin.
func (r *reader) start(tail int, from int64) error {
	if err := r.open(); err != nil || r.file == nil || tail < 0 && from <= 0 {
		return err
	}
	if tail < 0 {
		fi, err := r.file.Stat()
		if err != nil || fi.Size() < from { // it has been truncated
			return err
		}
		return r.seek(from)
	}
	off, err := tailOffset(r.file, tail)
	if err != nil {
		return err
	}
	return r.seek(off)
}

func (r *reader) open() error {
	f, err := os.Open(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	r.close()
	r.file, r.buf, r.at = f, bufio.NewReaderSize(f, maxLine), 0
	return nil
}

func (r *reader) seek(off int64) error {
	if _, err := r.file.Seek(off, io.SeekStart); err != nil {
		return err
	}
	r.buf.Reset(r.file)
	r.at = off
	return nil
}

func (r *reader) close() {
	if r.file != nil {
		_ = r.file.Close()
		r.file = nil
	}
}

func (r *reader) follow(ctx context.Context, w *os.File, ended <-chan struct{}) error {
	events := make([]byte, 4096)
	for {
		over := false
		select {
		case <-ended: // checked before reading: everything written until then is read now
			over = true
		default:
		}
		if err := r.refresh(ctx); err != nil {
			return fmt.Errorf("follow console log: %w", err)
		}
		if err := r.drain(ctx, over); err != nil || over {
			return err
		}
		if _, err := w.Read(events); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("follow console log: %w", err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// refresh handles a file that was replaced or truncated.
func (r *reader) refresh(ctx context.Context) error {
	now, err := os.Stat(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if r.file == nil {
		return r.open()
	}
	mine, err := r.file.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(now, mine) {
		if err := r.drain(ctx, true); err != nil {
			return err
		}
		return r.open()
	}
	if mine.Size() < r.at {
		r.part = nil
		return r.seek(0)
	}
	return nil
}

// drain delivers the complete lines, and with last also a final line without newline.
func (r *reader) drain(ctx context.Context, last bool) error {
	for r.file != nil {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece, err := r.buf.ReadSlice('\n')
		r.at += int64(len(piece))
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("read console log: %w", err)
		}
		r.part = append(r.part, piece...)
		if errors.Is(err, io.EOF) && len(r.part) < maxLine {
			break
		}
		if err := r.flush(); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			break
		}
	}
	if last {
		return r.flush()
	}
	return nil
}

func (r *reader) flush() error {
	if len(r.part) == 0 {
		return nil
	}
	r.seq++
	e := guest.LogEntry{Seq: r.seq, Stream: "stdout", Data: r.part, End: r.at}
	r.part = nil
	return r.fn(e)
}

// maxTail bounds what is searched for lines: the hypervisor can make its log any size.
const maxTail = 16 << 20

// tailOffset returns where the last n lines of f begin, or those of its last maxTail bytes.
func tailOffset(f *os.File, n int) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || n == 0 {
		return end, err
	}
	buf, first := make([]byte, maxLine), max(0, end-maxTail)
	for at := end; at > first; {
		size := min(at-first, int64(len(buf)))
		piece := buf[:size]
		if _, err := f.ReadAt(piece, at-size); err != nil && !errors.Is(err, io.EOF) {
			return 0, err
		}
		for i := bytes.LastIndexByte(piece, '\n'); i >= 0; i = bytes.LastIndexByte(piece[:i], '\n') {
			if at-size+int64(i) == end-1 {
				continue // the newline that ends the last line
			}
			if n--; n == 0 {
				return at - size + int64(i) + 1, nil
			}
		}
		at -= size
	}
	return first, nil
}

// watch returns a stream of inotify events of a folder; the runtime's poller waits on it, so deadlines work.
func watch(dir string) (*os.File, error) {
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	if _, err := syscall.InotifyAddWatch(fd, dir, syscall.IN_MODIFY|syscall.IN_CREATE|syscall.IN_MOVED_TO); err != nil {
		_ = syscall.Close(fd)
		return nil, &os.PathError{Op: "watch", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), "inotify"), nil
}
