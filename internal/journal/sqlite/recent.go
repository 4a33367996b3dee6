package sqlite

import (
	"slices"

	"cocoonstack.io/cocoon/internal/vm"
)

// keepRecent is how many events are in memory at least, once there were so many.
const keepRecent = 256

// recent are the last events, for watchers that keep up: they need not read and decode what was just written. What is in
// it is never changed, so that a part of it may be read while more is added.
type recent struct{ events []vm.Event }

// add appends events, whose revisions follow each other and those that are there.
func (r *recent) add(events []vm.Event) {
	if len(r.events) >= 2*keepRecent {
		r.events = slices.Clone(r.events[len(r.events)-keepRecent:])
	}
	r.events = append(r.events, events...)
}

// after returns the events after revision. ok is false when they do not reach back to it.
func (r *recent) after(revision int64) (events []vm.Event, ok bool) {
	if len(r.events) == 0 {
		return nil, false
	}
	at := revision + 1 - r.events[0].Revision
	if at < 0 || at > int64(len(r.events)) {
		return nil, false
	}
	return slices.Clip(r.events[at:]), true
}
