// Package journal is the contract of the engine's persistent memory: one record per VM, the step in flight, and the
// history of changes.
//
// The engine writes an intent before it acts and settles it afterwards; when the daemon starts, the engine finishes or
// undoes what is unsettled. The journal decides nothing.
package journal

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Journal stores records, intents and events. Each method is one atomic change: after a crash it is either complete or
// has not happened. A change survives a killed process once its method returns, and a power cut once Sync returns. All
// methods are safe for concurrent use; the revisions of changes strictly increase.
type Journal interface {
	// Load returns all records and all unsettled intents, oldest first.
	Load(ctx context.Context) ([]vm.Record, []Intent, error)

	// Begin stores the intent and the record together, as an ADDED event if the record is new. It returns the record
	// with its revision. AlreadyExists when another record of the same owner has the name, Conflict when the VM has an
	// unsettled intent.
	Begin(ctx context.Context, in Intent, r vm.Record) (vm.Record, error)

	// Step records the current step of the intent of r.ID, and the current record.
	Step(ctx context.Context, id vm.ID, step string, r vm.Record) (vm.Record, error)

	// Settle ends the intent of r.ID and stores the record.
	Settle(ctx context.Context, r vm.Record) (vm.Record, error)

	// Forget ends the intent of id and removes the record, as a DELETED event. Idempotent: a missing record is no
	// error.
	Forget(ctx context.Context, id vm.ID) error

	// Update stores a record outside any intent (an observation, e.g. the process ended).
	Update(ctx context.Context, r vm.Record) (vm.Record, error)

	// Sync returns once every change made before the call survives a power cut. Changes become durable in order: one
	// that survives, survives together with all earlier ones. Concurrent calls share the wait. After an error,
	// durability cannot be guaranteed any more: every later call returns the same error.
	Sync(ctx context.Context) error

	// Events returns the changes after revision, oldest first, at most limit (0: all). If the history does not reach
	// back to revision, it returns a FailedPrecondition error: the watcher must list the VMs and start from there.
	Events(ctx context.Context, after int64, limit int) ([]vm.Event, error)

	// Changed returns a channel that is closed at the next change after the call; use it to wait without polling.
	Changed() <-chan struct{}

	// Revision returns the revision of the last change.
	Revision() int64

	// Close flushes and closes.
	Close() error
}

// Intent is one operation on one VM, from before its first act until it is settled.
type Intent struct {
	ID    vm.ID           `json:"id"`             // of the VM: at most one intent per VM
	Op    string          `json:"op"`             // create, start, stop, restart, remove
	Step  string          `json:"step"`           // the last step that was started
	Args  json.RawMessage `json:"args,omitempty"` // of the operation, so that it can be resumed
	Began time.Time       `json:"began"`
}

// Row is everything that a journal stores about one VM.
type Row struct {
	Record vm.Record `json:"record"`
	Intent *Intent   `json:"intent,omitempty"` // nil: no operation is unsettled
}

// Refuse returns the DataLoss error for a journal that is stale or damaged: it states what was found, and the
// operator's options.
func Refuse(format string, args ...any) error {
	return errdefs.DataLossf("%s: it is damaged, or an older one was put in its place. No VM was touched. "+
		"`cocoond recover --rebuild` rebuilds it from the records in the folders of the VMs; "+
		"`cocoond --older-journal` uses it as it is, and leaves alone the VMs that it does not know", fmt.Sprintf(format, args...))
}
