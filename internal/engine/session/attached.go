package session

import (
	"context"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// Attacher returns the agent as one that attaches volumes. It waits that long for a guest that is not set up.
// Errors: FailedPrecondition when the guest's process has ended, Unavailable when the guest does not answer, Unsupported if its agent
// is older.
func (l *Link) Attacher(ctx context.Context, patience time.Duration) (guest.VolumeAttacher, error) {
	agent, err := l.Ready(ctx, patience)
	if errdefs.Is(err, errdefs.DeadlineExceeded) {
		return nil, errdefs.Unavailablef("its guest does not answer at the moment")
	}
	if err != nil {
		return nil, err
	}
	a, ok := agent.(guest.VolumeAttacher)
	if !ok {
		return nil, errTooOldToAttach(nil)
	}
	return attacher{a, l.cfg.AgentTimeout}, nil
}

// attacher limits how long each call may take, and explains what an older agent answers.
type attacher struct {
	guest.VolumeAttacher
	limit time.Duration
}

// AttachVolume implements guest.VolumeAttacher.
func (a attacher) AttachVolume(ctx context.Context, v vm.Volume, path string) error {
	return a.within(ctx, func(ctx context.Context) error { return a.VolumeAttacher.AttachVolume(ctx, v, path) })
}

// DetachVolume implements guest.VolumeAttacher.
func (a attacher) DetachVolume(ctx context.Context, volume, serial string) error {
	return a.within(ctx, func(ctx context.Context) error { return a.VolumeAttacher.DetachVolume(ctx, volume, serial) })
}

// GrowVolume implements guest.VolumeAttacher.
func (a attacher) GrowVolume(ctx context.Context, volume, serial string, size int64) error {
	ctx, cancel := context.WithTimeout(ctx, a.limit)
	defer cancel()
	return a.VolumeAttacher.GrowVolume(ctx, volume, serial, size)
}

func (a attacher) within(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, a.limit)
	defer cancel()
	err := f(ctx)
	if errdefs.Is(err, errdefs.Unsupported) {
		return errTooOldToAttach(err)
	}
	return err
}

func errTooOldToAttach(err error) error {
	const text = "the agent in its guest is older and cannot attach or detach volumes; stop the VM first, or restart it to update the agent"
	if err == nil {
		return errdefs.Unsupportedf(text)
	}
	return errdefs.Unsupportedf(text+": %w", err)
}

// growResumed makes a guest that was resumed use the volumes that have grown since it was saved. What the guest refuses stays as it
// was saved.
func (l *Link) growResumed(ctx context.Context, agent guest.Agent) error {
	r := l.vm.Record()
	a, ok := agent.(guest.VolumeAttacher)
	if !ok || len(r.Resume.Volumes) == 0 {
		return nil
	}
	for _, v := range r.Attached {
		if !slices.Contains(r.Resume.Volumes, v.Volume) {
			continue
		}
		err := a.GrowVolume(ctx, v.Volume, v.Serial, v.Size)
		select {
		case <-agent.Done():
			return err
		default:
		}
		if ctx.Err() != nil {
			return err
		}
		if err != nil {
			l.cfg.Log.Warn("file system of volume not grown", "vm", l.proc.ID, "volume", v.Volume, "err", err)
		}
	}
	return nil
}
