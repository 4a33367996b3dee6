package podprovider

import (
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// step returns the next pause of b. It first resets b if b is zero or has another maximum.
func step(b *wait.Backoff, first, most time.Duration) time.Duration {
	if b.Cap != most {
		*b = pauses.Growing(first, most, 0)
	}
	return b.Step()
}

// retryTask is the back-off of a task that is retried until it succeeds: after 1 s, 2 s … 60 s.
type retryTask struct {
	tries wait.Backoff
	next  time.Time
	cause string
}

const (
	retryTaskFirst = time.Second
	retryTaskMost  = time.Minute
)

// left returns the delay before the next attempt.
func (c *retryTask) left() time.Duration { return time.Until(c.next) }

// failed records a failed attempt, and reports whether its cause is new.
func (c *retryTask) failed(err error) (news bool) {
	c.next = time.Now().Add(step(&c.tries, retryTaskFirst, retryTaskMost))
	news = c.cause != err.Error()
	c.cause = err.Error()
	return news
}

// retryTasks are the back-offs of tasks by name.
type retryTasks map[string]*retryTask

// of returns the back-off of a task.
func (r *retryTasks) of(name string) *retryTask {
	if *r == nil {
		*r = retryTasks{}
	}
	c := (*r)[name]
	if c == nil {
		c = &retryTask{}
		(*r)[name] = c
	}
	return c
}

// left returns the delay before the first of the tasks with these names is tried, and forgets all others.
func (r *retryTasks) left(names []string) time.Duration {
	soonest := time.Duration(math.MaxInt64)
	for _, name := range names {
		soonest = min(soonest, r.of(name).left())
	}
	maps.DeleteFunc(*r, func(name string, _ *retryTask) bool { return !slices.Contains(names, name) })
	return soonest
}

// turn says when a goroutine takes its next step. The zero value is whenWoken.
type turn time.Duration

const (
	whenWoken turn = 0                      // only when the goroutine is woken
	atOnce    turn = turn(time.Millisecond) // immediately, but after other wake-ups that are pending
)

// after returns the turn after d.
func after(d time.Duration) turn { return max(turn(d), atOnce) }

// sooner returns the turn that comes first.
func sooner(a, b turn) turn {
	if a == whenWoken || b == whenWoken {
		return max(a, b)
	}
	return min(a, b)
}

// wait waits for the turn or for a wake-up, whichever comes first. It returns false when ctx has ended.
func (t turn) wait(ctx context.Context, wake <-chan struct{}) bool {
	return pauses.Sleep(ctx, wake, time.Duration(t), t == whenWoken)
}
