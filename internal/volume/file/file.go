// Package file is the volume store of one host: one folder per volume, with a sparse file of its raw bytes.
//
// Only one process has the store open. The store starts no VM, and does not notice whether a VM reads or writes the files.
package file

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

var (
	_ volume.Store = (*Store)(nil)
	_ volume.Maker = (*Store)(nil)
)

// Kind is the kind of all volumes of this store.
const Kind = "file"

// Config configures the store.
type Config struct {
	Dir string       // absolute; created when missing, mode 0700
	Log *slog.Logger // nil discards
}

// Store implements volume.Store, volume.Maker, volume.Snapshotter, volume.Cloner and volume.Carrier. Its folder:
//
//	lock                          held by the process that has the store open
//	volumes/<id>/                 one volume: volume.json and data; mode 0700, files 0600
//	snapshots/<id>/               one snapshot: snapshot.json and data
//	volumes/.draft-<id>/          a volume that is being made; also below snapshots
//	volumes/.gone-<id>/           a volume that is being removed; also below snapshots
//	volumes/<id>/.data.tmp-*      the bytes of a snapshot that are about to replace data
//	volumes/<id>/.volume.json.tmp-*
//
// The records are also in memory, so that no list reads files. Only New reads them.
type Store struct {
	cfg       Config
	lock      *os.File
	volumes   *folders[volume.Volume]
	snapshots *folders[volume.Snapshot]
}

// New locks the store's folder, removes what a killed process left unfinished, and reads all records. A volume or snapshot that is
// damaged stays where it is and blocks no other; New logs it. Close ends the lock.
// Errors: InvalidArgument if the folder is not absolute, FailedPrecondition if another process has the store open.
func New(ctx context.Context, cfg Config) (*Store, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, errdefs.Invalidf("the folder of the volume store %q must be an absolute path", cfg.Dir)
	}
	cfg.Dir = filepath.Clean(cfg.Dir)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	s := &Store{cfg: cfg}
	s.volumes = newFolders(vm.Volumes, filepath.Join(cfg.Dir, "volumes"), "volume.json", cfg.Log, record.Volume, s.followData)
	s.snapshots = newFolders(vm.VolumeSnapshots, filepath.Join(cfg.Dir, "snapshots"), "snapshot.json", cfg.Log, record.Snapshot, matchData)
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("open the volume store %s: %w", cfg.Dir, record.Full(err))
	}
	return s, nil
}

func (s *Store) open(ctx context.Context) error {
	for _, dir := range []string{s.cfg.Dir, s.volumes.dir, s.snapshots.dir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := errors.Join(atomicfile.SyncDir(s.cfg.Dir), atomicfile.SyncDir(filepath.Dir(s.cfg.Dir))); err != nil {
		return err
	}
	lock, err := filelock.Take(ctx, filepath.Join(s.cfg.Dir, "lock"))
	if errors.Is(err, filelock.ErrTaken) {
		return errdefs.Preconditionf("another process uses it; stop that process first: is cocoond running twice?")
	}
	if err != nil {
		return err
	}
	if err := errors.Join(s.volumes.scan(), s.snapshots.scan()); err != nil {
		lock.Close()
		return err
	}
	s.lock = lock
	return nil
}

// Close unlocks the store's folder for other processes. The store must not be used afterwards.
func (s *Store) Close() error { return s.lock.Close() }

// Create implements volume.Maker.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	size, err := volume.RoundSize(spec.Size)
	if err != nil {
		return volume.Volume{}, record.Failed("create", vm.Volumes, spec.Name, err)
	}
	v, err := s.make(ctx, spec, "", func(*os.File) (int64, error) { return size, nil })
	if err != nil {
		return volume.Volume{}, record.Failed("create", vm.Volumes, spec.Name, err)
	}
	return v, nil
}

// make makes a volume. fill writes its bytes and returns its size.
func (s *Store) make(ctx context.Context, spec volume.Spec, from vm.ID, fill func(data *os.File) (int64, error)) (volume.Volume, error) {
	if err := spec.Validate(vm.Volumes); err != nil {
		return volume.Volume{}, err
	}
	owner := vm.Behalf(ctx)
	return s.volumes.create(ctx, owner, spec.Name, func(id vm.ID, name string, data *os.File) (volume.Volume, error) {
		v := volume.Volume{ID: id, Name: name, Owner: owner, Kind: Kind, From: string(from), For: spec.For, CreatedAt: now(), Labels: spec.Labels}.Clone()
		size, err := fill(data)
		if err != nil {
			return v, err
		}
		v.Size = size
		return v, data.Truncate(size)
	})
}

// now is the time in the form that a record keeps.
func now() time.Time { return time.Now().UTC().Round(0) }

// Get implements volume.Store.
func (s *Store) Get(ctx context.Context, ref string) (volume.Volume, error) {
	return s.volumes.Get(ctx, ref)
}

// List implements volume.Store.
func (s *Store) List(ctx context.Context) ([]volume.Volume, error) { return s.volumes.List(ctx) }

// Update implements volume.Store.
func (s *Store) Update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	v, err := s.volumes.change(ctx, ref, func(v *volume.Volume) error {
		asked := v.Clone()
		change(&asked)
		v.Name, v.Labels = asked.Name, asked.Clone().Labels
		if err := vm.Volumes.ValidateName(v.Name); err != nil {
			return err
		}
		return volume.ValidateLabels(v.Labels)
	})
	if err != nil {
		return volume.Volume{}, record.Failed("update", vm.Volumes, ref, err)
	}
	return v, nil
}

// Resize implements volume.Store. The file grows before its record. If the process is killed in between, New gives the record the
// size of the file.
func (s *Store) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	v, err := s.resize(ctx, ref, size)
	if err != nil {
		return volume.Volume{}, record.Failed("resize", vm.Volumes, ref, err)
	}
	return v, nil
}

func (s *Store) resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	size, err := volume.RoundSize(size)
	if err != nil {
		return volume.Volume{}, err
	}
	e, unlock, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer unlock()
	v := e.Rec.Clone()
	switch {
	case size < v.Size:
		return v, errdefs.Invalidf("it has %d bytes and cannot shrink to %d; make a smaller volume and copy the files to it in a guest", v.Size, size)
	case size == v.Size:
		return v, nil
	}
	data, err := s.volumes.openData(v, v.Size, os.O_RDWR)
	if err != nil {
		return v, err
	}
	defer data.Close()
	old := v.Size
	v.Size = size
	err = data.Truncate(size)
	if err == nil {
		err = data.Sync()
	}
	if err == nil {
		err = s.volumes.Save(e, v)
	}
	if err != nil {
		_ = data.Truncate(old) // nobody uses what was added
		return v, err
	}
	return v.Clone(), nil
}

// Delete implements volume.Maker.
func (s *Store) Delete(ctx context.Context, ref string) error {
	err := s.volumes.remove(ctx, ref, func(v volume.Volume) error {
		if len(v.Attachments) > 0 {
			return errdefs.Preconditionf("it is attached to %s; detach it there first", v.Users())
		}
		return nil
	})
	if err != nil {
		return record.Failed("delete", vm.Volumes, ref, err)
	}
	return nil
}

// Usage implements volume.Store. It leaves out a volume whose file it cannot see.
func (s *Store) Usage(ctx context.Context) (map[vm.ID]volume.Usage, error) {
	all, err := s.volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[vm.ID]volume.Usage, len(all))
	for _, v := range all {
		info, err := os.Lstat(s.volumes.data(v.ID))
		switch {
		case errors.Is(err, fs.ErrNotExist): // just deleted, or lost: its next use tells
		case err != nil:
			return nil, fmt.Errorf("measure volume %s: %w", v.Name, err)
		default:
			out[v.ID] = volume.Usage{Size: v.Size, Allocated: sparse.Occupied(info)}
		}
	}
	return out, nil
}
