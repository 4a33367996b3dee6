package textui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Exit codes. They are public API: documented by the exit-codes topic of each program, never renumbered.
const (
	exitOK           = 0
	exitInternal     = 1
	exitInvalid      = 2
	exitNotFound     = 3
	exitExists       = 4
	exitPrecondition = 5
	exitUnavailable  = 6
	exitExhausted    = 7
	exitUnsupported  = 8
	exitDataLoss     = 9
	exitTimeout      = 124
	exitInterrupted  = 130
)

// ExitCode returns the exit code of a program that ends with err.
func ExitCode(err error) int {
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument:
		return exitInvalid
	case errdefs.NotFound:
		return exitNotFound
	case errdefs.AlreadyExists, errdefs.Conflict:
		return exitExists
	case errdefs.FailedPrecondition, errdefs.Unauthenticated, errdefs.PermissionDenied:
		return exitPrecondition
	case errdefs.Unavailable:
		return exitUnavailable
	case errdefs.ResourceExhausted:
		return exitExhausted
	case errdefs.Unsupported:
		return exitUnsupported
	case errdefs.DataLoss:
		return exitDataLoss
	case errdefs.DeadlineExceeded:
		return exitTimeout
	case errdefs.Canceled:
		return exitInterrupted
	default:
		return exitInternal
	}
}

// CommandExit carries the exit code of a command that ran elsewhere. It is no failure of ours and is not printed.
type CommandExit int

func (g CommandExit) Error() string {
	return fmt.Sprintf("the command ended with exit code %d", int(g))
}

// Report prints err and returns the exit code. The first of several errors decides.
func Report(ctx context.Context, w io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	if g, ok := errors.AsType[CommandExit](err); ok {
		return int(g)
	}
	if ctx.Err() != nil && errdefs.Is(err, errdefs.Canceled) {
		return exitInterrupted // whoever interrupted it knows
	}
	all := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // only errors that each() joined, not a wrapped join
		all = joined.Unwrap()
	}
	for _, e := range all {
		fmt.Fprintf(w, "Error: %s\n", strings.TrimSpace(e.Error()))
	}
	return ExitCode(all[0])
}
