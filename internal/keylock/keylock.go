// Package keylock locks by key, for example by the ID of a VM. Callers get the lock of a key in the order of arrival.
package keylock

import (
	"context"
	"slices"
	"sync"
)

// Locks holds the locks of any number of keys. A key that nobody holds needs no memory. The zero value is ready. It is safe
// for concurrent use.
type Locks[K comparable] struct {
	mu      sync.Mutex
	waiting map[K][]chan struct{} // has a key while its lock is held; a channel is closed to hand the lock over
}

// Lock waits for the lock of key. The caller must call unlock once. If ctx ends first, Lock returns the error of ctx.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	if l.waiting == nil {
		l.waiting = map[K][]chan struct{}{}
	}
	line, held := l.waiting[key]
	if !held {
		l.waiting[key] = nil
		l.mu.Unlock()
		return func() { l.unlock(key) }, nil
	}
	turn := make(chan struct{})
	l.waiting[key] = append(line, turn)
	l.mu.Unlock()
	select {
	case <-turn:
		return func() { l.unlock(key) }, nil
	case <-ctx.Done():
		l.leave(key, turn)
		return nil, ctx.Err()
	}
}

// unlock hands the lock of key to the next waiter.
func (l *Locks[K]) unlock(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := l.waiting[key]
	if len(line) == 0 {
		delete(l.waiting, key)
		return
	}
	l.waiting[key] = line[1:]
	close(line[0])
}

// leave removes turn from the waiters of key. If turn has just received the lock, leave hands the lock on.
func (l *Locks[K]) leave(key K, turn chan struct{}) {
	l.mu.Lock()
	line := l.waiting[key]
	i := slices.Index(line, turn)
	if i >= 0 {
		l.waiting[key] = slices.Concat(line[:i], line[i+1:])
	}
	l.mu.Unlock()
	if i < 0 {
		l.unlock(key)
	}
}
