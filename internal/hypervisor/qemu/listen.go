package qemu

import (
	"context"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
)

// ear collects the events of one instance from listen on, so that no event is missed between a command and the wait for its
// effect.
type ear struct {
	mu     sync.Mutex
	heard  []qmp.Event
	signal chan struct{}
}

// listen starts to collect events. The caller must stop it with deafen.
func (i *instance) listen() *ear {
	e := &ear{signal: make(chan struct{}, 1)}
	i.earsMu.Lock()
	defer i.earsMu.Unlock()
	if i.ears == nil {
		i.ears = map[*ear]bool{}
	}
	i.ears[e] = true
	return e
}

func (i *instance) deafen(e *ear) {
	i.earsMu.Lock()
	defer i.earsMu.Unlock()
	delete(i.ears, e)
}

func (i *instance) tell(ev qmp.Event) {
	i.earsMu.Lock()
	defer i.earsMu.Unlock()
	for e := range i.ears {
		e.hear(ev)
	}
}

func (e *ear) hear(ev qmp.Event) {
	e.mu.Lock()
	e.heard = append(e.heard, ev)
	e.mu.Unlock()
	select {
	case e.signal <- struct{}{}:
	default:
	}
}

// next returns the oldest event not yet taken, and waits if there is none. It returns Unavailable if the connection c is lost.
func (e *ear) next(ctx context.Context, c *qmp.Client) (qmp.Event, error) {
	for {
		e.mu.Lock()
		if len(e.heard) > 0 {
			ev := e.heard[0]
			e.heard = slices.Delete(e.heard, 0, 1)
			e.mu.Unlock()
			return ev, nil
		}
		e.mu.Unlock()
		select {
		case <-e.signal:
		case <-ctx.Done():
			return qmp.Event{}, ctx.Err()
		case <-c.Done():
			return qmp.Event{}, errdefs.Unavailablef("the connection to the hypervisor was lost: %w", c.Err())
		}
	}
}
