package podsnapshots

import (
	"context"
	"sync"
)

// turns lets one caller at a time through for each name. The zero value is ready.
type turns struct {
	mu sync.Mutex
	at map[string]chan struct{} // closed when the turn is over
}

// take waits for the turn of name and returns the function that gives it back; nil when ctx has ended.
func (t *turns) take(ctx context.Context, name string) (give func()) {
	for {
		t.mu.Lock()
		busy := t.at[name]
		if busy == nil {
			if t.at == nil {
				t.at = map[string]chan struct{}{}
			}
			mine := make(chan struct{})
			t.at[name] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.at, name)
				t.mu.Unlock()
				close(mine)
			}
		}
		t.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil
		}
	}
}
