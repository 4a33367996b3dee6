package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Exit codes. They are public API: documented by `cocoon help exit-codes`, never renumbered.
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

const exitCodesText = `cocoon ends with

    0  success
    1  internal error of cocoon or of the host
    2  invalid: a mistake in the command line, or a request that can never work
    3  the VM, image or snapshot does not exist
    4  the name is taken, or a concurrent change won
    5  not possible in the present state; the message says what must happen first
    6  cocoond or the guest cannot be reached; try again later
    7  something limited is used up: disk, memory, addresses
    8  this host, hypervisor or guest cannot do it
    9  stored data is damaged
  124  it took longer than the given time
  130  interrupted

except "cocoon vm exec", which ends with the exit code of the command in the guest (128+n for death by signal n)
when the command could be run at all.

Errors go to standard error as "Error: " and one sentence. Nothing else is printed then.`

func exitCodesTopic() *cobra.Command {
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes of cocoon mean", Long: exitCodesText}
}

func exitCode(err error) int {
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument:
		return exitInvalid
	case errdefs.NotFound:
		return exitNotFound
	case errdefs.AlreadyExists, errdefs.Conflict:
		return exitExists
	case errdefs.FailedPrecondition:
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

// guestExit carries the exit code of a command in a guest. It is no failure of cocoon and is not printed.
type guestExit int

func (g guestExit) Error() string { return fmt.Sprintf("the command ended with exit code %d", int(g)) }

// report prints err and returns the exit code. The first of several errors decides.
func report(ctx context.Context, w io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	if g, ok := errors.AsType[guestExit](err); ok {
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
	return exitCode(all[0])
}
