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
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Making is a store that makes volumes, copies them and has their snapshots.
type Making interface {
	volume.Store
	volume.Maker
	volume.Snapshotter
	volume.LiveChecker
	volume.Cloner
	volume.Carrier
}

var (
	_ Making        = (*Store)(nil)
	_ volume.Pooled = (*Store)(nil)
)

// Kind is a store that makes volumes of one kind.
type Kind struct {
	Name string // Volume.Kind of all its volumes
	Making
}

// Store implements volume.Store and all its abilities. A new volume is in the store of its kind, and so are its copies and its snapshots.
// The configuration gives the other volumes. Their stores neither make nor copy volumes: they return Unsupported.
type Store struct {
	makers []Kind
	given  []volume.Store

	mu     sync.Mutex
	coming map[string]bool // names, with owner, of objects that are being made
}

// New returns a store of the volumes of all these stores. Volumes of no certain kind are made by the first of makers.
func New(makers []Kind, given ...volume.Store) *Store {
	return &Store{makers: makers, given: given, coming: map[string]bool{}}
}

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
func (s *Store) stores() []volume.Store {
	all := make([]volume.Store, 0, len(s.makers)+len(s.given))
	for _, m := range s.makers {
		all = append(all, m.Making)
	}
	return append(all, s.given...)
}

// named is a volume or a snapshot.
type named interface{ Named() vm.Named }

// locate returns the store that has the object ref, and the reference by which only that object is found there. get asks a store.
func locate[S any, R named](ctx context.Context, kind vm.Kind, stores []S, ref string, get func(S) (R, error)) (S, string, error) {
	if len(stores) == 1 {
		return stores[0], ref, nil // it says itself what it does not have
	}
	var none S
	found := map[vm.ID]S{}
	names := map[vm.ID]vm.Named{}
	var missing error
	var errs []error
	exact := false // several may have the name in one store, but only one has it here
	for _, one := range stores {
		r, err := get(one)
		switch {
		case err == nil:
			n := r.Named()
			found[n.ID], names[n.ID] = one, n
			exact = exact || n.Name == ref && n.Owner.Namespace == vm.Behalf(ctx).Namespace
		case errdefs.IsNotFound(err):
			missing = err
		default:
			errs = append(errs, err)
		}
	}
	switch err := errors.Join(errs...); {
	case err != nil && (!exact || !errdefs.IsInvalid(err)):
		return none, "", err
	case len(found) == 0:
		return none, "", missing
	}
	id, err := kind.Match(vm.Behalf(ctx), ref, maps.Values(names))
	if err != nil {
		return none, "", err
	}
	if len(found) > 1 {
		ref = string(id)
	}
	return found[id], ref, nil
}

// find returns the store that has the volume ref, and the reference by which only that volume is found there.
func (s *Store) find(ctx context.Context, ref string) (volume.Store, string, error) {
	return locate(ctx, vm.Volumes, s.stores(), ref, func(one volume.Store) (volume.Volume, error) { return one.Get(ctx, ref) })
}

// findSnapshot is find for a snapshot.
func (s *Store) findSnapshot(ctx context.Context, ref string) (Kind, string, error) {
	return locate(ctx, vm.VolumeSnapshots, s.makers, ref, func(k Kind) (volume.Snapshot, error) { return k.GetSnapshot(ctx, ref) })
}

// maker returns the store that makes volumes of a kind; "" is that of the first. Errors: Unsupported.
func (s *Store) maker(kind string) (Kind, error) {
	var names []string
	for _, m := range s.makers {
		if kind == "" || m.Name == kind {
			return m, nil
		}
		names = append(names, m.Name)
	}
	return Kind{}, errdefs.Unsupportedf("this node makes no volumes of the kind %.100q, only of %s", kind, strings.Join(names, ", "))
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

// taking calls fn, which makes a volume in the store of a maker or renames one there, unless another volume of the owner has the name;
// "": the store chooses one. what says what is done. Errors: AlreadyExists.
func taking[R any](ctx context.Context, s *Store, what string, in volume.Store, owner vm.Owner, name string, fn func() (R, error)) (R, error) {
	if name == "" {
		return fn()
	}
	var none R
	release, err := s.reserve(vm.Volumes, owner.Qualify(name))
	if err != nil {
		return none, fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	if err := s.free(ctx, in, owner, name); err != nil {
		return none, fmt.Errorf("%s: %w", what, err)
	}
	return fn()
}

// free returns AlreadyExists if another store than in has a volume of the owner with the name.
func (s *Store) free(ctx context.Context, in volume.Store, owner vm.Owner, name string) error {
	for i, one := range s.stores() {
		if one == in { // it says itself what it has
			continue
		}
		taken, err := Has(ctx, one, owner, name)
		switch {
		case err != nil:
			return err
		case taken && i < len(s.makers):
			return vm.Volumes.Taken(owner.Qualify(name))
		case taken:
			return errdefs.Existsf("the name %s is that of a device in the configuration of the node; choose another name", owner.Qualify(name))
		}
	}
	return nil
}

// reserve keeps others from making an object of the same name. Errors: AlreadyExists.
func (s *Store) reserve(kind vm.Kind, name string) (release func(), err error) {
	key := kind.Noun + " " + name
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.coming[key] {
		return nil, kind.Taken(name)
	}
	s.coming[key] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.coming, key)
	}, nil
}

// sameKind returns an InvalidArgument error unless a copy of an object of the kind is may be what spec asks for.
func sameKind(spec volume.Spec, is string) error {
	if spec.Kind != "" && spec.Kind != is {
		return errdefs.Invalidf("a copy has the kind of its source, %s, and cannot have the kind %.100q; export the volume and import it instead", is, spec.Kind)
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
		if change(&asked); asked.Name == v.Name {
			return one.Update(ctx, ref, change)
		}
		return taking(ctx, s, "update volume "+ref, one, v.Owner, asked.Name, func() (volume.Volume, error) { return one.Update(ctx, ref, change) })
	})
}

// Resize implements volume.Store.
func (s *Store) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	return with(ctx, s, ref, func(one volume.Store, ref string) (volume.Volume, error) { return one.Resize(ctx, ref, size) })
}

// Attach implements volume.Store.
func (s *Store) Attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (v volume.Volume, d vm.Disk, err error) {
	one, ref, err := s.find(ctx, ref)
	if err != nil {
		return v, d, err
	}
	return one.Attach(ctx, ref, to, as)
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

// Pools implements volume.Pooled.
func (s *Store) Pools(ctx context.Context) []volume.Pool {
	var out []volume.Pool
	for _, one := range s.stores() {
		if p, ok := volume.As[volume.Pooled](one); ok {
			out = append(out, p.Pools(ctx)...)
		}
	}
	return out
}

// Create implements volume.Maker.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	m, err := s.maker(spec.Kind)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("create volume %s: %w", spec.Name, err)
	}
	return taking(ctx, s, "create volume "+spec.Name, m.Making, vm.Behalf(ctx), spec.Name, func() (volume.Volume, error) { return m.Create(ctx, spec) })
}

// Delete implements volume.Maker.
func (s *Store) Delete(ctx context.Context, ref string) error {
	_, err := able(ctx, s, "delete", ref, func(m volume.Maker, ref string) (struct{}, error) { return struct{}{}, m.Delete(ctx, ref) })
	return err
}

// Snapshot implements volume.Snapshotter.
func (s *Store) Snapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Snapshot, error) {
	take := func(m volume.Snapshotter, ref string) (volume.Snapshot, error) { return m.Snapshot(ctx, ref, spec) }
	if spec.Name == "" || len(s.makers) == 1 {
		return able(ctx, s, "take a snapshot of", ref, take)
	}
	v, err := s.Get(ctx, ref)
	if err != nil {
		return volume.Snapshot{}, err
	}
	owner := vm.Heir(ctx, v.Owner)
	release, err := s.reserve(vm.VolumeSnapshots, owner.Qualify(spec.Name))
	if err != nil {
		return volume.Snapshot{}, fmt.Errorf("take a snapshot of volume %s: %w", ref, err)
	}
	defer release()
	for _, k := range s.makers {
		if k.Name == v.Kind { // it says itself what it has
			continue
		}
		if x, err := k.GetSnapshot(vm.OnBehalf(ctx, owner), owner.Qualify(spec.Name)); err == nil && x.Name == spec.Name || errdefs.Is(err, errdefs.DataLoss) {
			return volume.Snapshot{}, fmt.Errorf("take a snapshot of volume %s: %w", ref, vm.VolumeSnapshots.Taken(owner.Qualify(spec.Name)))
		}
	}
	return able(ctx, s, "take a snapshot of", string(v.ID), take)
}

// CheckLive implements volume.LiveChecker.
func (s *Store) CheckLive(ctx context.Context, ref string) error {
	_, err := able(ctx, s, "take a snapshot of", ref, func(c volume.LiveChecker, ref string) (struct{}, error) { return struct{}{}, c.CheckLive(ctx, ref) })
	return err
}

// GetSnapshot implements volume.Snapshotter.
func (s *Store) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	k, ref, err := s.findSnapshot(ctx, ref)
	if err != nil {
		return volume.Snapshot{}, err
	}
	return k.GetSnapshot(ctx, ref)
}

// Snapshots implements volume.Snapshotter.
func (s *Store) Snapshots(ctx context.Context) ([]volume.Snapshot, error) {
	var out []volume.Snapshot
	for _, k := range s.makers {
		all, err := k.Snapshots(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, all...)
	}
	slices.SortFunc(out, func(a, b volume.Snapshot) int { return a.Named().Compare(b.Named()) })
	return out, nil
}

// FromSnapshot implements volume.Snapshotter.
func (s *Store) FromSnapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	what := "make a volume from snapshot " + ref
	k, ref, err := s.findSnapshot(ctx, ref)
	var snap volume.Snapshot
	if err == nil {
		snap, err = k.GetSnapshot(ctx, ref)
	}
	if err == nil {
		err = sameKind(spec, snap.Kind)
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("%s: %w", what, err)
	}
	return taking(ctx, s, what, k.Making, vm.Heir(ctx, snap.Owner), spec.Name, func() (volume.Volume, error) { return k.FromSnapshot(ctx, ref, spec) })
}

// Restore implements volume.Snapshotter.
func (s *Store) Restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	return able(ctx, s, "restore", ref, func(m volume.Snapshotter, ref string) (volume.Volume, error) {
		k, snapshot, err := s.findSnapshot(ctx, snapshot)
		if err != nil {
			return volume.Volume{}, err
		}
		if len(s.makers) > 1 && volume.Snapshotter(k.Making) != m {
			return volume.Volume{}, errdefs.Preconditionf("restore volume %s: snapshot %s is of a volume of the kind %s; make a volume from it instead (cocoon volume clone --snapshot)", ref, snapshot, k.Name)
		}
		return m.Restore(ctx, ref, snapshot)
	})
}

// DeleteSnapshot implements volume.Snapshotter.
func (s *Store) DeleteSnapshot(ctx context.Context, ref string) error {
	k, ref, err := s.findSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	return k.DeleteSnapshot(ctx, ref)
}

// Clone implements volume.Cloner.
func (s *Store) Clone(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	what := "clone volume " + ref
	one, ref, err := s.find(ctx, ref)
	var v volume.Volume
	if err == nil {
		v, err = one.Get(ctx, ref)
	}
	if err == nil {
		err = sameKind(spec, v.Kind)
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("%s: %w", what, err)
	}
	return taking(ctx, s, what, one, vm.Heir(ctx, v.Owner), spec.Name, func() (volume.Volume, error) {
		return able(ctx, s, "clone", ref, func(m volume.Cloner, ref string) (volume.Volume, error) { return m.Clone(ctx, ref, spec) })
	})
}

// Export implements volume.Carrier.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) error {
	_, err := able(ctx, s, "export", ref, func(m volume.Carrier, ref string) (struct{}, error) { return struct{}{}, m.Export(ctx, ref, w) })
	return err
}

// Import implements volume.Carrier.
func (s *Store) Import(ctx context.Context, spec volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	m, err := s.maker(spec.Kind)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("import volume %s: %w", spec.Name, err)
	}
	return taking(ctx, s, "import volume "+spec.Name, m.Making, vm.Behalf(ctx), spec.Name, func() (volume.Volume, error) { return m.Import(ctx, spec, r, progress) })
}
