package reconcile

import (
	"context"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/guest"
)

// State is the state of an Instance.
type State int

// The states of an instance.
const (
	Preparing State = iota // it is being made, or its guest boots
	Running
	Ended
)

// Instance is the container or VM of a workload.
type Instance struct {
	Name      string // of the workload
	ID        string // its own; another one has another
	Hash      string // what it is made from; see workload.Row.Hash
	State     State
	ExitCode  *int32 // of an ended one; nil: unknown
	Reason    string // one word, if it has ended in another way than by its program: OOMKilled …
	Message   string // one sentence for a person
	StartedAt time.Time
	EndedAt   time.Time
	Address   string // on the bridge; "": none
}

// LogOptions says which part of a log is wanted.
type LogOptions struct {
	Follow bool
	Tail   int  // the last lines; 0: all
	Serial bool // the serial console of a VM
}

// Driver runs the workloads of one kind. All methods are safe for concurrent use; those that change one workload are not called at the
// same time.
type Driver interface {
	// Check returns an error if the driver could never run w.
	Check(ctx context.Context, w *capsulev1.Workload) error

	// Prepare makes sure that the image is there. It is called before each start.
	Prepare(ctx context.Context, w *capsulev1.Workload) error

	// Start makes the instance of w and starts it. After an error nothing of it is left, or Remove removes it.
	Start(ctx context.Context, w *capsulev1.Workload, hash string) (Instance, error)

	// Stop asks the instance to end, kills it after the grace period, and returns when it has ended. Idempotent.
	Stop(ctx context.Context, i Instance, grace time.Duration) error

	// Remove removes an instance, running or not, and keeps what it wrote for Logs. Idempotent.
	Remove(ctx context.Context, i Instance) error

	// Forget removes what is kept of a workload that has no instance. Idempotent.
	Forget(ctx context.Context, name string) error

	// Get returns the instance of a workload. Errors: NotFound.
	Get(ctx context.Context, name string) (Instance, error)

	// List returns all instances, also those of workloads that nobody knows.
	List(ctx context.Context) ([]Instance, error)

	// Watch calls changed with the name of a workload when its instance may have changed, until ctx ends.
	Watch(ctx context.Context, changed func(name string)) error

	// Exec runs a command in a running workload, and returns its exit code.
	// Errors: NotFound if there is no such program, FailedPrecondition if the workload does not run.
	Exec(ctx context.Context, name string, e guest.Exec, s guest.Streams) (int, error)

	// Logs calls write with parts of the log of a workload, also of its earlier instances.
	Logs(ctx context.Context, name string, o LogOptions, write func([]byte) error) error
}
