package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/vm"
)

// Parts splits an image into its parts.
// Errors: NotFound, Unsupported (layers that were merged), DataLoss.
func (s *Store) Parts(ctx context.Context, ref string) (*image.Parts, error) {
	img, err := s.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	if img.Type == vm.ImageDisk {
		return s.diskPart(img)
	}
	return s.layerParts(img)
}

// open opens a disk's file. It stays readable if the image is removed meanwhile.
func (s *Store) open(img image.Image) (*os.File, vm.DiskFormat, error) {
	rec, err := s.use(img.ID)
	if err != nil {
		return nil, "", err
	}
	hex, _ := hexOf(rec.ID)
	f, err := os.Open(s.path("data", hex, rec.File))
	if err != nil {
		return nil, "", fmt.Errorf("read image %s: %w", orID(img), err)
	}
	return f, rec.Format, nil
}

// OpenDisk implements image.DiskOpener. The disk stays readable if the image is removed meanwhile.
func (s *Store) OpenDisk(ctx context.Context, img image.Image) (*image.Disk, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	if img.Type != vm.ImageDisk {
		return nil, errdefs.Invalidf("image %s is a container image and has no disk; use a disk image, or a container image that has one disk below /disk and nothing else", orID(img))
	}
	f, format, err := s.open(img)
	if err != nil {
		return nil, err
	}
	r, size, err := disk.Content(format, f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read image %s: %w", orID(img), err), f.Close())
	}
	return &image.Disk{Holed: r, Closer: f, Size: size}, nil
}

// OpenFile implements image.FileOpener.
func (s *Store) OpenFile(ctx context.Context, img image.Image, path string) (_ *image.File, err error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	if img.Type != vm.ImageOCI {
		return nil, errdefs.Invalidf("image %s is a disk image, whose files only a guest reads; use a container image", orID(img))
	}
	rec, err := s.use(img.ID)
	if err != nil {
		return nil, err
	}
	var opened files
	defer func() {
		if err != nil {
			err = fmt.Errorf("read image %s: %w", orID(img), errors.Join(err, opened.Close()))
		}
	}()
	var layers []*ext4.FS
	for _, d := range s.layerDisks(rec) {
		f, err := os.Open(d.Path)
		if err != nil {
			return nil, fmt.Errorf("open a layer: %w", err)
		}
		opened = append(opened, f)
		layer, err := ext4.Open(f)
		if err != nil {
			return nil, err
		}
		layers = append(layers, layer)
	}
	stack, err := oci.NewStack(layers)
	if err != nil {
		return nil, err
	}
	e, err := stack.File(path)
	if err != nil {
		return nil, err
	}
	r := e.Open()
	return &image.File{Reader: r, Closer: opened, Size: r.Size()}, nil
}

// files are closed together.
type files []*os.File

func (all files) Close() (err error) {
	for _, f := range all {
		err = errors.Join(err, f.Close())
	}
	return err
}

func (s *Store) diskPart(img image.Image) (*image.Parts, error) {
	f, format, err := s.open(img)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &image.Parts{Closer: f, Image: img, Disk: f, Format: format, Size: info.Size()}, nil
}

func (s *Store) layerParts(img image.Image) (_ *image.Parts, err error) {
	work, err := s.newWork()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, work.Close())
		}
	}()
	rec, err := s.use(img.ID)
	if err != nil {
		return nil, err
	}
	if err := s.pin(work, rec.Layers...); err != nil { // they stay if the image is removed meanwhile
		return nil, err
	}
	p := &image.Parts{Closer: work, Image: img}
	hex, _ := hexOf(rec.ID)
	if p.Config, err = os.ReadFile(s.path("data", hex, configFile)); err != nil {
		return nil, fmt.Errorf("read image %s: %w", orID(img), err)
	}
	for _, key := range rec.Layers {
		info, err := s.layerInfo(key)
		if err != nil {
			return nil, err
		}
		if info.DiffID == "" {
			return nil, errdefs.Unsupportedf("image %s has more than %d layers, and its lowest layers were merged, so it cannot be exported or pushed unchanged; get it from its registry or with `docker save`", orID(img), maxLayers)
		}
		p.Layers = append(p.Layers, image.Part{Digest: info.DiffID, Size: info.TarSize, Write: func(ctx context.Context, w io.Writer) error {
			return s.restoreLayer(ctx, key, info, w)
		}})
	}
	return p, nil
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
