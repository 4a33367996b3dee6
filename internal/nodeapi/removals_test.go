package nodeapi_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

// removing is an engine with the VMs of any name. Each removal is an event at once, before Remove returns.
type removing struct {
	*scripted
	events chan vm.Event
	sent   atomic.Int32 // events that were passed on completely
	then   func() error // called in Remove after the event
}

func newRemoving(t *testing.T) (*removing, *nodeclient.Client, string) {
	t.Helper()
	s := &removing{scripted: &scripted{}, events: make(chan vm.Event, 8), then: func() error { return nil }}
	s.inspect = func(ref string) (vm.Record, error) {
		if ref == "nobody" {
			return vm.Record{}, vm.VMs.Missing(vm.Owner{}, ref)
		}
		return vm.Record{ID: vm.ID("id-of-" + ref)}, nil
	}
	s.watch = func(ctx context.Context, _ int64, fn func(vm.Event) error) error {
		for {
			select {
			case e := <-s.events:
				if err := fn(e); err != nil {
					return err
				}
				s.sent.Add(1)
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	s.remove = func(ref string) error {
		s.events <- vm.Event{Type: vm.EventDeleted, Record: vm.Record{ID: vm.ID(ref)}}
		return s.then()
	}
	cfg := nodeapi.Config{Socket: t.TempDir() + "/s"}
	c, _ := serve(t, s.scripted, cfg)
	return s, c, cfg.Socket
}

// follow returns the events that a client of its own gets.
func follow(t *testing.T, socket string) <-chan vm.Event {
	t.Helper()
	c, err := nodeclient.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	got := make(chan vm.Event, 8)
	go func() { _ = c.Watch(t.Context(), 0, func(e vm.Event) error { got <- e; return nil }) }()
	return got
}

const (
	soon = 50 * time.Millisecond // in which an event that nothing holds would have come
	late = 20 * time.Second
)

// none fails if an event comes.
func none(t *testing.T, when string, got <-chan vm.Event) {
	t.Helper()
	select {
	case e := <-got:
		t.Errorf("%s the watcher got %+v", when, e)
	case <-time.After(soon):
	}
}

// next returns the next event.
func next(t *testing.T, got <-chan vm.Event) vm.Event {
	t.Helper()
	select {
	case e := <-got:
		return e
	case <-time.After(late):
		t.Fatal("the event is lost")
		return vm.Event{}
	}
}

func TestTheEventOfARemovalFollowsItsAnswer(t *testing.T) {
	s, c, socket := newRemoving(t)
	got := follow(t, socket)
	s.then = func() error { none(t, "before the answer", got); return nil }
	if err := c.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	if e := next(t, got); e.Type != vm.EventDeleted || e.Record.ID != "id-of-web" {
		t.Errorf("got %+v", e)
	}
	// A removal that nobody here asked for waits for nothing.
	s.events <- vm.Event{Type: vm.EventDeleted, Record: vm.Record{ID: "other"}}
	if e := next(t, got); e.Record.ID != "other" {
		t.Errorf("got %+v", e)
	}
}

func TestTheEventOfARemovalFollowsTheEndOfItsProcess(t *testing.T) {
	s, _, socket := newRemoving(t)
	got := follow(t, socket)
	c, err := nodeclient.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveThenExit(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	s.events <- vm.Event{Type: vm.EventModified, Record: vm.Record{ID: "other"}}
	none(t, "while the process runs", got)
	c.Close()
	if a, b := next(t, got), next(t, got); a.Type != vm.EventDeleted || b.Type != vm.EventModified {
		t.Errorf("got %+v, then %+v", a, b)
	}
}

func TestARemovalThatFailsHoldsNothing(t *testing.T) {
	s, c, socket := newRemoving(t)
	got := follow(t, socket)
	s.then = func() error { return errdefs.Preconditionf("its disk is busy") }
	if err := c.RemoveThenExit(t.Context(), "web", true); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove: %v", err)
	}
	if e := next(t, got); e.Record.ID != "id-of-web" { // of a removal by somebody else
		t.Errorf("got %+v", e)
	}
	if err := c.Remove(t.Context(), "nobody", true); !errdefs.IsNotFound(err) {
		t.Errorf("what is not there: %v", err)
	}
}

// A caller that gives up has no answer to wait for.
func TestTheEventOfARemovalDoesNotWaitForACallerThatIsGone(t *testing.T) {
	s, _, socket := newRemoving(t)
	got := follow(t, socket)
	c, err := nodeclient.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	s.then = func() error { close(gone); <-t.Context().Done(); return nil }
	go func() { _ = c.RemoveThenExit(t.Context(), "web", true) }()
	<-gone
	c.Close()
	if e := next(t, got); e.Type != vm.EventDeleted {
		t.Errorf("got %+v", e)
	}
}
