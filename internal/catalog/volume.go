package catalog

import (
	"context"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/volume"
)

type volumeImporter interface {
	Import(ctx context.Context, s volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error)
}

// Filler makes volumes from images.
type Filler struct {
	Puller imagePuller
	Images imageGetter
	Disks  image.DiskOpener
	Into   volumeImporter
}

// FromImage makes a volume with the disk of an image, which it pulls first. A size of 0 is that of the disk. The whole volume is stored, or
// nothing is. progress may be nil.
// Errors: those of image.Puller and volume.Carrier; InvalidArgument if the image has no disk, or a larger one.
func (f Filler) FromImage(ctx context.Context, spec volume.Spec, from image.PullRequest, progress func(image.Progress)) (out volume.Volume, err error) {
	if progress == nil {
		progress = func(image.Progress) {}
	}
	if spec.Size != 0 {
		if spec.Size, err = volume.RoundSize(spec.Size); err != nil {
			return out, err
		}
	}
	img, err := f.pull(ctx, from, progress)
	if err != nil {
		return out, err
	}
	d, err := f.Disks.OpenDisk(ctx, img)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if spec.Size != 0 && spec.Size < d.Size {
		return out, errdefs.Invalidf("the disk of image %s has %d bytes, more than the %d of the volume; ask for at least as many", img.Name, d.Size, spec.Size)
	}
	if spec.Size == 0 {
		if spec.Size, err = volume.RoundSize(max(d.Size, volume.MinSize)); err != nil {
			return out, err
		}
	}
	filling := func(done int64) { progress(image.Progress{Phase: image.PhaseFill, Done: done, Total: d.Size}) }
	filling(0)
	if out, err = f.Into.Import(ctx, spec, d.Holed, filling); err != nil {
		return out, fmt.Errorf("fill it from image %s: %w", img.Name, err)
	}
	return out, nil
}

// pull makes sure that the image is here. One that was imported by hand has no origin that could have something newer. Of one that needs
// credentials, and the request has none, that version is used which the owner in ctx has shown some for.
func (f Filler) pull(ctx context.Context, from image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	img, err := f.Puller.Pull(ctx, from, progress)
	switch {
	case from.Force:
	case errdefs.IsAlreadyExists(err):
		from.Policy = image.PullNever
		return f.Puller.Pull(ctx, from, progress)
	case errdefs.IsFailedPrecondition(err):
		if img, err := f.Images.Get(ctx, from.Name); err == nil {
			return img, nil
		}
	}
	return img, err
}
