package session

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// ResizeContainers tells the guest what its containers may use. It waits that long for a guest that is not set up.
// Errors: as of guest.ContainerResizer, and Unavailable if the guest does not answer.
func (l *Link) ResizeContainers(ctx context.Context, want map[string]vm.Resources, patience time.Duration) error {
	agent, err := l.Ready(ctx, patience)
	if errdefs.Is(err, errdefs.DeadlineExceeded) {
		return errdefs.Unavailablef("its guest does not answer at the moment")
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
	defer cancel()
	resizer, ok := agent.(guest.ContainerResizer)
	if !ok {
		return errTooOldToResize(nil)
	}
	err = resizer.ResizeContainers(ctx, want)
	if errdefs.Is(err, errdefs.Unsupported) {
		return errTooOldToResize(err)
	}
	return err
}

func errTooOldToResize(err error) error {
	const text = "the agent in its guest is older and cannot resize containers; restart the VM to update the agent"
	if err == nil {
		return errdefs.Unsupportedf(text)
	}
	return errdefs.Unsupportedf(text+": %w", err)
}

// resizeResumed tells a guest that was resumed what its containers may use by now: it may have been saved before they were
// resized. What the guest refuses stays as it was saved.
func (l *Link) resizeResumed(ctx context.Context, agent guest.Agent) error {
	want := vm.ResourcesOf(l.vm.Record().Spec.Containers)
	resizer, ok := agent.(guest.ContainerResizer)
	if !ok || len(want) == 0 {
		return nil
	}
	err := resizer.ResizeContainers(ctx, want)
	if err != nil && !lost(err) {
		l.cfg.Log.Info("containers of resumed guest not resized", "vm", l.proc.ID, "err", err)
		return nil
	}
	return err
}
