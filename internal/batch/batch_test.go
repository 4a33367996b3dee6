package batch

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestDo calls Do from many goroutines. Each item is served exactly once before its call returns. Rounds never overlap.
func TestDo(t *testing.T) {
	var q Queue[*atomic.Int64]
	var inside atomic.Int64
	var callers sync.WaitGroup
	const n, calls = 32, 200
	for range n {
		callers.Go(func() {
			for range calls {
				var served atomic.Int64
				q.Do(&served, func(items []*atomic.Int64) {
					if inside.Add(1) != 1 {
						t.Error("two rounds overlap")
					}
					for _, item := range items {
						item.Add(1)
					}
					inside.Add(-1)
				})
				if got := served.Load(); got != 1 {
					t.Errorf("an item was served %d times when its call returned", got)
				}
			}
		})
	}
	callers.Wait()
}

// TestShared starts two calls during a round. The next round serves both.
func TestShared(t *testing.T) {
	var q Queue[int]
	began, release := make(chan struct{}), make(chan struct{})
	var callers sync.WaitGroup
	callers.Go(func() {
		q.Do(0, func([]int) {
			close(began)
			<-release
		})
	})
	<-began
	sizes := make(chan int, 2)
	for i := range 2 {
		callers.Go(func() { q.Do(i+1, func(items []int) { sizes <- len(items) }) })
	}
	waiting := func() int {
		q.mu.Lock()
		defer q.mu.Unlock()
		return len(q.waiting)
	}
	for waiting() < 2 {
		runtime.Gosched()
	}
	close(release)
	callers.Wait()
	if len(sizes) != 1 || <-sizes != 2 {
		t.Error("the two callers that waited did not share a round")
	}
}
