package podprovider

import (
	"context"
	"time"
)

// turn says when a goroutine takes its next step. The zero value is whenWoken.
type turn time.Duration

const (
	whenWoken turn = 0                      // not before somebody wakes it
	atOnce    turn = turn(time.Millisecond) // after whatever else has just become ready
)

// after returns the turn that comes when d is over.
func after(d time.Duration) turn { return max(turn(d), atOnce) }

// sooner returns the turn that comes first.
func sooner(a, b turn) turn {
	if a == whenWoken || b == whenWoken {
		return max(a, b)
	}
	return min(a, b)
}

// wait waits for the turn or, whichever comes first, for a wake-up. It returns false when ctx has ended.
func (t turn) wait(ctx context.Context, wake <-chan struct{}) bool {
	return sleep(ctx, wake, time.Duration(t), t == whenWoken)
}
