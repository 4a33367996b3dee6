// Package proclog stores the output of the main process of one VM on the host: bounded, in order, without gaps or
// duplicates.
//
// A log is a folder with JSON lines (guest.LogEntry) in two segments; when the newer one is full it replaces the
// older. The previous run is kept beside the current one. The package knows neither guests nor agents: callers give
// it entries, and the sequence numbers of these tell what it already has.
//
// Entries are written one by one and not synced. They survive kill -9; a power cut may take the last ones, but it
// ends the guest as well. A torn last line is dropped when the log is opened and skipped when it is read.
package proclog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"cocoonstack.io/cocoon/internal/guest"
)

const (
	currentRun  = "log"
	previousRun = "log.previous"
	newer       = "new.jsonl"
	older       = "old.jsonl"
	foreign     = "foreign" // empty file: the guest's log begins with entries of another run, see Skip
	skipped     = "-"       // stream of an entry that only says how much Skip left out; readers do not get it

	// maxData bounds one entry, in bytes. Longer data is cut off; no agent sends that much in one message.
	maxData = 1 << 20
	// minSegment keeps a segment bigger than a few lines, whatever the configuration says.
	minSegment = 4 << 10
)

// Log is the log of one VM. It is safe for concurrent use by one writer and many readers.
type Log struct {
	dir string // folder of the VM
	max int64  // bytes of one segment

	mu      sync.Mutex
	live    bool     // a run is in progress: more may come
	file    *os.File // opened with the first entry: a silent VM costs no file
	size    int64
	last    uint64        // sequence number of the newest entry
	number  int           // guest.LogEntry.Run of the newest entry
	epoch   int           // grows with each run
	cuts    int           // grows with each change of segments
	changed chan struct{} // closed at the next change; nil while nobody waits
}

// New returns the log in the folder of a VM, bounded to maxBytes per run. It does not access the folder.
func New(dir string, maxBytes int64) *Log {
	return &Log{dir: dir, max: max(maxBytes/2, minSegment)}
}

// Begin starts a run. The output of the last run becomes the previous run, unless it is empty.
func (l *Log) Begin() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.number = 0
	return l.begin()
}

// begin is Begin. Preconditions: mu is held.
func (l *Log) begin() error {
	l.close()
	if err := l.shift(); err != nil {
		return fmt.Errorf("begin log: %w", err)
	}
	l.epoch++
	l.last, l.live = 0, true
	l.wake()
	return nil
}

// BeginForeign starts a run of a guest whose log begins with the output of another run. Skip says how much that is.
func (l *Log) BeginForeign() error {
	if err := l.Begin(); err != nil {
		return err
	}
	dir := filepath.Join(l.dir, currentRun)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("begin log: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, foreign), nil, 0o600); err != nil {
		return fmt.Errorf("begin log: %w", err)
	}
	return nil
}

// Skip leaves out the entries up to seq of a run (see guest.LogEntry; 0 where runs have no number) and those of
// earlier runs, if the log began with BeginForeign and they have not been left out yet.
func (l *Log) Skip(run int, seq uint64) error {
	mark := filepath.Join(l.dir, currentRun, foreign)
	if _, err := os.Stat(mark); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if run > 0 || seq > 0 { // an entry stores the position, also for a later process
		l.mu.Lock()
		l.number = run
		err := l.write(guest.LogEntry{Run: run, Seq: seq, Stream: skipped})
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := os.Remove(mark); err != nil {
		return fmt.Errorf("begin log: %w", err)
	}
	return nil
}

// Resume continues the existing run after a restart of the daemon.
func (l *Log) Resume() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
	l.last, l.number = 0, 0
	found, err := l.place(false)
	if err != nil {
		return err
	}
	if !found { // the previous run may have been moved away for an entry that never came
		if _, err := l.place(true); err != nil {
			return err
		}
		if l.number == 0 { // it belongs to another guest, whose numbers mean nothing here
			l.last = 0
		}
	}
	l.live = true
	return nil
}

// place finds the newest entry of a run, if it has one. Preconditions: mu is held.
func (l *Log) place(previous bool) (found bool, err error) {
	files, err := l.openSegments(previous)
	if err != nil {
		return false, err
	}
	defer closeAll(files)
	for _, f := range files {
		err := each(f, func(e guest.LogEntry) {
			l.last, l.number, found = max(l.last, e.Seq), max(l.number, e.Run), true
		})
		if err != nil {
			return false, fmt.Errorf("resume log: %w", err)
		}
	}
	return found, nil
}

// Finish ends the run: followers return once they have everything.
func (l *Log) Finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
	l.wake()
}

// Last is the sequence number of the newest entry of this run; 0 when there is none.
func (l *Log) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// Place is the run and the sequence number of the newest entry; 0 when there is none.
func (l *Log) Place() (run int, seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.number, l.last
}

// Append adds an entry. An entry that already exists is skipped. An entry of a later run begins that run; without a
// sequence number it does nothing else. On error nothing of it stays.
func (l *Log) Append(e guest.LogEntry) error {
	if len(e.Data) > maxData {
		e.Data = e.Data[:maxData]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.live {
		return fmt.Errorf("append to log: %w", os.ErrClosed)
	}
	if e.Run < l.number || e.Run == l.number && e.Seq <= l.last {
		return nil
	}
	if e.Run > l.number {
		if err := l.begin(); err != nil {
			return err
		}
		if l.number = e.Run; e.Seq == 0 {
			return nil
		}
	}
	return l.write(e)
}

// write adds an entry to the run. Preconditions: mu is held.
func (l *Log) write(e guest.LogEntry) error {
	if !l.live {
		return fmt.Errorf("append to log: %w", os.ErrClosed)
	}
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode log entry: %w", err)
	}
	line = append(line, '\n')
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.size > 0 && l.size+int64(len(line)) > l.max {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if _, err := l.file.Write(line); err != nil {
		_ = l.file.Truncate(l.size) // readers would skip a torn line, but also the next line with it
		return fmt.Errorf("append to log: %w", err)
	}
	l.size += int64(len(line))
	l.last = e.Seq
	l.wake()
	return nil
}

// shift moves the current run away. Each rename is atomic; an interruption in between loses only the older run.
func (l *Log) shift() error {
	cur, prev := filepath.Join(l.dir, currentRun), filepath.Join(l.dir, previousRun)
	empty := true
	for _, name := range []string{newer, older} {
		if info, err := os.Stat(filepath.Join(cur, name)); err == nil && info.Size() > 0 {
			empty = false
		}
	}
	if empty {
		return os.RemoveAll(cur)
	}
	if err := os.RemoveAll(prev); err != nil {
		return err
	}
	return os.Rename(cur, prev)
}

// open makes the run writable, without a line that an earlier process did not complete. Preconditions: mu is held.
func (l *Log) open() error {
	dir := filepath.Join(l.dir, currentRun)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("open log: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, newer), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	size, err := cutTornLine(f)
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open log: %w", err)
	}
	l.file, l.size = f, size
	l.cuts++
	return nil
}

// rotate makes the newer segment the older one. Preconditions: mu is held.
func (l *Log) rotate() error {
	dir := filepath.Join(l.dir, currentRun)
	err := os.Rename(filepath.Join(dir, newer), filepath.Join(dir, older))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // missing: an earlier attempt got this far
		return fmt.Errorf("rotate log: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, newer), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("rotate log: %w", err) // the open file stays in use as the older segment; the next entry tries again
	}
	_ = l.file.Close()
	l.file, l.size = f, 0
	l.cuts++
	return nil
}

func (l *Log) close() {
	if l.file != nil {
		_ = l.file.Close()
	}
	l.file, l.live, l.size = nil, false, 0
}

func (l *Log) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// cutTornLine drops what follows the last newline and returns the size that is left.
func cutTornLine(f *os.File) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 64<<10)
	for at := end; at > 0; {
		n := min(at, int64(len(buf)))
		if _, err := f.ReadAt(buf[:n], at-n); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			keep := at - n + int64(i) + 1
			if keep == end {
				return end, nil
			}
			return keep, f.Truncate(keep)
		}
		at -= n
	}
	return 0, f.Truncate(0)
}

// Set is the logs of one VM: that of its main process, and one for each of its containers in a folder of its own.
type Set struct {
	Main     *Log
	dir      string
	maxBytes int64

	mu         sync.Mutex
	containers map[string]*Log
}

// NewSet returns the logs in the folder of a VM. maxBytes bounds each of them; containers are the names of the
// containers that the VM begins with.
func NewSet(dir string, maxBytes int64, containers ...string) *Set {
	s := &Set{Main: New(dir, maxBytes), dir: dir, maxBytes: maxBytes, containers: map[string]*Log{}}
	for _, name := range containers {
		s.Of(name)
	}
	return s
}

func (s *Set) folder(container string) string { return filepath.Join(s.dir, "containers", container) }

// Of returns the log of a container; "" is the main process.
func (s *Set) Of(container string) *Log {
	if container == "" {
		return s.Main
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.containers[container]
	if log == nil {
		log = New(s.folder(container), s.maxBytes)
		s.containers[container] = log
	}
	return log
}

// all returns the logs of the containers, by name.
func (s *Set) all() map[string]*Log {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.containers)
}

// BeginForeign begins every log for a guest whose logs begin with those of another run; see Log.Skip.
func (s *Set) BeginForeign() error {
	if err := s.Main.BeginForeign(); err != nil {
		return err
	}
	for name, log := range s.all() {
		if err := os.MkdirAll(s.folder(name), 0o700); err != nil {
			return fmt.Errorf("begin log of container %s: %w", name, err)
		}
		if err := log.BeginForeign(); err != nil {
			return fmt.Errorf("container %s: %w", name, err)
		}
	}
	return nil
}

// Resume continues the log of a container, and returns it.
func (s *Set) Resume(container string) (*Log, error) {
	log := s.Of(container)
	if err := os.MkdirAll(s.folder(container), 0o700); err != nil {
		return nil, fmt.Errorf("log of container %s: %w", container, err)
	}
	if err := log.Resume(); err != nil {
		return nil, fmt.Errorf("log of container %s: %w", container, err)
	}
	return log, nil
}

// Remove deletes the log of a container, whose readers have then got everything. Nobody writes to it any more. Idempotent.
func (s *Set) Remove(container string) error {
	s.mu.Lock()
	log := s.containers[container]
	delete(s.containers, container)
	s.mu.Unlock()
	if log != nil {
		log.Finish()
	}
	if err := os.RemoveAll(s.folder(container)); err != nil {
		return fmt.Errorf("delete the log of container %s: %w", container, err)
	}
	return nil
}

// Finish ends every log: readers that follow one have got everything.
func (s *Set) Finish() {
	s.Main.Finish()
	for _, l := range s.all() {
		l.Finish()
	}
}
