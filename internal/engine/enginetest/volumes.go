package enginetest

import (
	"context"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volumes is a volume store of the world, whose changes can fail.
type Volumes struct {
	MadeVolumes
	// Shares says that the store takes a snapshot while a VM writes, whatever its file system can do: the guests of a world write nothing
	// at that moment.
	Shares bool
	w      *World
}

// MadeVolumes is a store that makes and copies volumes.
type MadeVolumes interface {
	volume.Store
	volume.Maker
	volume.Snapshotter
}

// Keep makes s the volume store of the world.
func (w *World) Keep(s MadeVolumes) *Volumes {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.volumes = &Volumes{MadeVolumes: s, Shares: true, w: w}
	return w.volumes
}

// Volumes returns the volume store, nil without one.
func (w *World) Volumes() *Volumes {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.volumes
}

// Unwrap implements volume.Wrapper.
func (v *Volumes) Unwrap() volume.Store { return v.MadeVolumes }

// Attach implements volume.Store.
func (v *Volumes) Attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (got volume.Volume, d vm.Disk, err error) {
	err = v.w.around("volumes.Attach", func() error {
		got, d, err = v.MadeVolumes.Attach(ctx, ref, to, as)
		return err
	})
	return got, d, err
}

// Detach implements volume.Store.
func (v *Volumes) Detach(ctx context.Context, ref string, from vm.ID) error {
	return v.w.around("volumes.Detach", func() error { return v.MadeVolumes.Detach(ctx, ref, from) })
}

// Delete implements volume.Maker.
func (v *Volumes) Delete(ctx context.Context, ref string) error {
	return v.w.around("volumes.Delete", func() error { return v.MadeVolumes.Delete(ctx, ref) })
}

// Snapshot implements volume.Snapshotter.
func (v *Volumes) Snapshot(ctx context.Context, ref string, s volume.Spec) (x volume.Snapshot, err error) {
	s.Live = s.Live && !v.Shares
	err = v.w.around("volumes.Snapshot", func() error {
		x, err = v.MadeVolumes.Snapshot(ctx, ref, s)
		return err
	})
	return x, err
}

// CheckLive implements volume.LiveChecker.
func (v *Volumes) CheckLive(ctx context.Context, ref string) error {
	return v.w.around("volumes.CheckLive", func() error {
		if c, ok := volume.As[volume.LiveChecker](v.MadeVolumes); ok && !v.Shares {
			return c.CheckLive(ctx, ref)
		}
		return nil
	})
}

// FromSnapshot implements volume.Snapshotter.
func (v *Volumes) FromSnapshot(ctx context.Context, ref string, s volume.Spec) (made volume.Volume, err error) {
	err = v.w.around("volumes.FromSnapshot", func() error {
		made, err = v.MadeVolumes.FromSnapshot(ctx, ref, s)
		return err
	})
	return made, err
}

// DeleteSnapshot implements volume.Snapshotter.
func (v *Volumes) DeleteSnapshot(ctx context.Context, ref string) error {
	return v.w.around("volumes.DeleteSnapshot", func() error { return v.MadeVolumes.DeleteSnapshot(ctx, ref) })
}

// Attachments lists those of all volumes.
func (v *Volumes) Attachments(ctx context.Context) (out []string, err error) {
	all, err := v.List(ctx)
	for _, one := range all {
		for _, a := range one.Attachments {
			out = append(out, "attachments/"+string(a.VM))
		}
	}
	return out, err
}

// Made lists what the engine made: snapshots of volumes for the snapshots of VMs, and volumes for clones.
func (v *Volumes) Made(ctx context.Context) (out []string, err error) {
	snaps, err := v.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	for _, x := range snaps {
		if x.For != "" {
			out = append(out, "parts/"+x.For)
		}
	}
	all, err := v.List(ctx)
	for _, one := range all {
		if one.For != "" {
			out = append(out, "copies/"+one.For)
		}
	}
	return out, err
}
