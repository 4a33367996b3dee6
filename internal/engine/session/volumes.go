package session

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// pushTimeout bounds how long PushVolume waits for a guest to accept the content.
const pushTimeout = 10 * time.Second

// PushVolume sends the content of v that is now on the host to the guest, if it is connected. A session that is lost
// meanwhile is no error: the next one begins with all volumes. A disk guest gets nothing.
func (l *Link) PushVolume(ctx context.Context, v vm.Volume) error {
	unlock, err := l.volumes.Take(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	agent, _, _ := l.Peek()
	if agent == nil || !l.OurAgent() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pushTimeout)
	defer cancel()
	err = l.put(ctx, agent, v)
	select {
	case <-agent.Done():
		return nil
	default:
		return err
	}
}

// pushVolumes sends all file volumes to a guest that is about to be set up. Preconditions: l has agent, so that
// whoever writes a volume from now on also sends it.
func (l *Link) pushVolumes(ctx context.Context, agent guest.Agent) error {
	unlock, err := l.volumes.Take(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	for _, v := range l.vm.Record().Spec.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		if err := l.put(ctx, agent, v); err != nil {
			return err
		}
	}
	return nil
}

// put sends the stored content of v to the guest. Preconditions: l.volumes is held, so that the last content wins.
func (l *Link) put(ctx context.Context, agent guest.Agent, v vm.Volume) error {
	keeper, ok := agent.(guest.VolumeKeeper)
	if !ok {
		return errdefs.Unsupportedf("the guest's agent does not support volumes")
	}
	var err error
	if v.Files, err = l.vm.VolumeFiles(v.Name); err != nil {
		return err
	}
	return keeper.PutVolume(ctx, v)
}
