package oci

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxIndexDepth = 4
	maxManifests  = 1000
)

// walk collects the manifests of a layout that run on one architecture.
type walk struct {
	a     *Archive
	arch  string
	seen  map[string]bool
	fit   []candidate
	other []string // platforms that do not fit, for the error
	total int
}

type candidate struct {
	manifest *v1.Manifest
	names    []string // its names in the layout
	variant  string
}

// Annotations with which tools name the images of a layout: OCI's (usually a tag) and containerd's (the full name).
var nameAnnotations = []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"}

func (w *walk) index(b blob, inherited string, depth int) error {
	if depth > maxIndexDepth {
		return errdefs.Invalidf("the image index is nested more than %d levels deep: refused", maxIndexDepth)
	}
	r, err := w.a.metadata(b, "the image index")
	if err != nil {
		return err
	}
	idx, err := v1.ParseIndexManifest(r)
	if err != nil {
		return errdefs.Invalidf("the image index cannot be read: %w", err)
	}
	for _, d := range idx.Manifests {
		if w.total++; w.total > maxManifests {
			return errdefs.Invalidf("the image index names more than %d images: refused", maxManifests)
		}
		name := inherited
		for _, k := range nameAnnotations {
			name += "\n" + d.Annotations[k]
		}
		if err := w.descriptor(d, name, depth); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) descriptor(d v1.Descriptor, name string, depth int) error {
	key := d.Digest.String() + name
	if w.seen[key] || d.Annotations["vnd.docker.reference.type"] != "" {
		return nil // listed twice, or an attestation about another manifest
	}
	w.seen[key] = true
	if p := d.Platform; p != nil && p.Architecture != "" && !d.MediaType.IsIndex() && !runs(p.OS, p.Architecture, w.arch) {
		w.other = append(w.other, p.OS+"/"+p.Architecture)
		return nil
	}
	switch {
	case d.MediaType.IsIndex():
		b, err := w.a.byDigest(d, "index")
		if err != nil {
			return err
		}
		return w.index(b, name, depth+1)
	case d.MediaType.IsImage() || d.MediaType == "":
		return w.manifest(d, name)
	}
	return nil // other kinds of entries that later tools may add
}

func (w *walk) manifest(d v1.Descriptor, name string) error {
	b, err := w.a.byDigest(d, "manifest")
	if err != nil {
		return err
	}
	r, err := w.a.metadata(b, "the image manifest")
	if err != nil {
		return err
	}
	m, err := v1.ParseManifest(r)
	if err != nil {
		return errdefs.Invalidf("the image manifest cannot be read: %w", err)
	}
	cfg, err := w.a.byDigest(m.Config, "configuration")
	if err != nil {
		return err
	}
	c, err := w.a.config(cfg)
	if err != nil {
		return err
	}
	if !runs(c.OS, c.Architecture, w.arch) {
		w.other = append(w.other, c.OS+"/"+c.Architecture)
		return nil
	}
	w.fit = append(w.fit, candidate{manifest: m, names: strings.Fields(name), variant: c.Variant})
	return nil
}

// choose returns the one manifest to use: the only one, the one called name, or the one for the architecture without a variant.
func (w *walk) choose(name string) (*v1.Manifest, error) {
	if len(w.fit) == 0 {
		if len(w.other) == 0 {
			return nil, errdefs.Invalidf("the image index names no image")
		}
		slices.Sort(w.other)
		return nil, errdefs.Unsupportedf("the archive holds no image for linux/%s, only for %s",
			w.arch, strings.Join(slices.Compact(w.other), ", "))
	}
	narrow := func(keep func(candidate) bool) {
		if same(w.fit) {
			return
		}
		var kept []candidate
		for _, c := range w.fit {
			if keep(c) {
				kept = append(kept, c)
			}
		}
		if len(kept) > 0 {
			w.fit = kept
		}
	}
	_, tag, _ := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":")
	narrow(func(c candidate) bool { return slices.ContainsFunc(c.names, sameName(name)) })
	narrow(func(c candidate) bool { return slices.Contains(c.names, tag) })
	narrow(func(c candidate) bool { return c.variant == "" })
	if !same(w.fit) {
		return nil, errdefs.Invalidf("the archive holds %d images for linux/%s and none of them is called %s; save one image per archive", len(w.fit), w.arch, name)
	}
	return w.fit[0].manifest, nil
}

// same reports whether all candidates are the same image.
func same(c []candidate) bool {
	return !slices.ContainsFunc(c, func(x candidate) bool { return x.manifest.Config.Digest != c[0].manifest.Config.Digest })
}

// isSystem reports whether err comes from the operating system, not from the content.
func isSystem(err error) bool {
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return true
	}
	_, ok := errors.AsType[syscall.Errno](err)
	return ok
}
