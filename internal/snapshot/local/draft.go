package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

const parallelSyncs = 4 // files of one snapshot that are flushed at the same time

// draft implements snapshot.Draft.
type draft struct {
	store *Store
	id    string
	name  string
	owner vm.Owner

	mu     sync.Mutex
	disks  int             // linked so far
	linked map[string]bool // files that Link made on this host
	done   bool
	offer  *entry // nil: not offered
}

// Create implements snapshot.Store.
func (s *Store) Create(ctx context.Context, name string) (snapshot.Draft, error) {
	return s.create(ctx, name)
}

func (s *Store) create(ctx context.Context, name string) (*draft, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	d := &draft{store: s, id: string(vm.NewID()), name: name, owner: vm.Behalf(ctx), linked: map[string]bool{}}
	if err := s.reserve(d.owner, name, d.id); err != nil {
		return nil, err
	}
	if err := os.Mkdir(d.Dir(), 0o700); err != nil {
		d.free()
		return nil, fmt.Errorf("begin snapshot %s: %w", name, full(err))
	}
	return d, nil
}

func (d *draft) ID() string { return d.id }

func (d *draft) Dir() string {
	if d.offer != nil {
		return d.store.path(d.id)
	}
	return d.store.path("tmp", d.id)
}

// free releases the name.
func (d *draft) free() {
	d.store.mu.Lock()
	defer d.store.mu.Unlock()
	if key := d.owner.Qualify(d.name); d.store.names[key] == d.id {
		delete(d.store.names, key)
	}
}

// Link implements snapshot.Draft. Files are called disk-<n>.<layer>.<format>: n counts the linked disks; layers are
// numbered from the lowest.
func (d *draft) Link(ctx context.Context, disk vm.Disk, imageDisk func(path string) bool) (snapshot.Disk, error) {
	return d.keep(ctx, disk, imageDisk, sparse.LinkFile)
}

// Copy implements snapshot.Draft. Files are called as those of Link.
func (d *draft) Copy(ctx context.Context, disk vm.Disk, imageDisk func(path string) bool) (snapshot.Disk, error) {
	if disk.ReadOnly {
		return d.Link(ctx, disk, imageDisk)
	}
	return d.keep(ctx, disk, imageDisk, sparse.CopyFile)
}

// keep adds a disk; top adds the file of the disk itself.
func (d *draft) keep(ctx context.Context, disk vm.Disk, imageDisk func(path string) bool, top func(ctx context.Context, path, src string) error) (snapshot.Disk, error) {
	out, err := d.link(ctx, disk, imageDisk, top)
	if err != nil {
		return snapshot.Disk{}, fmt.Errorf("keep disk %s in snapshot %s: %w", disk.Serial, d.name, full(err))
	}
	return out, nil
}

func (d *draft) link(ctx context.Context, disk vm.Disk, imageDisk func(path string) bool, top func(ctx context.Context, path, src string) error) (snapshot.Disk, error) {
	out := snapshot.Disk{Serial: disk.Serial, Role: disk.Role}
	var chain []vm.Disk
	for at := &disk; at != nil; at = at.Backing {
		if imageDisk(at.Path) {
			out.Image = true
			break
		}
		chain = append(chain, *at)
	}
	slices.Reverse(chain)
	size, err := sizeOf(disk)
	if err != nil {
		return out, err
	}
	out.Size = size
	d.mu.Lock()
	n := d.disks
	d.disks++
	d.mu.Unlock()
	for layer, at := range chain {
		file := fmt.Sprintf("disk-%d.%d.%s", n, layer, at.Format)
		add := sparse.LinkFile
		if layer == len(chain)-1 {
			add = top
		}
		if err := add(ctx, filepath.Join(d.Dir(), file), at.Path); err != nil {
			return out, err
		}
		out.Layers = append(out.Layers, snapshot.Layer{File: file, Format: at.Format})
		d.mu.Lock()
		d.linked[file] = true
		d.mu.Unlock()
	}
	return out, checkDisk(out, map[string]bool{})
}

// sizeOf returns the size in bytes that a guest sees of a disk.
func sizeOf(d vm.Disk) (int64, error) {
	f, err := openPlain(d.Path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	size, err := virtualSize(f, d.Format, false)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", d.Path, err)
	}
	return size, nil
}

// Base implements snapshot.Draft. If a snapshot's memory is itself a delta, Base takes that memory's base, so no memory
// is ever in more than two files. The file is a link of this snapshot's own, independent of the other snapshots.
func (d *draft) Base(ctx context.Context, refs ...string) (string, error) {
	for _, ref := range refs {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		h, err := d.store.keep(d.owner, ref, false)
		switch {
		case errdefs.IsNotFound(err), errdefs.Is(err, errdefs.DataLoss):
			continue
		case err != nil:
			return "", err
		}
		id, err := d.base(h)
		h.Release()
		if id != "" || err != nil {
			return id, err
		}
	}
	return "", nil
}

func (d *draft) base(h *held) (string, error) {
	s := h.s
	id, file := s.ID, snapshot.FileMemory
	if s.MemoryBase != "" {
		id, file = s.MemoryBase, snapshot.FileBase
	}
	if !s.Live {
		return "", nil
	}
	err := os.Link(filepath.Join(h.dir, file), filepath.Join(d.Dir(), snapshot.FileBase))
	for _, no := range []error{unix.ENOENT, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP, unix.EXDEV} {
		if errors.Is(err, no) {
			return "", nil // a copy would cost as much as the delta saves
		}
	}
	if err != nil {
		return "", fmt.Errorf("base snapshot %s on the memory of %s: %w", d.name, name(s), full(err))
	}
	if s.Summed { // otherwise, or if the link fails, Commit computes them
		_ = os.Link(filepath.Join(h.dir, file+sparse.SumSuffix), filepath.Join(d.Dir(), snapshot.FileBase+sparse.SumSuffix))
	}
	return id, nil
}

// Commit implements snapshot.Draft. It keeps a CreatedAt that is set. Layers that Link did not make came from
// elsewhere: Commit validates them before a hypervisor gets them, and drops what is only true on the other host from
// the record.
func (d *draft) Commit(ctx context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.done {
		return snapshot.Snapshot{}, errdefs.Preconditionf("snapshot %s is already finished or discarded", d.name)
	}
	s, err := d.commit(ctx, d.own(s))
	if err != nil {
		return snapshot.Snapshot{}, fmt.Errorf("finish snapshot %s: %w", d.name, full(err))
	}
	d.done = true
	return s.Clone(), nil
}

// own returns s as the record of d.
func (d *draft) own(s snapshot.Snapshot) snapshot.Snapshot {
	s = s.Clone()
	s.ID, s.Name, s.Owner = d.id, d.name, d.owner
	if s.CreatedAt.IsZero() {
		s.CreatedAt = time.Now()
	}
	s.CreatedAt = s.CreatedAt.UTC()
	return s
}

func (d *draft) commit(ctx context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	if d.offer != nil {
		return d.arrive(ctx, s)
	}
	if err := check(s); err != nil {
		return s, err
	}
	if err := checkFiles(d.Dir(), s, d.linked); err != nil {
		return s, err
	}
	s = d.cleansed(s)
	if s.MemoryBase == "" {
		for _, f := range withSums([]string{snapshot.FileBase}) {
			if err := os.Remove(filepath.Join(d.Dir(), f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return s, err
			}
		}
	}
	if err := onlyThese(d.Dir(), withSums(s.Files())); err != nil {
		return s, err
	}
	s.Summed = true
	if err := d.seal(ctx, s.Files()); err != nil {
		return s, err
	}
	var err error
	if s.Size, err = occupied(d.Dir()); err != nil {
		return s, err
	}
	if data, err := json.Marshal(s); err != nil || len(data) > maxRecord/2 { // half: it is stored with indentation
		return s, errors.Join(err, errdefs.Invalidf("its record has %d bytes; at most %d are possible", len(data), maxRecord/2))
	}
	if err := store(d.Dir(), s); err != nil {
		return s, err
	}
	st := d.store
	if err := os.Rename(d.Dir(), st.path(d.id)); err != nil {
		return s, err
	}
	if err := errors.Join(atomicfile.SyncDir(st.path()), atomicfile.SyncDir(st.path("tmp"))); err != nil {
		return s, errors.Join(err, os.Rename(st.path(d.id), d.Dir())) // what may not be durable must not stay visible
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.all[d.id] = &entry{s: s}
	return s, nil
}

// cleansed returns s without what is only true on another host, if it came from one.
func (d *draft) cleansed(s snapshot.Snapshot) snapshot.Snapshot {
	if slices.ContainsFunc(s.Files(), func(f string) bool { return layerRE.MatchString(f) && !d.linked[f] }) {
		return s.Foreign()
	}
	return s
}

// onlyThese refuses a folder with other files than the given ones: a file that is in no record would never be removed.
func onlyThese(dir string, files []string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != snapshot.FileMeta && !slices.Contains(files, e.Name()) {
			return errdefs.New(errdefs.Internal, "its folder has a file %s that its record does not list", e.Name())
		}
	}
	return nil
}

// syncFiles makes the content of files durable, several in parallel: most of the time is spent waiting for the disk.
func syncFiles(ctx context.Context, dir string, files []string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelSyncs)
	for _, file := range files {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			f, err := openPlain(filepath.Join(dir, file))
			if err != nil {
				return err
			}
			defer f.Close()
			return f.Sync()
		})
	}
	return g.Wait()
}

// Discard implements snapshot.Draft.
func (d *draft) Discard() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.done {
		return nil
	}
	d.done = true
	if d.offer != nil {
		return d.retract()
	}
	err := atomicfile.RemoveAll(d.Dir())
	d.free()
	if err != nil {
		return fmt.Errorf("discard snapshot %s: %w", d.name, err)
	}
	return nil
}
