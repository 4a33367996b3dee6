package guestagent

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"time"
)

// maxEntry is the longest line kept whole, in bytes; longer lines are cut into several entries. Kubernetes has the same
// limit.
const maxEntry = 16 << 10

// entryCost is the memory of an entry beyond its data, in bytes.
const entryCost = 64

// entry is one line of output, or a part of one.
type entry struct {
	seq    uint64
	time   time.Time
	stderr bool
	data   []byte
}

// ring keeps the last entries of the main process's output, up to a number of bytes. It never blocks the writer.
type ring struct {
	limit int

	mu      sync.Mutex
	entries []entry
	size    int
	last    uint64        // sequence number of the newest entry, 0 for none
	ended   bool          // no more entries come
	changed chan struct{} // closed and replaced on every change
}

func newRing(limit int) *ring { return &ring{limit: limit, changed: make(chan struct{})} }

// add appends output of one stream; data is copied.
func (r *ring) add(stderr bool, data []byte) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	r.entries = append(r.entries, entry{seq: r.last, time: now, stderr: stderr, data: bytes.Clone(data)})
	r.size += len(data) + entryCost
	drop := 0
	for r.size > r.limit && drop < len(r.entries)-1 {
		r.size -= len(r.entries[drop].data) + entryCost
		r.entries[drop] = entry{}
		drop++
	}
	r.entries = r.entries[drop:]
	r.wake()
}

// tail returns the last lines of the output, at most that many lines and bytes.
func (r *ring) tail(lines, size int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []byte
	for i := len(r.entries) - 1; i >= 0 && len(out) < size; i-- {
		out = append(bytes.Clone(r.entries[i].data), out...)
		if n := bytes.Count(bytes.TrimSuffix(out, []byte("\n")), []byte("\n")) + 1; n >= lines {
			break
		}
	}
	return strings.ToValidUTF8(string(out[max(len(out)-size, 0):]), "\uFFFD")
}

// newest is the sequence number of the last entry, 0 for none.
func (r *ring) newest() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// end tells followers that no more entries come.
func (r *ring) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.wake()
}

func (r *ring) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// next returns the first entry after seq and waits for it if necessary; false when none will come.
func (r *ring) next(ctx context.Context, seq uint64) (entry, bool, error) {
	for {
		r.mu.Lock()
		if len(r.entries) > 0 && r.last > seq {
			first := r.entries[0].seq
			i := uint64(0)
			if seq >= first {
				i = seq + 1 - first
			}
			e := r.entries[i]
			r.mu.Unlock()
			return e, true, nil
		}
		ended, changed := r.ended, r.changed
		r.mu.Unlock()
		if ended {
			return entry{}, false, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return entry{}, false, ctx.Err()
		}
	}
}

// lines splits a stream into entries: at newlines, at maxEntry, and where flush is called.
type lines struct {
	stderr bool
	out    *ring
	part   []byte
}

func (l *lines) write(p []byte) {
	for len(p) > 0 {
		n := bytes.IndexByte(p, '\n') + 1
		if n == 0 {
			n = len(p)
		}
		n = min(n, maxEntry-len(l.part))
		l.part = append(l.part, p[:n]...)
		if p[n-1] == '\n' || len(l.part) == maxEntry {
			l.flush()
		}
		p = p[n:]
	}
}

func (l *lines) flush() {
	if len(l.part) > 0 {
		l.out.add(l.stderr, l.part)
		l.part = l.part[:0]
	}
}
