package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// waitFlags say whether and how long a command waits for the guest.
type waitFlags struct {
	wait, no bool
	limit    time.Duration
}

func (f *waitFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.BoolVar(&f.wait, "wait", true, "wait for the guest agent")
	fs.BoolVar(&f.no, "no-wait", false, "the same as --wait=false")
	fs.DurationVar(&f.limit, "wait-timeout", 5*time.Minute, "how long to wait; the VM stays")
}

// settle waits as the flags say.
func (f *waitFlags) settle(ctx context.Context, a *app, c *nodeclient.Client, r vm.Record) (vm.Record, error) {
	if !f.wait || f.no {
		return r, nil
	}
	stop := textui.Waiting(ctx, a.Stderr, "waiting for "+r.Spec.Name)
	defer stop()
	return settled(ctx, c, r, f.limit)
}

// settled waits until the guest of r is ready or has ended.
func settled(ctx context.Context, c *nodeclient.Client, r vm.Record, limit time.Duration) (vm.Record, error) {
	if isSettled(r) {
		return r, outcome(r)
	}
	wctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := errors.New("settled")
	see := func(e vm.Event) error {
		if e.Record.ID != r.ID {
			return nil
		}
		r = e.Record
		if e.Type == vm.EventDeleted {
			return errdefs.NotFoundf("VM %s was removed while it booted", r.Spec.Name)
		}
		if isSettled(r) {
			return done
		}
		return nil
	}
	err := c.Watch(wctx, r.Revision, see)
	if errdefs.IsFailedPrecondition(err) { // so much has happened since that the history does not go back far enough
		err = c.Watch(wctx, -1, see)
	}
	switch {
	case errors.Is(err, done):
		return r, outcome(r)
	case ctx.Err() == nil && (wctx.Err() != nil || errdefs.Is(err, errdefs.DeadlineExceeded)): // the daemon's timer may end first
		return r, errdefs.New(errdefs.DeadlineExceeded, "VM %s runs, but its agent has not answered within %s; `cocoon vm logs --serial %s` shows what the guest does", r.Spec.Name, limit, r.Spec.Name)
	case err == nil:
		err = errdefs.Unavailablef("cocoond ended the watch")
	}
	return r, fmt.Errorf("wait for VM %s, which keeps booting: %w", r.Spec.Name, err)
}

func isSettled(r vm.Record) bool {
	switch r.State {
	case vm.StateRunning:
		return r.AgentReady || r.ImageType == vm.ImageDisk || r.Paused != ""
	case vm.StateStopped, vm.StateHibernated, vm.StateError:
		return true
	default:
		return false
	}
}

// outcome returns an error if the VM never started properly. A process that ran and ended is no error, whatever its
// exit code.
func outcome(r vm.Record) error {
	if r.State == vm.StateError || r.State == vm.StateStopped && r.Reason == vm.ReasonCrashed {
		return errdefs.New(errdefs.Internal, "VM %s did not come up: %s", r.Spec.Name, textui.Cell(r.Message))
	}
	return nil
}

func (a *app) printVM(r vm.Record, out textui.Format, err error) error {
	switch {
	case err != nil:
		return err
	case out == textui.FormatJSON:
		return textui.PrintJSON(a.Stdout, nodejson.FromRecord(r))
	}
	return a.printVMs([]vm.Record{r})
}
