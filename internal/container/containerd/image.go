package containerd

import (
	"context"
	"encoding/json"
	"io"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// normal returns a reference as it is kept: with host, and tag or digest.
func normal(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", errdefs.Invalidf("image %q: %w", ref, err)
	}
	return named.String(), nil
}

// image returns an image that is there. Errors: InvalidArgument, NotFound.
func (r *Runtime) image(ctx context.Context, ref string) (client.Image, error) {
	name, err := normal(ref)
	if err != nil {
		return nil, err
	}
	i, err := r.client.GetImage(ctx, name)
	if err != nil {
		return nil, failed(err, "find image %s", name)
	}
	return i, nil
}

// maxConfig is the size of the largest configuration of an image that is read, in bytes.
const maxConfig = 4 << 20

// config returns the configuration of an image for this machine.
func config(ctx context.Context, i client.Image) (ocispec.ImageConfig, error) {
	var c ocispec.Image
	d, err := i.Config(ctx)
	if err != nil {
		return c.Config, failed(err, "read the configuration of image %s", i.Name())
	}
	if d.Size > maxConfig {
		return c.Config, errdefs.Invalidf("the configuration of image %s has %d bytes; at most %d are read", i.Name(), d.Size, maxConfig)
	}
	b, err := content.ReadBlob(ctx, i.ContentStore(), d)
	if err != nil {
		return c.Config, failed(err, "read the configuration of image %s", i.Name())
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c.Config, errdefs.Invalidf("read the configuration of image %s: %w", i.Name(), err)
	}
	return c.Config, nil
}

// unpack makes the file system of an image, unless it is there.
func unpack(ctx context.Context, i client.Image) error {
	ok, err := i.IsUnpacked(ctx, snapshotter)
	if err != nil {
		return refusedImage(err, i.Name())
	}
	if ok {
		return nil
	}
	if err := i.Unpack(ctx, snapshotter); err != nil {
		return refusedImage(err, i.Name())
	}
	return nil
}

// refusedImage is failed for what an image itself is the cause of, as far as containerd does not say otherwise.
func refusedImage(err error, name string) error {
	switch c := classOf(err); c {
	case errdefs.NotFound:
		return errdefs.Unsupportedf("unpack image %s: a part for %s is missing: %w", name, platforms.DefaultString(), err)
	case errdefs.Internal:
		return errdefs.Invalidf("unpack image %s: %w", name, err)
	default:
		return failed(err, "unpack image %s", name)
	}
}

// ImportImage implements container.Images. The stream may be compressed. Content that nothing names is collected by containerd.
func (r *Runtime) ImportImage(ctx context.Context, in io.Reader, name string) ([]container.Image, error) {
	opts := []client.ImportOpt{client.WithImageRefTranslator(translate)}
	if name != "" {
		n, err := normal(name)
		if err != nil {
			return nil, err
		}
		opts = append(opts, client.WithIndexName(n))
	}
	stream, err := decompress(in)
	if err != nil {
		return nil, errdefs.Invalidf("import an image: %w", err)
	}
	defer stream.Close()
	ctx, done, err := r.lease(ctx, "import")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := done(); err != nil {
			r.cfg.Log.Warn("lease of an import stays until it expires", "err", err)
		}
	}()
	got, err := r.client.Import(ctx, stream, opts...)
	if err != nil {
		if classOf(err) == errdefs.Internal || classOf(err) == errdefs.NotFound {
			return nil, errdefs.Invalidf("import an image: the archive cannot be read: %w", err)
		}
		return nil, failed(err, "import an image")
	}
	if len(got) == 0 {
		return nil, errdefs.Invalidf("import an image: the archive names none; give it a name")
	}
	var all []container.Image
	for _, one := range got {
		one, err := r.rename(ctx, one)
		if err != nil {
			return nil, err
		}
		i := client.NewImage(r.client, one)
		if err := unpack(ctx, i); err != nil {
			return nil, err
		}
		all = append(all, r.describe(ctx, i, nil))
	}
	return all, nil
}

// rename gives an image the name under which it is found. An archive may have a shorter one.
func (r *Runtime) rename(ctx context.Context, i images.Image) (images.Image, error) {
	name, err := normal(i.Name)
	if err != nil || name == i.Name {
		return i, err
	}
	short := i.Name
	i.Name = name
	store := r.client.ImageService()
	renamed, err := store.Update(ctx, i, "target")
	if classOf(err) == errdefs.NotFound {
		renamed, err = store.Create(ctx, i)
	}
	if err != nil {
		return i, failed(err, "import image %s", name)
	}
	return renamed, r.removeImage(ctx, short)
}

// translate returns the reference of an image that an archive has only a reference name of; "" if that is a mere tag.
func translate(name string) string {
	if !strings.ContainsAny(name, "/:") {
		return ""
	}
	n, err := normal(name)
	if err != nil {
		return ""
	}
	return n
}

// ListImages implements container.Images.
func (r *Runtime) ListImages(ctx context.Context) ([]container.Image, error) {
	all, err := r.client.ListImages(ctx)
	if err != nil {
		return nil, failed(err, "list images")
	}
	used, err := r.used(ctx)
	if err != nil {
		return nil, err
	}
	var list []container.Image
	for _, i := range all {
		list = append(list, r.describe(ctx, i, used))
	}
	slices.SortFunc(list, func(a, b container.Image) int { return strings.Compare(a.Ref, b.Ref) })
	return list, nil
}

// describe returns what is known of an image. An image whose parts are not all there has no size.
func (r *Runtime) describe(ctx context.Context, i client.Image, used map[string]bool) container.Image {
	m := i.Metadata()
	size, err := i.Size(ctx)
	if err != nil {
		r.cfg.Log.Warn("size of an image is not known", "image", i.Name(), "err", err)
	}
	return container.Image{Ref: m.Name, Digest: m.Target.Digest.String(), Size: size, CreatedAt: m.CreatedAt, Used: used[m.Name]}
}

// used returns the images of which containers were made, also those of other programs.
func (r *Runtime) used(ctx context.Context) (map[string]bool, error) {
	cs, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, failed(err, "list containers")
	}
	used := map[string]bool{}
	for _, c := range cs {
		used[c.Image] = true
	}
	return used, nil
}

// RemoveImage implements container.Images. A container keeps its layers anyway; its image is kept so that it can be made again.
func (r *Runtime) RemoveImage(ctx context.Context, ref string) error {
	name, err := normal(ref)
	if err != nil {
		return err
	}
	used, err := r.used(ctx)
	if err != nil {
		return err
	}
	if used[name] {
		return errdefs.Preconditionf("remove image %s: a container uses it; remove the container first", name)
	}
	return r.removeImage(ctx, name)
}

// removeImage removes an image, and returns when its files are gone.
func (r *Runtime) removeImage(ctx context.Context, name string) error {
	if err := r.client.ImageService().Delete(ctx, name, images.SynchronousDelete()); err != nil && classOf(err) != errdefs.NotFound {
		return failed(err, "remove image %s", name)
	}
	return nil
}

// PruneImages implements container.Images.
func (r *Runtime) PruneImages(ctx context.Context, keep func(container.Image) bool) ([]container.Image, error) {
	all, err := r.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	var gone []container.Image
	for _, i := range all {
		if i.Used || keep(i) {
			continue
		}
		if err := r.removeImage(ctx, i.Ref); err != nil {
			return gone, err
		}
		gone = append(gone, i)
	}
	return gone, nil
}
