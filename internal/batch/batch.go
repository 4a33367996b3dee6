// Package batch groups concurrent calls of a slow operation into rounds. One round serves all callers that wait when the
// round begins.
//
// One of the callers runs the round, so the package starts no goroutine. The package does not know what a round does.
package batch

import "sync"

// Queue holds the items that wait for the next round. The zero value is ready. It is safe for concurrent use.
type Queue[T any] struct {
	mu      sync.Mutex
	waiting []*caller[T]
	leading bool // a caller runs a round
}

type caller[T any] struct {
	item T
	turn chan bool // receives once: true to lead the next round, false when the item is done
}

// Do waits until a round has served item, and then returns. The round begins after the call of Do. run serves the items of
// one round. Rounds never overlap.
func (q *Queue[T]) Do(item T, run func(items []T)) {
	c := &caller[T]{item: item}
	q.mu.Lock()
	q.waiting = append(q.waiting, c)
	if q.leading {
		c.turn = make(chan bool, 1)
		q.mu.Unlock()
		if !<-c.turn {
			return
		}
		q.mu.Lock()
	}
	q.leading = true
	todo := q.waiting
	q.waiting = nil
	q.mu.Unlock()

	items := make([]T, 0, len(todo))
	for _, other := range todo {
		items = append(items, other.item)
	}
	run(items)

	q.mu.Lock()
	if len(q.waiting) > 0 {
		q.waiting[0].turn <- true
	} else {
		q.leading = false
	}
	q.mu.Unlock()
	for _, other := range todo {
		if other != c {
			other.turn <- false
		}
	}
}
