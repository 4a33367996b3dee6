package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/vm"
)

// Parts is an image split into the parts that a registry stores. It stays complete until Close, even if the image is removed.
type Parts struct {
	Image  image.Image
	Config []byte        // of a container image: unchanged, so that the id stays the same
	Layers []Part        // of a container image: the lowest first
	Disk   *os.File      // of a disk image: its file
	Format vm.DiskFormat // of Disk
	Size   int64         // of Disk, bytes

	work *workdir
}

// Part is one layer of a container image, uncompressed.
type Part struct {
	Digest string // sha256:<hex>
	Size   int64
	Write  func(ctx context.Context, w io.Writer) error // writes the bytes, verified; may be called repeatedly
}

// Parts splits an image into its parts.
// Errors: NotFound, Unsupported (layers that were merged), DataLoss.
func (s *Store) Parts(ctx context.Context, ref string) (_ *Parts, err error) {
	img, err := s.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	p := &Parts{Image: img}
	if img.Type == vm.ImageDisk {
		if p.Disk, err = s.openDisk(img.ID); err != nil {
			return nil, err
		}
		rec, err := s.use(img.ID)
		if err == nil {
			var info os.FileInfo
			if info, err = p.Disk.Stat(); err == nil {
				p.Format, p.Size = rec.Format, info.Size()
			}
		}
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		return p, nil
	}
	if p.work, err = s.newWork(); err != nil {
		return nil, err
	}
	if err := s.layerParts(p); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (s *Store) layerParts(p *Parts) error {
	rec, err := s.use(p.Image.ID)
	if err != nil {
		return err
	}
	if err := s.pin(p.work, rec.Layers...); err != nil {
		return err
	}
	hex, _ := hexOf(rec.ID)
	if p.Config, err = os.ReadFile(s.path("data", hex, configFile)); err != nil {
		return fmt.Errorf("read image %s: %w", orID(p.Image), err)
	}
	for _, key := range rec.Layers {
		info, err := s.layerInfo(key)
		if err != nil {
			return err
		}
		if info.DiffID == "" {
			return errdefs.Unsupportedf("image %s has more than %d layers, and its lowest layers were merged, so it cannot be pushed unchanged; copy it from its registry", orID(p.Image), maxLayers)
		}
		p.Layers = append(p.Layers, Part{Digest: info.DiffID, Size: info.TarSize, Write: func(ctx context.Context, w io.Writer) error {
			return s.restoreLayer(ctx, key, info, w)
		}})
	}
	return nil
}

// restoreLayer writes the original tar of a layer.
func (s *Store) restoreLayer(ctx context.Context, key string, info layerInfo, w io.Writer) error {
	f, err := os.Open(s.path("layers", key, layerFile))
	if err != nil {
		return fmt.Errorf("read layer: %w", err)
	}
	defer f.Close()
	recipe, err := os.Open(s.path("layers", key, recipeFile))
	if err != nil {
		return fmt.Errorf("read layer: %w", err)
	}
	defer recipe.Close()
	return oci.Restore(ctx, w, f, recipe, info.DiffID)
}

// Close releases the image.
func (p *Parts) Close() error {
	var err error
	if p.Disk != nil {
		err = p.Disk.Close()
	}
	if p.work != nil {
		err = errors.Join(err, p.work.close())
	}
	return err
}
