package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Collect frees what limits allow. It removes content without a name first, then images that were unused for too long.
// Then it removes the images that were unused for the longest time, until the store is small enough and its file system
// has enough space. A layer is removed when no record and no unfinished import needs it.
func (s *Store) Collect(ctx context.Context, limits image.GCLimits, inUse func(digest string) bool) (image.Collected, error) {
	if err := checkLimits(limits); err != nil {
		return image.Collected{}, err
	}
	if err := s.Open(ctx); err != nil {
		return image.Collected{}, err
	}
	return s.collect(limits, inUse)
}

func checkLimits(l image.GCLimits) error {
	switch {
	case l.MinAge < 0 || l.MaxAge < 0 || l.MaxSize < 0:
		return errdefs.Invalidf("the limits of a collection cannot be negative")
	case l.High < 0 || l.High > 100 || l.Low < 0 || l.Low > 100:
		return errdefs.Invalidf("the high and low limits of disk usage are percentages from 0 to 100, not %d and %d", l.High, l.Low)
	case l.High > 0 && l.Low > l.High:
		return errdefs.Invalidf("the high limit of disk usage is %d%% and the low limit is %d%%: the low limit must not exceed the high one", l.High, l.Low)
	}
	return nil
}

// collect plans and acts under the store's lock. Only the deletion of hidden folders happens without it.
func (s *Store) collect(limits image.GCLimits, inUse func(string) bool) (c image.Collected, err error) {
	work, err := s.newWork()
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	unlock, err := s.lock(exclusive)
	if err != nil {
		return c, err
	}
	defer unlock()
	if !limits.DryRun {
		if err := s.sweepTemporary(); err != nil { // else layers pinned by a dead import would stay
			return c, err
		}
	}
	inv, err := s.inventory(inUse)
	if err != nil {
		return c, err
	}
	p := inv.plan(limits, time.Now())
	c.Freed = p.freed
	for _, it := range p.items {
		c.Images = append(c.Images, it.images...)
	}
	slices.SortFunc(c.Images, func(a, b image.Image) int { return strings.Compare(a.Name, b.Name) })
	if limits.DryRun {
		return c, nil
	}
	return c, s.carryOut(p, work)
}

// item is one stored image during a collection.
type item struct {
	hex    string
	images []image.Image // one for each of its names
	used   time.Time
	size   int64 // bytes of its own files, without layers
	layers []string
	busy   bool
}

// inventory is everything in the store that may be removed.
type inventory struct {
	items  []item
	layers map[string]int64 // bytes of each layer
	pinned map[string]bool  // layers that must be kept; nil: all
	stale  []string         // origins of names that do not exist
	total  int64            // bytes of the store
	disk   diskUsage        // of its file system
}

// inventory lists the content of the store. Preconditions: the exclusive lock is held.
func (s *Store) inventory(inUse func(string) bool) (inv inventory, err error) {
	names, err := s.names()
	if err != nil {
		return inv, err
	}
	if inv.stale, err = s.staleOrigins(names); err != nil {
		return inv, err
	}
	if inv.total, err = s.usage(); err != nil {
		return inv, err
	}
	if inv.disk, err = s.statfs(s.cfg.Dir); err != nil {
		return inv, err
	}
	if inv.layers, err = s.layerSizes(); err != nil {
		return inv, err
	}
	if inv.pinned, err = s.pinnedLayers(); err != nil {
		return inv, err
	}
	dirs, err := os.ReadDir(s.path("data"))
	if err != nil {
		return inv, fmt.Errorf("list images: %w", err)
	}
	for _, d := range dirs {
		if !isHex(d.Name()) {
			s.strange("data", d.Name(), "it is not an image")
			continue
		}
		it := item{hex: d.Name(), size: onDisk(s.path("data", d.Name())), busy: used(inUse, d.Name())}
		rec, err := s.load(it.hex)
		for _, n := range names {
			if n.hex == it.hex {
				img := s.describe(rec, n.name)
				img.ID = digest(it.hex)
				it.images = append(it.images, img)
			}
		}
		switch {
		case err == nil:
			it.used, it.layers = s.usedAt(rec), rec.Layers
		case errdefs.IsNotFound(err): // no record, so nothing can boot from it
		default:
			// Its layers are unknown. It is removed when it has no name, unless a later version of Cocoon wrote it.
			s.cfg.Log.Warn("image record unreadable, so no layer is collected", "image", digest(it.hex), "err", err)
			inv.pinned = nil
			it.busy = it.busy || len(it.images) > 0 || !errdefs.Is(err, errdefs.DataLoss)
		}
		inv.items = append(inv.items, it)
	}
	return inv, nil
}

// plan is what a collection removes.
type plan struct {
	items  []item
	layers []string
	stale  []string
	freed  int64
}

// plan chooses what to remove and changes nothing.
func (inv inventory) plan(l image.GCLimits, now time.Time) plan {
	p := plan{stale: inv.stale}
	refs := map[string]int{}
	for _, it := range inv.items {
		for _, k := range uniq(it.layers) {
			refs[k]++
		}
	}
	free := func(k string) bool { return inv.pinned != nil && !inv.pinned[k] && refs[k] == 0 }
	for k, size := range inv.layers {
		if free(k) {
			p.layers, p.freed = append(p.layers, k), p.freed+size
		}
	}
	take := func(it item) {
		p.items, p.freed = append(p.items, it), p.freed+it.size
		for _, k := range uniq(it.layers) {
			refs[k]--
			if size, there := inv.layers[k]; there && free(k) {
				p.layers, p.freed = append(p.layers, k), p.freed+size
			}
		}
	}
	low := cmp.Or(l.Low, l.High-1)
	left := slices.DeleteFunc(slices.Clone(inv.items), func(it item) bool {
		return it.busy || l.MinAge > 0 && now.Sub(it.used) < l.MinAge
	})
	slices.SortFunc(left, func(a, b item) int { // unnamed content first, then the longest unused
		if a, b := len(a.images) == 0, len(b.images) == 0; a != b {
			if a {
				return -1
			}
			return 1
		}
		return cmp.Or(a.used.Compare(b.used), strings.Compare(a.hex, b.hex))
	})
	for _, it := range left {
		switch {
		case len(it.images) == 0,
			l.MaxAge > 0 && now.Sub(it.used) > l.MaxAge,
			l.MaxSize > 0 && inv.total-p.freed > l.MaxSize,
			l.High > 0 && inv.disk.percent(0) >= l.High && inv.disk.percent(p.freed) > low:
			take(it)
		}
	}
	slices.Sort(p.layers)
	return p
}

func uniq(in []string) []string {
	out := slices.Clone(in)
	slices.Sort(out)
	return slices.Compact(out)
}

// carryOut removes in an order that is safe to interrupt at any point: content is marked for removal before its names are
// removed, and images are removed before their layers.
// Preconditions: the exclusive lock is held.
func (s *Store) carryOut(p plan, work *workdir) error {
	for _, it := range p.items {
		if len(it.images) > 0 {
			if err := s.forgetAll(it); err != nil {
				return err
			}
		}
		if err := s.hide(work, s.path("data", it.hex)); err != nil {
			return err
		}
		s.cfg.Log.Info("image content removed", "image", digest(it.hex))
	}
	for _, key := range p.stale {
		if err := s.dropOrigin(key); err != nil {
			return err
		}
	}
	for _, k := range p.layers {
		if err := s.hide(work, s.path("layers", k)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) forgetAll(it item) error {
	if err := s.unclaim(it.hex); err != nil {
		return err
	}
	for _, img := range it.images {
		if err := s.forget(img.Name); err != nil {
			return err
		}
	}
	return s.syncNames()
}

// forget removes a name, then its origin, which means nothing alone.
func (s *Store) forget(name string) error {
	if err := os.Remove(s.namePath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget image name %s: %w", name, err)
	}
	return s.dropOrigin(name)
}

// hide moves a folder into work in one step. Open files in it stay usable.
func (s *Store) hide(work *workdir, path string) error {
	err := os.Rename(path, work.join("gone-"+filepath.Base(filepath.Dir(path))+"-"+filepath.Base(path)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove image: %w", err)
	}
	return nil
}

// staleOrigins returns the keys of origins that have no name.
func (s *Store) staleOrigins(names []named) (keys []string, err error) {
	entries, err := os.ReadDir(s.path("origins"))
	if err != nil {
		return nil, fmt.Errorf("list the origins of images: %w", err)
	}
	for _, e := range entries {
		file, isJSON := strings.CutSuffix(e.Name(), ".json")
		key := strings.ReplaceAll(file, "%", "/")
		if !isJSON || !e.Type().IsRegular() || CheckKey(key) != nil {
			s.strange("origins", e.Name(), "it is not the origin of an image")
			continue
		}
		i := slices.IndexFunc(names, func(n named) bool { return n.name == key })
		if i < 0 || s.origin(key, names[i].hex).IsZero() {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

func (s *Store) layerSizes() (map[string]int64, error) {
	dirs, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	sizes := map[string]int64{}
	for _, d := range dirs {
		if !isHex(d.Name()) || !d.IsDir() {
			s.strange("layers", d.Name(), "it is not a layer")
			continue
		}
		sizes[d.Name()] = onDisk(s.path("layers", d.Name()))
	}
	return sizes, nil
}

// pinnedLayers returns the keys of layers that unfinished imports need.
func (s *Store) pinnedLayers() (map[string]bool, error) {
	pins, err := filepath.Glob(s.path("tmp", "*", pinDir, "*"))
	keep := map[string]bool{}
	for _, p := range pins {
		keep[filepath.Base(p)] = true
	}
	return keep, err
}

// Usage returns the bytes that the store uses, including work in progress.
func (s *Store) Usage(ctx context.Context) (int64, error) {
	if err := s.Open(ctx); err != nil {
		return 0, err
	}
	return s.usage()
}

func (s *Store) usage() (sum int64, err error) {
	err = filepath.WalkDir(s.cfg.Dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != s.cfg.Dir {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		if info, err := d.Info(); err == nil {
			sum += sparse.Occupied(info)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("measure the image store: %w", err)
	}
	return sum, nil
}

// diskUsage is how full a file system is, in bytes.
type diskUsage struct {
	used, avail int64 // avail is what an unprivileged user may still use
}

// percent is the usage that df shows after freed bytes are freed.
func (d diskUsage) percent(freed int64) int {
	total := d.used + d.avail
	if total <= 0 {
		return 0
	}
	return int(((d.used-freed)*100 + total - 1) / total)
}

func statfs(path string) (diskUsage, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return diskUsage{}, fmt.Errorf("read the usage of the image store's disk: %w", err)
	}
	return diskUsage{used: int64(fs.Blocks-fs.Bfree) * fs.Bsize, avail: int64(fs.Bavail) * fs.Bsize}, nil
}
