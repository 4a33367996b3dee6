package engine

import (
	"context"
	"sync"

	"cocoonstack.io/cocoon/internal/vm"
)

// queue admits one holder per VM at a time, in the order of arrival. A VM without operations costs nothing.
// The zero value is ready.
type queue struct {
	mu      sync.Mutex
	waiting map[vm.ID][]chan struct{} // has a key while the VM is held; a channel is closed to hand the VM over
}

// acquire waits for the turn on id. release must be called.
func (q *queue) acquire(ctx context.Context, id vm.ID) (release func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	q.mu.Lock()
	if q.waiting == nil {
		q.waiting = map[vm.ID][]chan struct{}{}
	}
	line, held := q.waiting[id]
	if !held {
		q.waiting[id] = nil
		q.mu.Unlock()
		return func() { q.release(id) }, nil
	}
	turn := make(chan struct{})
	q.waiting[id] = append(line, turn)
	q.mu.Unlock()
	select {
	case <-turn:
		return func() { q.release(id) }, nil
	case <-ctx.Done():
		q.leave(id, turn)
		return nil, ctx.Err()
	}
}

// release hands id to the next waiter.
func (q *queue) release(id vm.ID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	line := q.waiting[id]
	if len(line) == 0 {
		delete(q.waiting, id)
		return
	}
	q.waiting[id] = line[1:]
	close(line[0])
}

// leave removes turn from the line, or passes it on if it has just been granted.
func (q *queue) leave(id vm.ID, turn chan struct{}) {
	q.mu.Lock()
	line := q.waiting[id]
	for i, t := range line {
		if t == turn {
			q.waiting[id] = append(line[:i:i], line[i+1:]...)
			q.mu.Unlock()
			return
		}
	}
	q.mu.Unlock()
	q.release(id)
}
