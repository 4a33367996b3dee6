package enginetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Snapshots is the world's snapshot store: folders, and disks whose overlays are empty files.
type Snapshots struct{ w *World }

var _ snapshot.Store = Snapshots{}

// Snapshots returns the store.
func (w *World) Snapshots() Snapshots { return Snapshots{w} }

// sweepDrafts removes what an earlier process did not finish.
func sweepDrafts(dir string) error {
	entries, err := os.ReadDir(filepath.Join(dir, "drafts"))
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, "drafts", e.Name())))
	}
	return err
}

// Create implements snapshot.Store.
func (s Snapshots) Create(ctx context.Context, name string) (snapshot.Draft, error) {
	if err := s.w.Fault("snapshots.Create"); err != nil {
		return nil, err
	}
	if name == "" || strings.Contains(name, "/") {
		return nil, errdefs.Invalidf("%q cannot be the name of a snapshot", name)
	}
	all, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	owner := vm.Behalf(ctx)
	key := owner.Qualify(name)
	if s.w.taken[key] || slices.ContainsFunc(all, func(x snapshot.Snapshot) bool { return x.Owner.Qualify(x.Name) == key }) {
		return nil, vm.Snapshots.Taken(key)
	}
	d := &draft{s: s, id: string(vm.NewID()), name: name, owner: owner}
	if err := os.Mkdir(d.Dir(), 0o700); err != nil {
		return nil, err
	}
	s.w.taken[key] = true
	return d, nil
}

// Get implements snapshot.Store.
func (s Snapshots) Get(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	if err := s.w.Fault("snapshots.Get"); err != nil {
		return snapshot.Snapshot{}, err
	}
	all, err := s.List(ctx)
	id, missing := vm.Snapshots.Match(vm.Behalf(ctx), ref, func(yield func(vm.Named) bool) {
		for _, x := range all {
			if !yield(named(x)) {
				return
			}
		}
	})
	for _, x := range all {
		if x.ID == string(id) {
			return x, err
		}
	}
	return snapshot.Snapshot{}, errors.Join(err, missing)
}

func named(x snapshot.Snapshot) vm.Named {
	return vm.Named{ID: vm.ID(x.ID), Name: x.Name, Owner: x.Owner, Shared: x.Published}
}

// List implements snapshot.Store.
func (s Snapshots) List(ctx context.Context) ([]snapshot.Snapshot, error) {
	entries, err := os.ReadDir(s.w.path("snapshots", ""))
	var out []snapshot.Snapshot
	for _, e := range entries {
		x, bad := load(s.w.path("snapshots", e.Name()))
		if errors.Is(bad, fs.ErrNotExist) {
			continue // it has just been removed
		}
		err = errors.Join(err, bad)
		if named(x).VisibleTo(vm.Behalf(ctx)) {
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b snapshot.Snapshot) int { return strings.Compare(a.Name, b.Name) })
	return out, err
}

func load(dir string) (x snapshot.Snapshot, err error) {
	text, err := os.ReadFile(filepath.Join(dir, snapshot.FileMeta))
	if err == nil {
		err = json.Unmarshal(text, &x)
	}
	return x, err
}

// Remove implements snapshot.Store.
func (s Snapshots) Remove(ctx context.Context, ref string) error {
	x, err := s.Get(ctx, ref)
	if err != nil {
		return err
	}
	if !vm.Behalf(ctx).Reaches(x.Owner) {
		return errdefs.Preconditionf("snapshot %s is the operator's", x.Name)
	}
	s.w.mu.Lock()
	held := s.w.held[x.ID]
	s.w.mu.Unlock()
	if held > 0 {
		return errdefs.Preconditionf("snapshot %s is being used", x.Name)
	}
	return s.w.around("snapshots.Remove", func() error {
		// Removed in one step, as by the real store: a crash must not leave an incomplete snapshot folder.
		gone := s.w.path("drafts", x.ID+".gone")
		if err := os.Rename(s.w.path("snapshots", x.ID), gone); err != nil {
			return err
		}
		return os.RemoveAll(gone)
	})
}

// Update implements snapshot.Store.
func (s Snapshots) Update(ctx context.Context, ref string, change func(*snapshot.Snapshot)) (snapshot.Snapshot, error) {
	x, err := s.Get(ctx, ref)
	if err != nil {
		return x, err
	}
	change(&x)
	text, err := json.Marshal(x)
	if err != nil {
		return x, err
	}
	return x, os.WriteFile(filepath.Join(s.w.path("snapshots", x.ID), snapshot.FileMeta), text, 0o600)
}

type held struct {
	w    *World
	dir  string
	x    snapshot.Snapshot
	once bool
}

// Snapshot implements snapshot.Held.
func (h *held) Snapshot() snapshot.Snapshot { return h.x }

// Dir implements snapshot.Held.
func (h *held) Dir() string { return h.dir }

// Open implements snapshot.Held.
func (h *held) Open(name string) (*sparse.File, error) {
	f, err := os.Open(filepath.Join(h.dir, name))
	if err != nil {
		return nil, errdefs.DataLossf("open %s: %w", name, err)
	}
	return sparse.NewFile(f)
}

// Verify implements snapshot.Held.
func (h *held) Verify(context.Context) error { return nil }

// Feed implements snapshot.Held.
func (h *held) Feed() string { return "" }

// Release implements snapshot.Held.
func (h *held) Release() {
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	if !h.once {
		h.once = true
		h.w.held[h.x.ID]--
	}
}

// Hold implements snapshot.Store.
func (s Snapshots) Hold(ctx context.Context, ref string) (snapshot.Held, error) {
	x, err := s.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.held[x.ID]++
	return &held{w: s.w, dir: s.w.path("snapshots", x.ID), x: x}, nil
}

// HoldArriving implements snapshot.Store. Nothing arrives here.
func (s Snapshots) HoldArriving(ctx context.Context, ref string) (snapshot.Held, error) {
	return s.Hold(ctx, ref)
}

// HoldDir implements snapshot.Store.
func (s Snapshots) HoldDir(_ context.Context, dir string) (snapshot.Held, error) {
	x, err := load(dir)
	if err != nil {
		return nil, errdefs.Invalidf("%s holds no snapshot: %w", dir, err)
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.held[x.ID]++
	return &held{w: s.w, dir: dir, x: x}, nil
}

// Disks implements snapshot.Store.
func (s Snapshots) Disks(_ context.Context, h snapshot.Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error) {
	if storage > 0 && storage < h.Snapshot().Storage {
		return nil, errdefs.Invalidf("%d bytes of storage are less than the snapshot has", storage)
	}
	var out []vm.Disk
	err := s.w.around("snapshots.Disks", func() error {
		for _, d := range h.Snapshot().Disks {
			disk, err := disk(h.Dir(), d, base, dir)
			if err != nil {
				return err
			}
			out = append(out, disk)
		}
		return nil
	})
	return out, err
}

// RawDisks implements snapshot.Store.
func (s Snapshots) RawDisks(_ context.Context, h snapshot.Held, _ []vm.Disk, dir string, _ int64) (out []vm.Disk, err error) {
	return out, s.w.around("snapshots.RawDisks", func() error {
		for _, d := range h.Snapshot().Disks {
			if d.Image || len(d.Layers) != 1 || d.Layers[0].Format != vm.DiskRaw {
				return errdefs.Unsupportedf("disk %s is not raw", d.Serial)
			}
			path := filepath.Join(dir, d.Serial+".raw")
			if err := copyFile(path, filepath.Join(h.Dir(), d.Layers[0].File)); err != nil {
				return err
			}
			out = append(out, vm.Disk{Path: path, Format: vm.DiskRaw, Serial: d.Serial, Role: d.Role})
		}
		return nil
	})
}

func copyFile(path, src string) error {
	text, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func disk(from string, d snapshot.Disk, base []vm.Disk, dir string) (vm.Disk, error) {
	var below *vm.Disk
	if at := slices.IndexFunc(base, func(b vm.Disk) bool { return b.Serial == d.Serial }); d.Image && at < 0 {
		return vm.Disk{}, errdefs.DataLossf("the image has no disk %s", d.Serial)
	} else if d.Image {
		b := lowest(base[at])
		below = &b
	}
	if len(d.Layers) == 0 {
		return *below, nil
	}
	for _, l := range d.Layers {
		path := filepath.Join(dir, l.File)
		if err := os.Link(filepath.Join(from, l.File), path); err != nil && !errors.Is(err, fs.ErrExist) {
			return vm.Disk{}, errdefs.DataLossf("link disk %s: %w", d.Serial, err)
		}
		below = &vm.Disk{Path: path, Format: l.Format, ReadOnly: true, Serial: d.Serial, Role: d.Role, Backing: below}
	}
	top := vm.Disk{Path: filepath.Join(dir, d.Serial+".top"), Format: vm.DiskQCOW2, Serial: d.Serial, Role: d.Role, Backing: below}
	return top, create(top.Path)
}

// lowest returns the file at the bottom of a disk.
func lowest(d vm.Disk) vm.Disk {
	for d.Backing != nil {
		d = *d.Backing
	}
	return d
}

func create(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// Overlay implements snapshot.Store.
func (s Snapshots) Overlay(_ context.Context, below vm.Disk, dir, name string) (vm.Disk, error) {
	d := vm.Disk{Path: filepath.Join(dir, name), Format: vm.DiskQCOW2, Serial: below.Serial, Role: below.Role}
	below = below.Clone()
	d.Backing = &below
	return d, s.w.around("snapshots.Overlay", func() error { return create(d.Path) })
}

// Export implements snapshot.Store: no test needs it.
func (s Snapshots) Export(context.Context, snapshot.Held, io.Writer) error {
	return errdefs.Unsupportedf("not exported")
}

// ExportDir implements snapshot.Store.
func (s Snapshots) ExportDir(_ context.Context, h snapshot.Held, dir string) error {
	return os.CopyFS(dir, os.DirFS(h.Dir()))
}

// Import implements snapshot.Store: no test needs it.
func (s Snapshots) Import(context.Context, string, string, io.Reader, func(int64)) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{}, errdefs.Unsupportedf("not imported")
}

// ImportDir implements snapshot.Store: no test needs it.
func (s Snapshots) ImportDir(context.Context, string, string, string) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{}, errdefs.Unsupportedf("not imported")
}

// draft is one snapshot.Draft.
type draft struct {
	s     Snapshots
	id    string
	name  string
	owner vm.Owner
	n     int // files linked
	over  bool
}

// ID implements snapshot.Draft.
func (d *draft) ID() string { return d.id }

// Dir implements snapshot.Draft.
func (d *draft) Dir() string { return d.s.w.path("drafts", d.id) }

// Base implements snapshot.Draft: this store always saves whole memory.
func (d *draft) Base(context.Context, ...string) (string, error) { return "", nil }

// Link implements snapshot.Draft.
func (d *draft) Link(_ context.Context, disk vm.Disk, imageDisk func(string) bool) (snapshot.Disk, error) {
	return d.keep("snapshots.Link", os.Link, disk, imageDisk)
}

// Copy implements snapshot.Draft.
func (d *draft) Copy(_ context.Context, disk vm.Disk, imageDisk func(string) bool) (snapshot.Disk, error) {
	return d.keep("snapshots.Copy", func(from, to string) error { return copyFile(to, from) }, disk, imageDisk)
}

// keep adds a disk; add adds its file.
func (d *draft) keep(op string, add func(from, to string) error, disk vm.Disk, imageDisk func(string) bool) (snapshot.Disk, error) {
	out := snapshot.Disk{Serial: disk.Serial, Role: disk.Role}
	err := d.s.w.around(op, func() error {
		for at := &disk; at != nil; at = at.Backing {
			if imageDisk(at.Path) {
				out.Image = true
				return nil
			}
			name := fmt.Sprintf("disk-%d", d.n)
			d.n++
			if err := add(at.Path, filepath.Join(d.Dir(), name)); err != nil {
				return err
			}
			out.Layers = slices.Insert(out.Layers, 0, snapshot.Layer{File: name, Format: at.Format})
			add = os.Link
		}
		return nil
	})
	return out, err
}

// Offer implements snapshot.Draft.
func (d *draft) Offer(context.Context, snapshot.Snapshot) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{}, errdefs.Unsupportedf("nothing arrives in this store")
}

// Commit implements snapshot.Draft.
func (d *draft) Commit(_ context.Context, x snapshot.Snapshot) (snapshot.Snapshot, error) {
	x.ID, x.Name, x.Owner = d.id, d.name, d.owner
	text, err := json.Marshal(x)
	if err != nil {
		return x, err
	}
	if err := os.WriteFile(filepath.Join(d.Dir(), snapshot.FileMeta), text, 0o600); err != nil {
		return x, err
	}
	if err := d.s.w.Fault("snapshots.Commit"); err != nil {
		return x, err
	}
	if err := os.Rename(d.Dir(), d.s.w.path("snapshots", d.id)); err != nil {
		return x, err
	}
	d.free()
	// A crash may follow here. A store never fails after the snapshot exists.
	_ = d.s.w.Fault("snapshots.Commit done")
	return x, nil
}

func (d *draft) free() {
	d.s.w.mu.Lock()
	defer d.s.w.mu.Unlock()
	if !d.over {
		delete(d.s.w.taken, d.owner.Qualify(d.name))
	}
	d.over = true
}

// Discard implements snapshot.Draft.
func (d *draft) Discard() error {
	if d.over {
		return nil
	}
	d.free()
	return os.RemoveAll(d.Dir())
}
