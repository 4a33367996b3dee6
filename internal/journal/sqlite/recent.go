package sqlite

import (
	"slices"

	"cocoonstack.io/cocoon/internal/vm"
)

// keepRecent is the minimum number of events kept in memory, once that many exist.
const keepRecent = 256

// recent holds the last events, so that watchers that keep up need not read and decode them from the file. Its elements
// never change, so a slice of it may be read while events are added.
type recent struct{ events []vm.Event }

// add appends events, whose revisions directly follow those in r.
func (r *recent) add(events []vm.Event) {
	if len(r.events) >= 2*keepRecent {
		r.events = slices.Clone(r.events[len(r.events)-keepRecent:])
	}
	r.events = append(r.events, events...)
}

// after returns the events after revision. ok is false if r does not reach back to it.
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
