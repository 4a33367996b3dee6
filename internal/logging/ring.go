package logging

import (
	"bytes"
	"context"
	"sync"
)

// Ring keeps the end of a log in memory, and lets others follow it. It is a writer that never fails and never waits for its readers.
type Ring struct {
	most int // bytes

	mu      sync.Mutex
	text    []byte
	start   int64 // offset of text in all that was written
	changed chan struct{}
}

// NewRing returns a ring that keeps at least the last most bytes.
func NewRing(most int) *Ring { return &Ring{most: most, changed: make(chan struct{})} }

// Write implements io.Writer.
func (r *Ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text = append(r.text, p...)
	if drop := len(r.text) - r.most; drop > r.most { // seldom, because it copies
		r.text = bytes.Clone(r.text[drop:])
		r.start += int64(drop)
	}
	close(r.changed)
	r.changed = make(chan struct{})
	return len(p), nil
}

// Read calls write with the last lines that were written, or with all that is kept if lines is 0. If follow, it goes on until ctx ends.
// A reader that is too slow misses what is not kept any more.
func (r *Ring) Read(ctx context.Context, lines int, follow bool, write func([]byte) error) error {
	r.mu.Lock()
	at := r.start + int64(len(r.text)-len(last(r.text, lines)))
	r.mu.Unlock()
	for {
		r.mu.Lock()
		at = max(at, r.start)
		part := bytes.Clone(r.text[at-r.start:])
		changed := r.changed
		r.mu.Unlock()
		at += int64(len(part))
		for len(part) > 0 {
			n := min(len(part), 64<<10)
			if err := write(part[:n]); err != nil {
				return err
			}
			part = part[n:]
		}
		if !follow {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// last returns the end of text with that many lines; all of it, if lines is 0.
func last(text []byte, lines int) []byte {
	end := len(bytes.TrimSuffix(text, []byte("\n")))
	for range lines {
		at := bytes.LastIndexByte(text[:end], '\n')
		if at < 0 {
			return text
		}
		end = at
	}
	if lines == 0 {
		return text
	}
	return text[end+1:]
}
