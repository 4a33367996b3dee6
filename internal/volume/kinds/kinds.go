// Package kinds makes one volume store of several, each of which has volumes of another kind. Names are unique over all of them.
//
// It keeps nothing itself.
package kinds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Making is a store that makes volumes, copies them and has their snapshots.
type Making interface {
	volume.Store
	volume.Maker
	volume.Snapshotter
	volume.Cloner
	volume.Carrier
}

var _ Making = (*Store)(nil)

// Store implements volume.Store and all its abilities. New volumes and all snapshots are in one of the stores; the volumes of the others
// are given by the configuration, and what these stores cannot do is Unsupported.
type Store struct {
	making Making
	given  []volume.Store
}

// New returns a store of the volumes of all these stores.
func New(making Making, given ...volume.Store) *Store { return &Store{making: making, given: given} }

// Has reports whether a volume of s, which may be damaged, has that owner and name.
func Has(ctx context.Context, s volume.Store, owner vm.Owner, name string) (bool, error) {
	v, err := s.Get(vm.OnBehalf(ctx, owner), owner.Qualify(name))
	switch {
	case errdefs.IsNotFound(err), errdefs.IsInvalid(err): // ambiguous: several other owners have it
		return false, nil
	case errdefs.Is(err, errdefs.DataLoss):
		return true, nil
	}
	return err == nil && v.Name == name && v.Owner.Namespace == owner.Namespace, err
}

// stores are all stores.
func (s *Store) stores() []volume.Store { return append([]volume.Store{s.making}, s.given...) }

// find returns the store that has the volume ref, and the reference by which only that volume is found there.
func (s *Store) find(ctx context.Context, ref string) (volume.Store, string, error) {
	if len(s.given) == 0 {
		return s.making, ref, nil // it says itself what it does not have
	}
	found := map[vm.ID]volume.Store{}
	named := map[vm.ID]vm.Named{}
	var missing error
	var errs []error
	exact := false // several may have the name in one store, but only one has it here
	for _, one := range s.stores() {
		v, err := one.Get(ctx, ref)
		switch {
		case err == nil:
			found[v.ID], named[v.ID] = one, v.Named()
			exact = exact || v.Name == ref && v.Owner.Namespace == vm.Behalf(ctx).Namespace
		case errdefs.IsNotFound(err):
			missing = err
		default:
			errs = append(errs, err)
		}
	}
	switch err := errors.Join(errs...); {
	case err != nil && (!exact || !errdefs.IsInvalid(err)):
		return nil, "", err
	case len(found) == 0:
		return nil, "", missing
	}
	id, err := vm.Volumes.Match(vm.Behalf(ctx), ref, maps.Values(named))
	if err != nil {
		return nil, "", err
	}
	if len(found) > 1 {
		ref = string(id)
	}
	return found[id], ref, nil
}

// with calls fn with the store that has the volume ref.
func with[R any](ctx context.Context, s *Store, ref string, fn func(one volume.Store, ref string) (R, error)) (R, error) {
	one, ref, err := s.find(ctx, ref)
	if err != nil {
		var none R
		return none, err
	}
	return fn(one, ref)
}

// able calls fn with the ability T of the store that has the volume ref. what says what is to be done.
func able[T, R any](ctx context.Context, s *Store, what, ref string, fn func(one T, ref string) (R, error)) (R, error) {
	return with(ctx, s, ref, func(one volume.Store, ref string) (R, error) {
		can, ok := volume.As[T](one)
		if !ok {
			var none R
			return none, errdefs.Unsupportedf("%s volume %s: it is on a device that the configuration of the node names, where this is not possible", what, ref)
		}
		return fn(can, ref)
	})
}

// free returns AlreadyExists if a given volume of the owner has the name; "": the store chooses one.
func (s *Store) free(ctx context.Context, owner vm.Owner, name string) error {
	if name == "" {
		return nil
	}
	for _, one := range s.given {
		taken, err := Has(ctx, one, owner, name)
		if err != nil {
			return err
		}
		if taken {
			return errdefs.Existsf("the name %s is that of a device in the configuration of the node; choose another name", owner.Qualify(name))
		}
	}
	return nil
}

// Get implements volume.Store.
func (s *Store) Get(ctx context.Context, ref string) (volume.Volume, error) {
	return with(ctx, s, ref, func(one volume.Store, ref string) (volume.Volume, error) { return one.Get(ctx, ref) })
}

// List implements volume.Store.
func (s *Store) List(ctx context.Context) ([]volume.Volume, error) {
	var out []volume.Volume
	for _, one := range s.stores() {
		all, err := one.List(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, all...)
	}
	slices.SortFunc(out, func(a, b volume.Volume) int { return a.Named().Compare(b.Named()) })
	return out, nil
}

// Update implements volume.Store.
func (s *Store) Update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	return with(ctx, s, ref, func(one volume.Store, ref string) (volume.Volume, error) {
		v, err := one.Get(ctx, ref)
		if err != nil {
			return v, err
		}
		asked := v.Clone()
		if change(&asked); asked.Name != v.Name {
			if err := s.free(ctx, v.Owner, asked.Name); err != nil {
				return volume.Volume{}, fmt.Errorf("update volume %s: %w", ref, err)
			}
		}
		return one.Update(ctx, ref, change)
	})
}

// Resize implements volume.Store.
func (s *Store) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	return with(ctx, s, ref, func(one volume.Store, ref string) (volume.Volume, error) { return one.Resize(ctx, ref, size) })
}

// Attach implements volume.Store.
func (s *Store) Attach(ctx context.Context, ref string, to vm.ID, readOnly bool) (v volume.Volume, d vm.Disk, err error) {
	one, ref, err := s.find(ctx, ref)
	if err != nil {
		return v, d, err
	}
	return one.Attach(ctx, ref, to, readOnly)
}

// Detach implements volume.Store.
func (s *Store) Detach(ctx context.Context, ref string, from vm.ID) error {
	one, ref, err := s.find(ctx, ref)
	if err != nil {
		return err
	}
	return one.Detach(ctx, ref, from)
}

// Usage implements volume.Store.
func (s *Store) Usage(ctx context.Context) (map[vm.ID]volume.Usage, error) {
	out := map[vm.ID]volume.Usage{}
	for _, one := range s.stores() {
		all, err := one.Usage(ctx)
		if err != nil {
			return nil, err
		}
		maps.Copy(out, all)
	}
	return out, nil
}

// Create implements volume.Maker.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	if err := s.free(ctx, vm.Behalf(ctx), spec.Name); err != nil {
		return volume.Volume{}, fmt.Errorf("create volume %s: %w", spec.Name, err)
	}
	return s.making.Create(ctx, spec)
}

// Delete implements volume.Maker.
func (s *Store) Delete(ctx context.Context, ref string) error {
	_, err := able(ctx, s, "delete", ref, func(m volume.Maker, ref string) (struct{}, error) { return struct{}{}, m.Delete(ctx, ref) })
	return err
}

// Snapshot implements volume.Snapshotter.
func (s *Store) Snapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Snapshot, error) {
	return able(ctx, s, "take a snapshot of", ref, func(m volume.Snapshotter, ref string) (volume.Snapshot, error) { return m.Snapshot(ctx, ref, spec) })
}

// GetSnapshot implements volume.Snapshotter.
func (s *Store) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	return s.making.GetSnapshot(ctx, ref)
}

// Snapshots implements volume.Snapshotter.
func (s *Store) Snapshots(ctx context.Context) ([]volume.Snapshot, error) {
	return s.making.Snapshots(ctx)
}

// FromSnapshot implements volume.Snapshotter.
func (s *Store) FromSnapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	snap, err := s.making.GetSnapshot(ctx, ref)
	if err == nil {
		err = s.free(ctx, vm.Heir(ctx, snap.Owner), spec.Name)
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("make a volume from snapshot %s: %w", ref, err)
	}
	return s.making.FromSnapshot(ctx, ref, spec)
}

// Restore implements volume.Snapshotter.
func (s *Store) Restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	return able(ctx, s, "restore", ref, func(m volume.Snapshotter, ref string) (volume.Volume, error) { return m.Restore(ctx, ref, snapshot) })
}

// DeleteSnapshot implements volume.Snapshotter.
func (s *Store) DeleteSnapshot(ctx context.Context, ref string) error {
	return s.making.DeleteSnapshot(ctx, ref)
}

// Clone implements volume.Cloner.
func (s *Store) Clone(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	v, err := s.Get(ctx, ref)
	if err == nil {
		err = s.free(ctx, vm.Heir(ctx, v.Owner), spec.Name)
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("clone volume %s: %w", ref, err)
	}
	return able(ctx, s, "clone", ref, func(m volume.Cloner, ref string) (volume.Volume, error) { return m.Clone(ctx, ref, spec) })
}

// Export implements volume.Carrier.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) error {
	_, err := able(ctx, s, "export", ref, func(m volume.Carrier, ref string) (struct{}, error) { return struct{}{}, m.Export(ctx, ref, w) })
	return err
}

// Import implements volume.Carrier.
func (s *Store) Import(ctx context.Context, spec volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	if err := s.free(ctx, vm.Behalf(ctx), spec.Name); err != nil {
		return volume.Volume{}, fmt.Errorf("import volume %s: %w", spec.Name, err)
	}
	return s.making.Import(ctx, spec, r, progress)
}
