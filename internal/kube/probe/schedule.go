package probe

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// A wait of at least coarse ends on a grid, so that many checks share one wake-up of the process and their packets few
// system calls: what a check costs is mostly that. Shorter waits are exact.
const (
	coarse = 2 * time.Second
	grid   = 100 * time.Millisecond
)

// Scheduler runs checks when they are due. Between two runs a check costs an entry in a heap, neither a goroutine nor a
// timer.
type Scheduler struct {
	zero time.Time // of the grid

	mu   sync.Mutex
	heap queue
	next time.Time // when Run will look again; zero: when it is woken
	wake chan struct{}
}

// Check is run again and again. It returns how long to wait until the next time, or false when there is none.
// Its context ends when its Task is stopped or the scheduler ends.
type Check func(ctx context.Context) (next time.Duration, more bool)

// Task is a check that is scheduled.
type Task struct {
	s     *Scheduler
	check Check

	// Guarded by the scheduler's mu.
	at      time.Time
	place   int // in the heap; -1: not in it
	stopped bool
	cancel  context.CancelFunc // of the run in progress; nil: none
}

// NewScheduler returns a scheduler that runs nothing until Run.
func NewScheduler() *Scheduler { return &Scheduler{zero: time.Now(), wake: make(chan struct{}, 1)} }

// Start has check run after delay, and then as it says. Runs of one task never overlap.
func (s *Scheduler) Start(delay time.Duration, check Check) *Task {
	t := &Task{s: s, check: check, place: -1}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(t, delay)
	return t
}

// Stop takes the task out. A run in progress is cancelled and not waited for.
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

// put schedules t. Preconditions: mu is held.
func (s *Scheduler) put(t *Task, delay time.Duration) {
	due := time.Since(s.zero) + delay // of the monotonic clock: the host's may jump
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

// Run works until ctx ends and every check in progress has returned.
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

// turn starts what is due and returns how long nothing else will be; false: nothing is scheduled.
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

// queue is a heap of tasks, the next one first.
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
