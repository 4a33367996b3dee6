package enginetest

import (
	"context"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volumes is a volume store of the world, whose attachments can fail.
type Volumes struct {
	MadeVolumes
	w *World
}

// MadeVolumes is a store that makes volumes.
type MadeVolumes interface {
	volume.Store
	volume.Maker
}

// Keep makes s the volume store of the world.
func (w *World) Keep(s MadeVolumes) *Volumes {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.volumes = &Volumes{MadeVolumes: s, w: w}
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
func (v *Volumes) Attach(ctx context.Context, ref string, to vm.ID, readOnly bool) (got volume.Volume, d vm.Disk, err error) {
	err = v.w.around("volumes.Attach", func() error {
		got, d, err = v.MadeVolumes.Attach(ctx, ref, to, readOnly)
		return err
	})
	return got, d, err
}

// Detach implements volume.Store.
func (v *Volumes) Detach(ctx context.Context, ref string, from vm.ID) error {
	return v.w.around("volumes.Detach", func() error { return v.MadeVolumes.Detach(ctx, ref, from) })
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
