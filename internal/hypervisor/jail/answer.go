package jail

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// DefaultAnswerTime is how long a hypervisor may take for a request that costs it no time.
const DefaultAnswerTime = 30 * time.Second

// Answered runs f, which sends a hypervisor such a request, with a context that ends after limit. A guest can keep a hypervisor busy for ever, and whoever waits for
// the answer holds the VM.
// Errors: Unavailable if the time is over, or those of f.
func Answered(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	late, err := within(ctx, limit, f)
	if late {
		return errdefs.Unavailablef("the hypervisor does not answer for %s; if this lasts, stop the VM with --now: %w", limit, err)
	}
	return err
}

// savedPerSecond is how many bytes of memory a hypervisor writes per second on the slowest disk that is worth a wait.
const savedPerSecond = 8 << 20

// Saved runs f, which has a hypervisor write a guest with that many bytes of memory, with a context that ends when that has taken much longer than it may. launch is
// how long a launch may take.
// Errors: Unavailable if the time is over, or those of f.
func Saved(ctx context.Context, launch time.Duration, memory int64, f func(context.Context) error) error {
	limit := launch + time.Duration(memory/savedPerSecond)*time.Second
	late, err := within(ctx, limit, f)
	if late {
		return errdefs.Unavailablef("the hypervisor has not written the guest within %s; save it again when the disk has less to do, and if the guest stays paused, stop the VM with --now: %w", limit, err)
	}
	return err
}

// Started runs f, which tells a new hypervisor what its VM is, with a context that ends after limit.
// Errors: Unavailable if the time is over, or those of f.
func Started(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	late, err := within(ctx, limit, f)
	if late {
		return TooLate(limit, err)
	}
	return err
}

// TooLate is the error of a launch that has taken longer than limit. err may be nil.
func TooLate(limit time.Duration, err error) error {
	if err == nil {
		return errdefs.Unavailablef("the hypervisor has not started the VM within %s", limit)
	}
	return errdefs.Unavailablef("the hypervisor has not started the VM within %s: %w", limit, err)
}

func within(ctx context.Context, limit time.Duration, f func(context.Context) error) (late bool, err error) {
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = f(wait)
	return err != nil && ctx.Err() == nil && wait.Err() != nil, err
}
