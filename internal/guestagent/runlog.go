package guestagent

import (
	"context"
	"sync"
)

// runLog keeps the output of the last run of one container, and of the run before it, for hosts that were away when
// that one ended.
type runLog struct {
	limit int // bytes of one run

	mu      sync.Mutex
	run     int // number of the last run
	rings   [2]*ring
	closed  bool
	changed chan struct{} // closed and replaced on every change
}

func newRunLog(limit, first int) *runLog {
	return &runLog{limit: limit, run: first - 1, changed: make(chan struct{})}
}

// begin returns the ring of the next run.
func (l *runLog) begin() *ring {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.run++
	l.rings = [2]*ring{l.rings[1], newRing(l.limit)}
	l.wake()
	return l.rings[1]
}

// place returns the number of the last run and of its last entry; 0 when there is none.
func (l *runLog) place() (run int, seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rings[1] == nil {
		return 0, 0
	}
	return l.run, l.rings[1].newest()
}

// close tells followers that no further runs come.
func (l *runLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.wake()
}

func (l *runLog) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// next returns the first entry after seq of run, and that run. If there is none and a later run has begun, it returns
// an entry without number and the later run. It waits if necessary. The returned run is 0 when nothing more will come.
func (l *runLog) next(ctx context.Context, run int, seq uint64) (entry, int, error) {
	for {
		l.mu.Lock()
		last, rings, closed, changed := l.run, l.rings, l.closed, l.changed
		l.mu.Unlock()
		for i, r := range rings {
			number := last - 1 + i
			if r == nil || number < run {
				continue
			}
			if number > run {
				return entry{}, number, nil
			}
			e, ok, err := r.next(ctx, seq)
			if err != nil {
				return entry{}, 0, err
			}
			if ok {
				return e, number, nil
			}
			seq = r.newest()
		}
		if closed {
			return entry{}, 0, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return entry{}, 0, ctx.Err()
		}
	}
}
