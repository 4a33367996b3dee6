package catalog

import (
	"context"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Named is a store of images in which a name means what it means in a pull. Everything except the puller uses it.
type Named struct {
	image.Store
	Names imageGetter
}

// Get resolves a name as a pull does, or an id.
func (n Named) Get(ctx context.Context, ref string) (image.Image, error) {
	return n.Names.Get(ctx, ref)
}

// OpenFile implements image.FileOpener.
func (n Named) OpenFile(ctx context.Context, img image.Image, path string) (*image.File, error) {
	files, ok := n.Store.(image.FileOpener)
	if !ok {
		return nil, errdefs.Unsupportedf("this node cannot read the files of image %s", img.Name)
	}
	return files.OpenFile(ctx, img, path)
}

// Images is what clients do with the images of a node. The store belongs to the operator: others may name and pull images,
// but not list, copy, replace or remove them.
type Images struct {
	image.Puller
	Store  image.Store
	Pusher image.Pusher // nil: images are not pushed
	InUse  func(digest string) bool
}

// Get resolves a name or an id.
func (i Images) Get(ctx context.Context, ref string) (image.Image, error) {
	return i.Store.Get(ctx, ref)
}

// List returns every image, sorted by name.
func (i Images) List(ctx context.Context) ([]image.Image, error) {
	if err := operatorOnly(ctx, "list images"); err != nil {
		return nil, err
	}
	return i.Store.List(ctx)
}

// Import stores an image under a name.
func (i Images) Import(ctx context.Context, name string, r io.Reader, progress func(bytes int64)) (image.Image, error) {
	if err := operatorOnly(ctx, "import images"); err != nil {
		return image.Image{}, err
	}
	return i.Store.Import(ctx, name, r, progress)
}

// Export writes an image in a form that Import reads.
func (i Images) Export(ctx context.Context, ref string, w io.Writer) error {
	if err := operatorOnly(ctx, "export images"); err != nil {
		return err
	}
	return i.Store.Export(ctx, ref, w)
}

// Remove removes a name or id, and the content that no name and no VM needs any more.
func (i Images) Remove(ctx context.Context, ref string) error {
	if err := operatorOnly(ctx, "remove images"); err != nil {
		return err
	}
	return i.Store.Remove(ctx, ref, i.InUse)
}

// Push sends an image to a registry, and returns it with the digest that it has there.
func (i Images) Push(ctx context.Context, r image.PushRequest, progress func(image.Progress)) (image.Image, error) {
	if err := operatorOnly(ctx, "push images"); err != nil {
		return image.Image{}, err
	}
	if i.Pusher == nil {
		return image.Image{}, errdefs.Unsupportedf("this cocoond does not push images")
	}
	img, err := i.Store.Get(ctx, r.Ref)
	if err != nil {
		return image.Image{}, err
	}
	img.Digest, err = i.Pusher.Push(ctx, r, progress)
	return img, err
}

// SyncMappings replaces the mappings of one source; see image.Puller.
func (i Images) SyncMappings(ctx context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error) {
	if err := operatorOnly(ctx, "change image mappings"); err != nil {
		return nil, err
	}
	return i.Puller.SyncMappings(ctx, source, mappings)
}

// Collect removes what limits allow and no VM uses.
func (i Images) Collect(ctx context.Context, limits image.GCLimits) (image.Collected, error) {
	if err := operatorOnly(ctx, "collect images"); err != nil {
		return image.Collected{}, err
	}
	return i.Store.Collect(ctx, limits, i.InUse)
}

// CollectPulled is a Collect that keeps images without an origin, because they cannot be pulled again.
func (i Images) CollectPulled(ctx context.Context, limits image.GCLimits) (image.Collected, error) {
	all, err := i.Store.List(ctx)
	if err != nil {
		return image.Collected{}, err
	}
	imported := map[string]bool{}
	for _, img := range all {
		if img.Source == "" && img.Digest == "" {
			imported[img.ID] = true
		}
	}
	return i.Store.Collect(ctx, limits, func(id string) bool { return imported[id] || i.InUse(id) })
}
