package logfile

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Exists reports whether there is a log in dir.
func Exists(dir string) bool {
	for _, name := range []string{current, older} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

// Read calls fn with the entries of the log in dir. With Follow it goes on until ended is closed and everything that was written before
// is delivered, ctx ends, or fn fails. A log that does not exist is an empty one.
func Read(ctx context.Context, dir string, o container.LogOptions, ended <-chan struct{}, fn func(container.LogEntry) error) error {
	r := &reader{dir: dir, since: o.Since, fn: fn}
	defer r.close()
	var changes *fsnotify.Watcher
	if o.Follow {
		w, err := watch(dir)
		if err != nil {
			return err
		}
		defer w.Close()
		changes = w
	}
	if err := r.begin(ctx, o.Tail); err != nil {
		return err
	}
	for {
		last := !o.Follow || closed(ended) // before it reads, so that what was written until then is read
		if err := r.deliver(ctx); err != nil {
			return err
		}
		if last {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
		case <-changes.Events:
		case err := <-changes.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // then it has something to read
				return fmt.Errorf("follow log %s: %w", dir, err)
			}
		}
	}
}

// watch tells of changes in dir, which it makes if the container has not yet started.
func watch(dir string) (*fsnotify.Watcher, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of a log: %w", err)
	}
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, errdefs.New(errdefs.ResourceExhausted, "follow log %s: %w; raise fs.inotify.max_user_instances", dir, err)
	}
	if err := w.Add(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("follow log %s: %w", dir, err), w.Close())
	}
	return w, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// reader is at a place of a log. The place moves only behind whole lines.
type reader struct {
	dir   string
	since time.Time
	fn    func(container.LogEntry) error

	f  *os.File // nil: before the first file
	at int64    // offset in it

	hold bool // earlier files stay open, in held
	held []*os.File
}

func (r *reader) close() {
	for _, f := range append(r.held, r.f) {
		if f != nil {
			f.Close()
		}
	}
}

// begin goes to the last lines of the log, or to its start.
func (r *reader) begin(ctx context.Context, tail int) error {
	if tail < 0 {
		return nil
	}
	var starts []place // of the last lines
	open := map[string]bool{}
	scan := &reader{dir: r.dir, hold: true}
	defer scan.close()
	scan.fn = func(e container.LogEntry) error {
		if !open[e.Stream] {
			starts = append(starts, place{file: scan.f, at: scan.at})
			if len(starts) > tail {
				starts = starts[1:]
			}
		}
		open[e.Stream] = !bytes.HasSuffix(e.Data, []byte{'\n'})
		return nil
	}
	if err := scan.deliver(ctx); err != nil {
		return err
	}
	to := place{file: scan.f, at: scan.at}
	if len(starts) > 0 {
		to = starts[0]
	}
	r.f, r.at = to.file, to.at
	scan.held = slices.DeleteFunc(append(scan.held, scan.f), func(f *os.File) bool { return f == to.file })
	scan.f = nil
	return nil
}

// place is where a line starts.
type place struct {
	file *os.File
	at   int64
}

// deliver calls fn with what is there, and goes from file to file.
func (r *reader) deliver(ctx context.Context) error {
	for {
		if r.f == nil {
			if ok, err := r.next(); !ok {
				return err
			}
		}
		if err := r.rest(ctx); err != nil {
			return err
		}
		// The file has no more lines when it was renamed before its end was reached. That is looked at in this order.
		renamed := !r.is(current)
		if !renamed {
			return nil
		}
		if err := r.rest(ctx); err != nil {
			return err
		}
		if ok, err := r.next(); !ok {
			return err
		}
	}
}

// next opens the file after this one; false if there is none yet. If this one is no longer there, what was written between it and the
// older one is lost to this reader.
func (r *reader) next() (bool, error) {
	names := []string{older, current}
	if r.f != nil && r.is(older) {
		names = names[1:]
	}
	for _, name := range names {
		f, err := os.Open(filepath.Join(r.dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("read log %s: %w", r.dir, err)
		}
		r.keep(f)
		return true, nil
	}
	return false, nil
}

func (r *reader) keep(f *os.File) {
	if r.f != nil && r.hold {
		r.held = append(r.held, r.f)
	} else if r.f != nil {
		r.f.Close()
	}
	r.f, r.at = f, 0
}

// is reports whether the file has this name now.
func (r *reader) is(name string) bool {
	ours, err := r.f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(filepath.Join(r.dir, name))
	return err == nil && os.SameFile(ours, named)
}

// rest calls fn with the lines from the place on.
func (r *reader) rest(ctx context.Context) error {
	lines := bufio.NewReaderSize(io.NewSectionReader(r.f, r.at, 1<<62), 2*maxLine)
	for ctx.Err() == nil {
		line, err := lines.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull): // no line of ours
		case errors.Is(err, io.EOF):
			return nil // the rest, if any, is being written
		case err != nil:
			return fmt.Errorf("read log %s: %w", r.dir, err)
		default:
			if e, ok := parse(line[:len(line)-1]); ok && !e.Time.Before(r.since) {
				if err := r.fn(e); err != nil {
					return err
				}
			}
		}
		r.at += int64(len(line))
	}
	return ctx.Err()
}
