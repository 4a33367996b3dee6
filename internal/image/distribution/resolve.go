package distribution

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxMetadata   = 8 << 20 // bytes of one index, manifest or configuration
	maxIndexDepth = 4
	maxManifests  = 1000
)

// resolve returns the manifest for the wanted platform and the digest of what the reference names.
func (p *pull) resolve(ctx context.Context) (*v1.Manifest, string, error) {
	raw, media, digest, err := p.remote.manifest(ctx, p.id)
	if err != nil {
		return nil, "", err
	}
	w := &walk{p: p}
	if err := w.document(ctx, raw, media, 0); err != nil {
		return nil, "", err
	}
	m, err := w.choose()
	return m, digest, err
}

// walk looks for images of one platform.
type walk struct {
	p     *pull
	fit   []candidate
	other []string // platforms that do not fit
	total int
}

type candidate struct {
	digest   string // "" for the document itself
	variant  string
	manifest *v1.Manifest
}

func (w *walk) document(ctx context.Context, raw []byte, media types.MediaType, depth int) error {
	var head struct {
		SchemaVersion int             `json:"schemaVersion"`
		MediaType     types.MediaType `json:"mediaType"`
		Manifests     json.RawMessage `json:"manifests"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return errdefs.Invalidf("the manifest of %s cannot be read: %w", w.p.name, err)
	}
	if head.MediaType != "" {
		media = head.MediaType
	}
	switch {
	case head.SchemaVersion == 1 || media.IsSchema1():
		return errdefs.Unsupportedf("the image %s has a manifest of the obsolete schema 1; push it again with a current tool", w.p.name)
	case media.IsIndex() || len(head.Manifests) > 0:
		return w.index(ctx, raw, depth)
	}
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return errdefs.Invalidf("the manifest of %s cannot be read: %w", w.p.name, err)
	}
	w.fit = append(w.fit, candidate{manifest: m})
	return nil
}

func (w *walk) index(ctx context.Context, raw []byte, depth int) error {
	if depth >= maxIndexDepth {
		return errdefs.Invalidf("the image index of %s is nested more than %d levels deep: refused", w.p.name, maxIndexDepth)
	}
	idx, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return errdefs.Invalidf("the image index of %s cannot be read: %w", w.p.name, err)
	}
	for _, d := range idx.Manifests {
		if w.total++; w.total > maxManifests {
			return errdefs.Invalidf("the image index of %s names more than %d images: refused", w.p.name, maxManifests)
		}
		switch {
		case d.Annotations["vnd.docker.reference.type"] != "": // an attestation about another manifest
		case d.MediaType.IsIndex():
			raw, media, _, err := w.p.remote.manifest(ctx, d.Digest.String())
			if err != nil {
				return err
			}
			if err := w.document(ctx, raw, media, depth+1); err != nil {
				return err
			}
		case !d.MediaType.IsImage() && d.MediaType != "":
		case d.Platform != nil && d.Platform.Architecture != "" && (d.Platform.OS != "linux" || d.Platform.Architecture != w.p.c.cfg.Arch):
			w.other = append(w.other, d.Platform.OS+"/"+d.Platform.Architecture)
		default:
			c := candidate{digest: d.Digest.String()}
			if d.Platform != nil {
				c.variant = d.Platform.Variant
			}
			w.fit = append(w.fit, c)
		}
	}
	if depth > 0 {
		return nil
	}
	return w.load(ctx)
}

// load fetches the manifest of the best candidate: the first one, but one without a variant before one with a variant.
func (w *walk) load(ctx context.Context) error {
	if len(w.fit) == 0 {
		return nil
	}
	i := max(0, slices.IndexFunc(w.fit, func(c candidate) bool { return c.variant == "" }))
	best := w.fit[i]
	if best.manifest == nil {
		raw, _, _, err := w.p.remote.manifest(ctx, best.digest)
		if err != nil {
			return err
		}
		if best.manifest, err = v1.ParseManifest(bytes.NewReader(raw)); err != nil {
			return errdefs.Invalidf("the manifest of %s cannot be read: %w", w.p.name, err)
		}
	}
	w.fit = []candidate{best}
	return nil
}

func (w *walk) choose() (*v1.Manifest, error) {
	if len(w.fit) > 0 {
		return w.fit[0].manifest, nil
	}
	if len(w.other) == 0 {
		return nil, errdefs.Invalidf("the image index of %s names no image", w.p.name)
	}
	slices.Sort(w.other)
	return nil, errdefs.Unsupportedf("there is no image %s for linux/%s, only for %s", w.p.name, w.p.c.cfg.Arch, strings.Join(slices.Compact(w.other), ", "))
}
