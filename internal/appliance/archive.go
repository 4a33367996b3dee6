package appliance

import (
	"archive/tar"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"path"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits of an archive's description.
const (
	maxDescription = 4 << 20 // bytes
	maxNames       = 64
)

// archiveNames returns the names of the image in an archive: those of `docker save` (manifest.json), or those of an OCI image layout
// (index.json, annotations of its image specification and of containerd).
// Errors: InvalidArgument if it is no such archive, has several images, or tells no name.
func archiveNames(r io.ReadSeeker) ([]string, error) {
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	var names []string
	images := 0
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, errdefs.New(errdefs.InvalidArgument, "what was sent is no tar archive of an image (send what `docker save` writes, without compression): %w", err)
		}
		name := path.Clean(h.Name)
		if name != "manifest.json" && name != "index.json" || h.Typeflag != tar.TypeReg {
			continue
		}
		text, err := io.ReadAll(io.LimitReader(t, maxDescription))
		if err != nil {
			return nil, errdefs.New(errdefs.InvalidArgument, "read %s of the archive: %w", name, err)
		}
		found, n := named(name, text)
		names = append(names, found...)
		images = max(images, n)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case images == 0:
		return nil, errdefs.Invalidf("the archive has no image: it has neither the manifest.json of `docker save` nor the index.json of an OCI image layout")
	case images > 1:
		return nil, errdefs.Invalidf("the archive has %d images; send one at a time", images)
	case len(names) == 0:
		return nil, errdefs.Invalidf("the archive tells no name of its image; save it by its name: docker save NAME:TAG")
	case len(names) > maxNames:
		return nil, errdefs.Invalidf("the archive has %d names; at most %d are possible", len(names), maxNames)
	}
	return names, nil
}

// named returns the names that a description tells, and of how many images it is.
func named(file string, text []byte) (names []string, images int) {
	if file == "manifest.json" {
		var all []struct{ RepoTags []string }
		_ = json.Unmarshal(text, &all) // none, if it is something else
		for _, m := range all {
			names = append(names, m.RepoTags...)
		}
		return names, len(all)
	}
	var index struct {
		Manifests []struct {
			Annotations map[string]string `json:"annotations"`
			Digest      string            `json:"digest"`
		} `json:"manifests"`
	}
	_ = json.Unmarshal(text, &index)
	digests := map[string]bool{}
	for _, m := range index.Manifests {
		digests[m.Digest] = true
		// The image specification allows a tag alone there, which is no name.
		if name := cmp.Or(m.Annotations["io.containerd.image.name"], m.Annotations["org.opencontainers.image.ref.name"]); name != "" {
			names = append(names, name)
		}
	}
	return names, len(digests)
}
