package engine

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volumes is the volume store of the node as its users see it: a copy of a volume has the bytes of one instant, whatever VM writes to it.
type Volumes struct {
	volume.Store
	node *node
}

// Volumes returns the volume store, or nil if the node keeps no volumes.
func (e *Engine) Volumes() *Volumes {
	if e.volumes == nil {
		return nil
	}
	return &Volumes{Store: e.volumes, node: e.node}
}

// Resize implements volume.Store. It is Grow without what Grow says about guests.
func (v *Volumes) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	got, err := v.Grow(ctx, ref, size)
	return got.Volume, err
}

// Grow grows a volume to size bytes, and makes the guests that run and write to it use them. It says which do not yet. Idempotent: a
// second call tells them again.
// Errors: as for volume.Store.Resize.
func (v *Volumes) Grow(caller context.Context, ref string, size int64) (out volume.Resized, err error) {
	ctx, leave, err := v.node.life.enter(caller)
	if err != nil {
		return out, err
	}
	defer leave()
	m, release, err := v.writer(ctx, ref)
	if err != nil {
		return out, v.node.life.ended(caller, err)
	}
	out.Volume, err = v.Store.Resize(ctx, ref, size)
	reasons := map[vm.ID]string{}
	if err == nil && m != nil {
		reasons[m.id] = m.grown(ctx, out.Volume)
	}
	release()
	if err != nil {
		return out, err
	}
	for _, a := range out.Attachments {
		reason, told := reasons[a.VM]
		switch {
		case a.ReadOnly:
			reason = "it only reads the volume; it sees the new size when it starts again"
		case !told: // it shares the volume with the first, or came just now
			if reason, err = v.grownLater(ctx, a.VM, out.Volume); err != nil {
				return out, v.node.life.ended(caller, err)
			}
		}
		if reason != "" {
			out.Waiting = append(out.Waiting, volume.Waiting{VM: a.VM, Reason: reason})
		}
	}
	return out, nil
}

// grownLater is machine.grown for a VM that is not held; "" also if it gave the volume away meanwhile.
func (v *Volumes) grownLater(ctx context.Context, id vm.ID, of volume.Volume) (string, error) {
	release, err := v.node.vms.queue.Lock(ctx, id)
	if err != nil {
		return "", err
	}
	defer release()
	now, err := v.Get(ctx, string(of.ID))
	if err != nil || !now.AttachedTo(id) {
		return "", err
	}
	return v.node.vms.get(id).grown(ctx, now), nil
}

// writer holds the VM that may write to the volume ref; nil: there is none, or the engine does not know it.
func (v *Volumes) writer(ctx context.Context, ref string) (m *machine, release func(), err error) {
	for {
		got, err := v.Get(ctx, ref)
		if err != nil {
			return nil, nil, err
		}
		writer := got.Writer()
		if writer == "" {
			return nil, func() {}, nil
		}
		if release, err = v.node.vms.queue.Lock(ctx, writer); err != nil {
			return nil, nil, err
		}
		if got, err = v.Get(ctx, ref); err == nil && got.Writer() == writer {
			return v.node.vms.get(writer), release, nil
		}
		release() // it was detached meanwhile
		if err != nil {
			return nil, nil, err
		}
	}
}

// Create implements volume.Maker.
func (v *Volumes) Create(ctx context.Context, s volume.Spec) (volume.Volume, error) {
	can, err := able[volume.Maker](v)
	if err != nil {
		return volume.Volume{}, err
	}
	return can.Create(ctx, s)
}

// Delete implements volume.Maker.
func (v *Volumes) Delete(ctx context.Context, ref string) error {
	can, err := able[volume.Maker](v)
	if err != nil {
		return err
	}
	return can.Delete(ctx, ref)
}

// Snapshot implements volume.Snapshotter. The caller leaves Spec.Live to the engine. The guest that writes to the volume, if one runs,
// has its file systems frozen meanwhile, if its agent can do that.
func (v *Volumes) Snapshot(ctx context.Context, ref string, s volume.Spec) (out volume.Snapshot, err error) {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return out, err
	}
	err = v.still(ctx, ref, func(ctx context.Context, live bool) error {
		s.Live = live
		out, err = can.Snapshot(ctx, ref, s)
		return err
	})
	return out, err
}

// GetSnapshot implements volume.Snapshotter.
func (v *Volumes) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return volume.Snapshot{}, err
	}
	return can.GetSnapshot(ctx, ref)
}

// Snapshots implements volume.Snapshotter.
func (v *Volumes) Snapshots(ctx context.Context) ([]volume.Snapshot, error) {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return nil, err
	}
	return can.Snapshots(ctx)
}

// FromSnapshot implements volume.Snapshotter.
func (v *Volumes) FromSnapshot(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error) {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return volume.Volume{}, err
	}
	return can.FromSnapshot(ctx, ref, s)
}

// Restore implements volume.Snapshotter.
func (v *Volumes) Restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return volume.Volume{}, err
	}
	return can.Restore(ctx, ref, snapshot)
}

// DeleteSnapshot implements volume.Snapshotter. FailedPrecondition for a part of the snapshot of a VM.
func (v *Volumes) DeleteSnapshot(ctx context.Context, ref string) error {
	can, err := able[volume.Snapshotter](v)
	if err != nil {
		return err
	}
	x, err := can.GetSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	if x.For != "" && v.node.snapshots != nil {
		whole, err := v.node.snapshots.Get(vm.OnBehalf(ctx, vm.Owner{}), x.For)
		if !errdefs.IsNotFound(err) {
			return errdefs.Preconditionf("snapshot %s of volume %s is part of the snapshot %s of VM %s; remove that one", x.Name, x.Source, cmp.Or(whole.Name, x.For), whole.Source.VMName)
		}
	}
	return can.DeleteSnapshot(ctx, string(x.ID))
}

// Clone implements volume.Cloner, with guests and Spec.Live as in Snapshot.
func (v *Volumes) Clone(ctx context.Context, ref string, s volume.Spec) (out volume.Volume, err error) {
	can, err := able[volume.Cloner](v)
	if err != nil {
		return out, err
	}
	err = v.still(ctx, ref, func(ctx context.Context, live bool) error {
		s.Live = live
		out, err = can.Clone(ctx, ref, s)
		return err
	})
	return out, err
}

// Export implements volume.Carrier. FailedPrecondition while a VM has the volume attached to write.
func (v *Volumes) Export(ctx context.Context, ref string, w io.Writer) error {
	can, err := able[volume.Carrier](v)
	if err != nil {
		return err
	}
	return can.Export(ctx, ref, w)
}

// Import implements volume.Carrier.
func (v *Volumes) Import(ctx context.Context, s volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	can, err := able[volume.Carrier](v)
	if err != nil {
		return volume.Volume{}, err
	}
	return can.Import(ctx, s, r, progress)
}

// able returns the ability T of the store, or Unsupported.
func able[T any](v *Volumes) (T, error) {
	can, ok := volume.As[T](v.Store)
	if !ok {
		return can, errdefs.Unsupportedf("the volume store of this node cannot do that")
	}
	return can, nil
}

// still calls fn while the VM that writes to the volume ref, if there is one, neither starts nor ends nor gives the volume away. live says
// that its guest runs; the guest's file systems are frozen then, if its agent can do that.
func (v *Volumes) still(caller context.Context, ref string, fn func(ctx context.Context, live bool) error) error {
	ctx, leave, err := v.node.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	m, release, err := v.writer(ctx, ref)
	if err != nil {
		return v.node.life.ended(caller, err)
	}
	defer release()
	got, err := v.Get(ctx, ref)
	if err != nil {
		return err
	}
	if err := got.Copyable(); err != nil {
		return fmt.Errorf("volume %s: %w", got.Name, err)
	}
	switch writer := got.Writer(); {
	case writer == "":
		return fn(ctx, false)
	case m == nil:
		return errdefs.Preconditionf("volume %s: VM %s, which has it attached, is not known here, and may write to it", got.Name, writer)
	}
	switch r := m.record(); r.State {
	case vm.StateError:
		return errdefs.Preconditionf("volume %s: VM %s (%s) may write to it; stop that VM first", got.Name, r.Spec.Name, r.State)
	case vm.StateRunning:
		defer m.quiet(ctx, got.Name)()
		if err := fn(ctx, true); err != nil {
			return fmt.Errorf("VM %s runs: %w", r.Spec.Name, err)
		}
		return nil
	default:
		return fn(ctx, false)
	}
}
