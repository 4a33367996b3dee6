package probing

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// A delay of at least coarse is rounded to a multiple of grid. So many checks share one wake-up of the process, and their
// packets share system calls, which are most of a check's cost. Shorter delays are exact.
const (
	coarse = 2 * time.Second
	grid   = 100 * time.Millisecond
)

// Scheduler runs checks when they are due. Between two runs a check needs only an entry in a heap, but no goroutine and no
// timer.
type Scheduler struct {
	zero time.Time // start of the grid

	mu   sync.Mutex
	heap queue
	next time.Time // when Run checks the heap again; zero: only when wake delivers a value
	wake chan struct{}
}

// Check is run repeatedly. It returns the delay until the next run, or false if there is no next run. Its context ends when
// its Task is stopped or the scheduler ends.
type Check func(ctx context.Context) (next time.Duration, more bool)

// Task is a scheduled check.
type Task struct {
	s     *Scheduler
	check Check

	// Guarded by the scheduler's mu.
	at      time.Time
	place   int // index in the heap; -1: not in the heap
	stopped bool
	cancel  context.CancelFunc // cancels the current run; nil: no run
}

// NewScheduler returns a scheduler. It runs no check before Run is called.
func NewScheduler() *Scheduler { return &Scheduler{zero: time.Now(), wake: make(chan struct{}, 1)} }

// Start schedules check after delay, and then after each delay that check returns. Runs of one task never overlap.
func (s *Scheduler) Start(delay time.Duration, check Check) *Task {
	t := &Task{s: s, check: check, place: -1}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(t, delay)
	return t
}

// Stop removes the task. It cancels a current run, but does not wait for it.
func (t *Task) Stop() {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.stopped = true
	if t.place >= 0 {
		heap.Remove(&t.s.heap, t.place)
	}
	if t.cancel != nil {
		t.cancel()
	}
}

// put schedules t. Precondition: mu is held.
func (s *Scheduler) put(t *Task, delay time.Duration) {
	due := time.Since(s.zero) + delay // by the monotonic clock, because the host's clock may jump
	if delay >= coarse {
		due = due.Round(grid)
	}
	t.at = s.zero.Add(due)
	heap.Push(&s.heap, t)
	if s.next.IsZero() || t.at.Before(s.next) {
		s.next = t.at
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// Run runs checks until ctx ends and every current check has returned.
func (s *Scheduler) Run(ctx context.Context) error {
	var runs sync.WaitGroup
	defer runs.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if wait, ok := s.turn(ctx, &runs); ok {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		case <-s.wake:
		}
	}
}

// turn starts the checks that are due and returns the delay until the next check, or false if none is scheduled.
func (s *Scheduler) turn(ctx context.Context, runs *sync.WaitGroup) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for len(s.heap) > 0 {
		t := s.heap[0]
		if wait := t.at.Sub(now); wait > 0 {
			s.next = t.at
			return wait, true
		}
		heap.Pop(&s.heap)
		once, cancel := context.WithCancel(ctx)
		t.cancel = cancel
		runs.Go(func() { s.run(once, t) })
	}
	s.next = time.Time{}
	return 0, false
}

func (s *Scheduler) run(ctx context.Context, t *Task) {
	next, more := t.check(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	t.cancel()
	t.cancel = nil
	if more && !t.stopped {
		s.put(t, next)
	}
}

// queue is a heap of tasks, earliest first.
type queue []*Task

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *queue) Push(x any) {
	t := x.(*Task)
	t.place = len(*q)
	*q = append(*q, t)
}

func (q *queue) Pop() any {
	old := *q
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	t.place = -1
	return t
}
