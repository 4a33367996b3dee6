package keylock

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestOrder locks one key from several goroutines. They get the lock in the order of arrival. A caller that gives up does not
// delay the others, and another key does not wait.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks Locks[string]
		unlock, err := locks.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for i := range 5 {
			ctx := t.Context()
			if i == 2 {
				ctx = impatient
			}
			wg.Go(func() {
				unlock, err := locks.Lock(ctx, "a")
				if err != nil {
					return
				}
				defer unlock()
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait() // until it waits
		}
		other, err := locks.Lock(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		other()
		<-time.After(2 * time.Second) // of the bubble: the impatient caller leaves
		unlock()
		wg.Wait()
		if len(order) != 4 || order[0] != 0 || order[1] != 1 || order[2] != 3 || order[3] != 4 {
			t.Errorf("order %v", order)
		}
		if len(locks.waiting) != 0 {
			t.Errorf("the locks keep %v", locks.waiting)
		}
	})
}
