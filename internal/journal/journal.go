// Package journal is the contract of the engine's memory: one record per VM, the step in flight, and the history of changes.
//
// Intent is written before an act and settled after it; whatever is unfinished when the daemon starts is finished or
// undone by the engine. The journal decides nothing.
package journal

import (
	"context"
	"encoding/json"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Journal keeps records, intents and events. Each method is one atomic change: a crash leaves it wholly done or not at all.
// A change survives a killed process when its method returns, and a power cut when Sync does.
// Methods are safe for concurrent use; changes get strictly growing revisions.
type Journal interface {
	// Load returns all records and all unsettled intents, the oldest first.
	Load(ctx context.Context) ([]vm.Record, []Intent, error)

	// Begin stores the intent and the record together, as ADDED when the record is new. It returns the record with its
	// revision. AlreadyExists when another record of the same owner has the name, Conflict when the VM has an unsettled intent.
	Begin(ctx context.Context, in Intent, r vm.Record) (vm.Record, error)

	// Step notes how far the intent of r.ID has come, and the record as it now stands.
	Step(ctx context.Context, id vm.ID, step string, r vm.Record) (vm.Record, error)

	// Settle ends the intent of r.ID and stores the record.
	Settle(ctx context.Context, r vm.Record) (vm.Record, error)

	// Forget ends the intent of id and removes the record, as a DELETED event. Removing what is gone is no error.
	Forget(ctx context.Context, id vm.ID) error

	// Update stores a record outside any intent (an observation, e.g. the process ended).
	Update(ctx context.Context, r vm.Record) (vm.Record, error)

	// Sync returns when every change that was made before the call survives a power cut. Changes survive in their order: one
	// that does survives with all before it. Calls that meet share the wait. After an error nothing more can be promised: it
	// is returned from then on.
	Sync(ctx context.Context) error

	// Events returns changes after revision, oldest first, at most limit (0: all). When the history does not reach back
	// to revision it returns a FailedPrecondition error: the watcher must list and start from there.
	Events(ctx context.Context, after int64, limit int) ([]vm.Event, error)

	// Changed returns a channel that is closed at the next change after the call; the way to wait without polling.
	Changed() <-chan struct{}

	// Revision is that of the last change.
	Revision() int64

	// Close flushes and closes.
	Close() error
}

// Intent is one operation on one VM, from before its first act until it is settled.
type Intent struct {
	ID    vm.ID           `json:"id"`             // of the VM: at most one intent each
	Op    string          `json:"op"`             // create, start, stop, restart, remove
	Step  string          `json:"step"`           // last step that was begun
	Args  json.RawMessage `json:"args,omitempty"` // of the operation, so that it can be resumed
	Began time.Time       `json:"began"`
}
