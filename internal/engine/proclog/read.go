package proclog

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/guest"
)

// maxLine bounds a line of a log file in bytes: maxData in base64 with its envelope, with a margin.
const maxLine = 2 * maxData

// Read calls fn with the selected entries, oldest first, and returns nil at the end: at once, or with Follow when the
// run has ended. A slow fn delays nobody; entries that are rotated away meanwhile are left out. It does not use
// opts.Serial.
func (l *Log) Read(ctx context.Context, opts guest.LogOptions, fn func(guest.LogEntry) error) error {
	after, err := l.tailStart(opts)
	if err != nil {
		return err
	}
	c := &cursor{log: l, opts: opts, last: after, fn: fn}
	defer c.close()
	l.mu.Lock()
	c.epoch, c.early = l.epoch, l.number == 0 && l.last == 0
	l.mu.Unlock()
	for {
		wait, more, err := c.reopen()
		if err != nil {
			return err
		}
		if err := c.drain(ctx); err != nil {
			return err
		}
		if !opts.Follow || opts.Previous || !more {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wait:
		}
	}
}

// tailStart returns the sequence number after which the last opts.Tail entries begin.
func (l *Log) tailStart(opts guest.LogOptions) (uint64, error) {
	if opts.Tail < 0 {
		return 0, nil
	}
	files, err := l.segments(opts.Previous)
	if err != nil {
		return 0, err
	}
	defer closeAll(files)
	var ring []uint64 // of the last opts.Tail numbers; ring[at] is the oldest once it is full
	var newest uint64
	at := 0
	for _, f := range files {
		err := each(f, func(e guest.LogEntry) {
			newest = max(newest, e.Seq)
			switch {
			case e.Stream == skipped:
			case e.Time.Before(opts.Since), opts.Tail == 0:
			case len(ring) < opts.Tail:
				ring = append(ring, e.Seq)
			default:
				ring[at] = e.Seq
				at = (at + 1) % len(ring)
			}
		})
		if err != nil {
			return 0, fmt.Errorf("read log: %w", err)
		}
	}
	if len(ring) == 0 {
		return newest, nil
	}
	return ring[at] - 1, nil
}

// HasPrevious reports whether there is a run before the current one.
func (l *Log) HasPrevious() bool {
	_, err := os.Stat(filepath.Join(l.dir, previousRun))
	return err == nil
}

// segments opens the files of a run, older first, at one moment. Missing ones are left out.
func (l *Log) segments(previous bool) ([]*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.openSegments(previous)
}

func (l *Log) openSegments(previous bool) ([]*os.File, error) {
	run := currentRun
	if previous {
		run = previousRun
	}
	var files []*os.File
	for _, name := range []string{older, newer} {
		f, err := os.Open(filepath.Join(l.dir, run, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("read log: %w", err)
		}
		files = append(files, f)
	}
	return files, nil
}

// cursor is the position of one reader.
type cursor struct {
	epoch int  // of the run that is read
	early bool // no run had begun: the first one is read
	log   *Log
	opts  guest.LogOptions
	fn    func(guest.LogEntry) error
	last  uint64 // sequence number delivered last
	cuts  int    // of the log, when the files were opened
	open  bool
	file  []*os.File
	line  []*lines
}

// reopen updates the cursor's files. It returns what to wait on when they are read, and whether more may come.
func (c *cursor) reopen() (<-chan struct{}, bool, error) {
	l := c.log
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.epoch == c.epoch:
	case c.early: // the first run began
		c.epoch = l.epoch
	default: // another run began: the open files hold the rest of ours
		return nil, false, nil
	}
	c.early = c.early && l.number == 0 && l.last == 0
	if !c.open || c.cuts != l.cuts {
		files, err := l.openSegments(c.opts.Previous)
		if err != nil {
			return nil, false, err
		}
		// The open files may hold entries that were rotated away meanwhile: they come first, and duplicates are left
		// out.
		keep := c.file[max(0, len(c.file)-1):]
		closeAll(c.file[:len(c.file)-len(keep)])
		c.line = c.line[len(c.line)-len(keep):]
		c.file = append(append([]*os.File(nil), keep...), files...)
		for _, f := range files {
			c.line = append(c.line, newLines(f))
		}
		c.cuts, c.open = l.cuts, true
	}
	if l.live && l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed, l.live, nil
}

// drain delivers everything that the open files hold.
func (c *cursor) drain(ctx context.Context) error {
	for _, r := range c.line {
		for {
			if err := ctx.Err(); err != nil {
				return err
			}
			e, err := r.entry()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return fmt.Errorf("read log: %w", err)
			}
			if e.Seq <= c.last || e.Time.Before(c.opts.Since) {
				continue
			}
			c.last = e.Seq
			if e.Stream == skipped {
				continue
			}
			if err := c.fn(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *cursor) close() { closeAll(c.file) }

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// lines reads entries from a file that grows: it keeps the start of an incomplete line for the next call.
type lines struct {
	r    *bufio.Reader
	part []byte
	skip bool // the line is too long: drop it up to its end
}

func newLines(r io.Reader) *lines { return &lines{r: bufio.NewReaderSize(r, 32<<10)} }

// entry returns the next entry. Invalid lines are skipped. io.EOF means: nothing more for now.
func (l *lines) entry() (guest.LogEntry, error) {
	for {
		piece, err := l.r.ReadSlice('\n')
		whole := err == nil
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) && !errors.Is(err, io.EOF) {
			return guest.LogEntry{}, err
		}
		if !l.skip {
			l.part = append(l.part, piece...)
		}
		if len(l.part) > maxLine {
			l.part, l.skip = nil, true
		}
		if !whole {
			if errors.Is(err, io.EOF) {
				return guest.LogEntry{}, io.EOF
			}
			continue
		}
		e, ok := parse(l.part)
		ok = ok && !l.skip
		l.part, l.skip = l.part[:0], false
		if ok {
			return e, nil
		}
	}
}

// parse decodes one line. Entries are numbered from 1: number 0 is invalid, except where Skip stores a position.
func parse(line []byte) (guest.LogEntry, bool) {
	line = bytes.TrimSpace(line)
	var e guest.LogEntry
	if len(line) == 0 || json.Unmarshal(line, &e) != nil || e.Seq == 0 && e.Stream != skipped {
		return guest.LogEntry{}, false
	}
	return e, true
}

// each calls fn for every entry that r holds.
func each(r io.Reader, fn func(guest.LogEntry)) error {
	l := newLines(r)
	for {
		e, err := l.entry()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fn(e)
	}
}
