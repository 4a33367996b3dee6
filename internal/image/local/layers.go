package local

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// File names inside layers/<key>/.
const (
	layerFile      = "layer.ext4"
	recipeFile     = "layer.recipe" // with layer.ext4, it gives the original tar of the layer
	layerInfoFile  = "layer.json"
	configFile     = "config.json" // in data/<sha256>/: the original configuration, whose digest is the image's id
	parallelLayers = 3             // of one image, fetched and built in parallel
)

// maxLayers is the maximum number of disks for the layers of an image; if there are more, the lowest are merged into one.
// A guest's kernel has a cost per disk, and a machine has slots for little more than a hundred.
const maxLayers = 64

const layerVersion = 1

// layerInfo is layer.json, the description of a built layer, written once.
type layerInfo struct {
	Version   int    `json:"version"`
	DiffID    string `json:"diff_id,omitempty"` // "" for merged layers
	Dependent bool   `json:"dependent"`         // valid only on top of the layers it was built on
	Length    int64  `json:"length"`            // bytes of layer.ext4
	TarSize   int64  `json:"tar_size"`          // bytes of the original tar
}

// PutImage is Put for a container image whose layers are read one by one. Layers that the store already has are not opened.
func (s *Store) PutImage(ctx context.Context, key string, img *oci.Image, open image.Layers, o image.Fetched) (image.Image, error) {
	if err := CheckKey(key); err != nil {
		return image.Image{}, err
	}
	if err := s.Open(ctx); err != nil {
		return image.Image{}, err
	}
	rec, err := s.takeImage(ctx, target{key: key, origin: o.Origin, accept: o.Accept, total: o.Total}, img, open)
	if err != nil {
		return image.Image{}, fmt.Errorf("store image %s: %w", key, full(err))
	}
	return s.describe(rec, key), nil
}

func (s *Store) takeImage(ctx context.Context, t target, img *oci.Image, open image.Layers) (rec record, err error) {
	work, err := s.newWork()
	if err != nil {
		return record{}, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	room, err := s.roomFor(t.total)
	if err != nil {
		return record{}, err
	}
	if t.accept != nil {
		if err := t.accept(img.ID); err != nil {
			return record{}, err
		}
	}
	lim := s.cfg.Limits
	lim.Unpacked = min(lim.Unpacked, room)
	b := builder{hex: strings.TrimPrefix(img.ID, "sha256:"), build: func(ctx context.Context, dir string) (record, error) {
		return s.buildImage(ctx, work, img, open, dir, lim)
	}}
	rec, err = s.publish(ctx, work, t, b)
	return rec, outOfRoom(err, room)
}

// layerKeys returns the two possible keys of a layer: one for its content alone, and one for its content on top of the
// layers below it.
func layerKeys(diffIDs []string, n int) (alone, chain string) {
	sum := sha256.Sum256([]byte("chain\n" + strings.Join(diffIDs[:n+1], "\n")))
	return strings.TrimPrefix(diffIDs[n], "sha256:"), hex.EncodeToString(sum[:])
}

// assembly is one image that is being built.
type assembly struct {
	s      *Store
	work   *workdir
	img    *oci.Image
	open   image.Layers
	budget *oci.Budget
	keys   []string        // key of each layer, valid after done is closed
	done   []chan struct{} // closed when the store has the layer
}

// buildImage makes sure that the store has all layers, and describes the image.
func (s *Store) buildImage(ctx context.Context, work *workdir, img *oci.Image, open image.Layers, dir string, lim oci.Limits) (record, error) {
	a := &assembly{s: s, work: work, img: img, open: open, budget: oci.NewBudget(lim), keys: make([]string, len(img.DiffIDs))}
	var pins []string
	for n := range img.DiffIDs {
		a.done = append(a.done, make(chan struct{}))
		alone, chain := layerKeys(img.DiffIDs, n)
		pins = append(pins, alone, chain)
	}
	if err := s.pin(work, pins...); err != nil {
		return record{}, err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelLayers) // started in order, so that the lowest always makes progress and the others can wait for it
	for n := range img.DiffIDs {
		g.Go(func() error {
			if err := a.layer(gctx, n); err != nil {
				return fmt.Errorf("layer %d of %d: %w", n+1, len(img.DiffIDs), err)
			}
			close(a.done[n])
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return record{}, err
	}
	if rec, err := a.disk(ctx, dir); err == nil || !errors.Is(err, oci.ErrNotADisk) {
		return rec, err
	}
	keys, err := a.bounded(ctx)
	if err != nil {
		return record{}, err
	}
	if err := atomicfile.WriteFile(filepath.Join(dir, configFile), img.Config, 0o600); err != nil {
		return record{}, err
	}
	rec := record{Type: vm.ImageOCI, Format: vm.DiskRaw, Process: img.Process, Arch: img.Arch, Layers: keys}
	for _, k := range keys {
		info, err := os.Stat(s.path("layers", k, layerFile))
		if err != nil {
			return record{}, fmt.Errorf("look at a layer: %w", err)
		}
		rec.VirtualSize += info.Size()
		rec.Size += sparse.Occupied(info)
	}
	return rec, nil
}

// layer makes sure that the store has layer n.
func (a *assembly) layer(ctx context.Context, n int) error {
	alone, chain := layerKeys(a.img.DiffIDs, n)
	unlock, err := a.s.building.Lock(ctx, chain)
	if err != nil {
		return err
	}
	defer unlock()
	for _, k := range []string{alone, chain} {
		if a.s.layerIntact(k) {
			a.keys[n] = k
			return nil
		}
	}
	tmp := a.work.join(fmt.Sprintf("layer-%d", n))
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fmt.Errorf("build a layer: %w", full(err))
	}
	r, err := a.open(ctx, n)
	if err != nil {
		return err
	}
	info, err := a.build(ctx, r, n, tmp)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	a.keys[n] = alone
	if info.Dependent {
		a.keys[n] = chain
	}
	return a.s.placeLayer(a.work, tmp, a.keys[n], info)
}

func (a *assembly) build(ctx context.Context, r io.Reader, n int, tmp string) (info layerInfo, err error) {
	var l oci.Layer
	info.Version, info.DiffID = layerVersion, a.img.DiffIDs[n]
	_, err = writeSynced(filepath.Join(tmp, recipeFile), func(recipe *os.File) error {
		info.Length, err = writeSynced(filepath.Join(tmp, layerFile), func(f *os.File) error {
			l, err = oci.BuildLayer(ctx, r, info.DiffID, oci.Target{
				FS: f, Recipe: recipe, Budget: a.budget,
				Below: func(ctx context.Context) (*oci.Stack, error) { return a.below(ctx, n) },
			})
			return err
		})
		return err
	})
	info.Dependent, info.TarSize = l.Dependent, l.TarSize
	return info, err
}

// below waits for the layers under n and opens them. They stay open until the temporary folder is closed.
func (a *assembly) below(ctx context.Context, n int) (*oci.Stack, error) {
	for _, d := range a.done[:n] {
		select {
		case <-d:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return a.stack(a.keys[:n])
}

func (a *assembly) stack(keys []string) (*oci.Stack, error) {
	var all []*ext4.FS
	for _, k := range keys {
		f, err := os.Open(a.s.path("layers", k, layerFile))
		if err != nil {
			return nil, fmt.Errorf("open a layer: %w", err)
		}
		a.work.keep(f)
		fs, err := ext4.Open(f)
		if err != nil {
			return nil, err
		}
		all = append(all, fs)
	}
	return oci.NewStack(all)
}

// bounded returns the layers to boot from. If there are too many, the lowest are merged into one.
func (a *assembly) bounded(ctx context.Context) ([]string, error) {
	if len(a.keys) <= maxLayers {
		return a.keys, nil
	}
	lower, rest := a.keys[:len(a.keys)-maxLayers+1], a.keys[len(a.keys)-maxLayers+1:]
	sum := sha256.Sum256([]byte("merged\n" + strings.Join(lower, "\n")))
	key := hex.EncodeToString(sum[:])
	if err := a.s.pin(a.work, key); err != nil {
		return nil, err
	}
	if !a.s.layerIntact(key) {
		stack, err := a.stack(lower)
		if err != nil {
			return nil, err
		}
		tmp := a.work.join("merged")
		if err := os.Mkdir(tmp, 0o700); err != nil {
			return nil, fmt.Errorf("merge layers: %w", full(err))
		}
		info := layerInfo{Version: layerVersion}
		info.Length, err = writeSynced(filepath.Join(tmp, layerFile), func(f *os.File) error {
			_, err := oci.Merge(ctx, stack, f, key, a.budget)
			return err
		})
		if err != nil {
			return nil, err
		}
		if err := a.s.placeLayer(a.work, tmp, key, info); err != nil {
			return nil, err
		}
	}
	return append([]string{key}, rest...), nil
}

// disk extracts the disk from an image that holds only a disk: a single file in /disk.
func (a *assembly) disk(ctx context.Context, dir string) (record, error) {
	stack, err := a.stack(a.keys)
	if err != nil {
		return record{}, err
	}
	e, err := stack.Disk()
	if err != nil {
		return record{}, err
	}
	r := e.Open()
	head := make([]byte, min(disk.HeadSize, r.Size()))
	if _, err := r.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
		return record{}, err
	}
	room, err := a.s.room()
	if err != nil {
		return record{}, err
	}
	b, err := a.s.readDisk(a.work, head, r, room)
	if err != nil {
		return record{}, fmt.Errorf("the disk in the image: %w", err)
	}
	rec, err := b.build(ctx, dir)
	rec.Arch = a.img.Arch
	return rec, err
}

// placeLayer moves a finished layer into the store, unless another process was faster.
func (s *Store) placeLayer(work *workdir, tmp, key string, info layerInfo) error {
	data, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encode layer record: %w", err)
	}
	if err := full(atomicfile.WriteFile(filepath.Join(tmp, layerInfoFile), append(data, '\n'), 0o600)); err != nil {
		return err
	}
	unlock, err := s.lock(exclusive)
	if err != nil {
		return err
	}
	defer unlock()
	dir := s.path("layers", key)
	if s.layerIntact(key) {
		return nil // tmp is removed with its folder
	}
	if _, err := os.Stat(dir); err == nil { // damaged: replace it
		if err := os.Rename(dir, work.join("damaged-"+key)); err != nil {
			return fmt.Errorf("replace a damaged layer: %w", err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("place a layer: %w", err)
	}
	return full(atomicfile.Rename(tmp, dir))
}

func (s *Store) layerInfo(key string) (l layerInfo, err error) {
	data, err := os.ReadFile(s.path("layers", key, layerInfoFile))
	if err != nil {
		return l, fmt.Errorf("read layer record: %w", err)
	}
	if err := json.Unmarshal(data, &l); err != nil || l.Version != layerVersion {
		return l, errdefs.DataLossf("the layer record %s is damaged; remove the image and fetch it again", key)
	}
	return l, nil
}

// layerIntact reports whether a layer exists in its full length.
func (s *Store) layerIntact(key string) bool {
	l, err := s.layerInfo(key)
	if err != nil {
		return false
	}
	info, err := os.Stat(s.path("layers", key, layerFile))
	return err == nil && info.Size() == l.Length
}

// Arch is the GOARCH of the store's images.
func (s *Store) Arch() string { return s.cfg.Arch }

// MissingLayers returns which layers of img the store would have to read now.
func (s *Store) MissingLayers(img *oci.Image) (missing []int) {
	if s.intact(strings.TrimPrefix(img.ID, "sha256:")) {
		return nil
	}
	for n := range img.DiffIDs {
		alone, chain := layerKeys(img.DiffIDs, n)
		if !s.layerIntact(alone) && !s.layerIntact(chain) {
			missing = append(missing, n)
		}
	}
	return missing
}
