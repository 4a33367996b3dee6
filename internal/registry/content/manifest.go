package content

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

// MaxManifest is the largest accepted manifest in bytes: one of a snapshot with very many chunks.
const MaxManifest = 64 << 20

const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"

	parallel = 16 // requests to the store at a time, for one manifest
)

// Document is the part of a manifest or an index that the registry reads.
type Document struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType"`
	Config        *v1.Descriptor    `json:"config"`
	Layers        []v1.Descriptor   `json:"layers"`
	Manifests     []v1.Descriptor   `json:"manifests"`
	Subject       *v1.Descriptor    `json:"subject"`
	Annotations   map[string]string `json:"annotations"`
}

// Type returns the artifact type by which referrers are filtered.
func (d *Document) Type() string {
	if d.ArtifactType == "" && d.Config != nil {
		return d.Config.MediaType
	}
	return d.ArtifactType
}

// blobs returns the descriptors of the blobs that the repository must have.
func (d *Document) blobs() []v1.Descriptor {
	var out []v1.Descriptor
	if d.Config != nil {
		out = append(out, *d.Config)
	}
	return append(out, d.Layers...)
}

// ParseManifest reads a manifest or index. mediaType is from the client; with "", the document's own is used.
func ParseManifest(mediaType string, body []byte) (*Document, error) {
	bad := func(format string, args ...any) (*Document, error) {
		return nil, code(ManifestInvalid, errdefs.Invalidf(format, args...))
	}
	mediaType, _, _ = strings.Cut(mediaType, ";")
	mediaType = strings.TrimSpace(mediaType)
	d := &Document{}
	if err := json.Unmarshal(body, d); err != nil {
		return bad("the manifest is not JSON of the right form: %w", err)
	}
	switch {
	case d.MediaType != "" && mediaType != "" && d.MediaType != mediaType:
		return bad("the manifest says it is %q, the request %q", d.MediaType, mediaType)
	case d.MediaType == "" && mediaType != "":
		if mediaType == dockerManifest || mediaType == dockerList {
			return bad("a docker manifest must have a mediaType")
		}
		d.MediaType = mediaType
	case d.MediaType == "" && d.Manifests != nil:
		d.MediaType = v1.MediaTypeImageIndex
	case d.MediaType == "":
		d.MediaType = v1.MediaTypeImageManifest
	}
	switch d.MediaType {
	case v1.MediaTypeImageManifest, dockerManifest:
		if d.Config == nil || d.Manifests != nil {
			return bad("an image manifest must have a config and no list of manifests")
		}
	case v1.MediaTypeImageIndex, dockerList:
		if d.Config != nil || d.Layers != nil || d.Manifests == nil {
			return bad("an index must have a list of manifests, and neither config nor layers")
		}
	default:
		return bad("unsupported manifest type %q", d.MediaType)
	}
	if d.SchemaVersion != 2 {
		return bad("schemaVersion is %d, not 2", d.SchemaVersion)
	}
	all := append(d.blobs(), d.Manifests...)
	if d.Subject != nil {
		all = append(all, *d.Subject)
	}
	for _, desc := range all {
		if _, err := reference.Digest(desc.Digest.String()); err != nil {
			return bad("%w", err)
		}
		if desc.Size < 0 {
			return bad("the size of %s is negative", desc.Digest)
		}
	}
	return d, nil
}

// PutManifest stores a manifest under a reference. The repository must have everything that the manifest names.
func (c *Content) PutManifest(ctx context.Context, repo string, ref reference.Reference, mediaType string, body []byte) (digest.Digest, *Document, error) {
	doc, err := ParseManifest(mediaType, body)
	if err != nil {
		return "", nil, err
	}
	d := digest.FromBytes(body)
	if ref.Digest != "" {
		if d = ref.Digest.Algorithm().FromBytes(body); d != ref.Digest {
			return "", nil, code(DigestInvalid, errdefs.Invalidf("the manifest has the digest %s, not %s", d, ref.Digest))
		}
	}
	pins := []digest.Digest{d}
	for _, b := range append(doc.blobs(), doc.Manifests...) {
		pins = append(pins, b.Digest)
	}
	defer c.leases.pin(pins...)()
	if err := c.complete(ctx, repo, doc); err != nil {
		return "", nil, err
	}
	if err := c.settle(ctx, pins); err != nil {
		return "", nil, err
	}
	if err := c.store.Sync(ctx); err != nil { // the names of its blobs
		return "", nil, err
	}
	defer c.repo(repo)()
	if err := c.children(ctx, repo, doc); err != nil {
		return "", nil, err
	}
	if doc.Subject != nil {
		if err := c.refer(ctx, repo, d, int64(len(body)), doc); err != nil {
			return "", nil, err
		}
	}
	if err := c.store.Write(ctx, manifestKey(repo, d), body); err != nil {
		return "", nil, err
	}
	if ref.Tag != "" {
		if err := c.store.Write(ctx, tagKey(repo, ref.Tag), []byte(d)); err != nil {
			return "", nil, err
		}
	}
	return d, doc, c.store.Sync(ctx) // new folders
}

// complete checks that the repository has the blobs of the manifest.
func (c *Content) complete(ctx context.Context, repo string, doc *Document) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, b := range doc.blobs() {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			info, err := c.blob(ctx, repo, b.Digest)
			switch {
			case errdefs.IsNotFound(err) && len(b.URLs) > 0:
				return nil // a foreign layer
			case errdefs.IsNotFound(err):
				return code(ManifestBlobUnknown, errdefs.NotFoundf("the manifest names the blob %s, which repository %s does not have: push it first", b.Digest, repo))
			case err != nil:
				return err
			case info.Size != b.Size:
				return code(ManifestInvalid, errdefs.Invalidf("the manifest says that blob %s has %d bytes; it has %d", b.Digest, b.Size, info.Size))
			}
			return nil
		})
	}
	return group.Wait()
}

// children checks that the repository has the manifests of an index.
func (c *Content) children(ctx context.Context, repo string, doc *Document) error {
	for _, m := range doc.Manifests {
		_, err := c.store.Stat(ctx, manifestKey(repo, m.Digest))
		if errdefs.IsNotFound(err) {
			err = code(ManifestBlobUnknown, errdefs.NotFoundf("the index names the manifest %s, which repository %s does not have: push it first", m.Digest, repo))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Resolve returns the digest of a reference.
func (c *Content) Resolve(ctx context.Context, repo string, ref reference.Reference) (digest.Digest, error) {
	if ref.Digest != "" {
		return ref.Digest, nil
	}
	text, _, err := objects.Read(ctx, c.store, tagKey(repo, ref.Tag), 256)
	if errdefs.IsNotFound(err) {
		return "", code(ManifestUnknown, errdefs.NotFoundf("repository %s has no tag %s", repo, ref.Tag))
	}
	if err != nil {
		return "", err
	}
	d, err := reference.Digest(string(text))
	if err != nil {
		return "", errdefs.DataLossf("tag %s of repository %s is damaged: %w", ref.Tag, repo, err)
	}
	return d, nil
}

// Manifest returns a manifest. It verifies the bytes.
func (c *Content) Manifest(ctx context.Context, repo string, ref reference.Reference) (digest.Digest, []byte, *Document, error) {
	d, err := c.Resolve(ctx, repo, ref)
	if err != nil {
		return "", nil, nil, err
	}
	body, _, err := objects.Read(ctx, c.store, manifestKey(repo, d), MaxManifest)
	if errdefs.IsNotFound(err) {
		return "", nil, nil, code(ManifestUnknown, errdefs.NotFoundf("repository %s has no manifest %s", repo, ref))
	}
	if err != nil {
		return "", nil, nil, err
	}
	if d.Algorithm().FromBytes(body) != d {
		return "", nil, nil, c.corrupted(ctx, manifestKey(repo, d), d)
	}
	doc, err := ParseManifest("", body)
	if err != nil {
		return "", nil, nil, errdefs.DataLossf("stored manifest %s: %w", d, err)
	}
	return d, body, doc, nil
}

// RemoveManifest removes a tag, or a manifest and all its tags.
func (c *Content) RemoveManifest(ctx context.Context, repo string, ref reference.Reference) error {
	defer c.repo(repo)()
	d, err := c.Resolve(ctx, repo, ref)
	if err != nil {
		return err
	}
	if ref.Tag != "" {
		if err := c.store.Remove(ctx, tagKey(repo, ref.Tag)); err != nil {
			return err
		}
		return c.store.Sync(ctx)
	}
	return c.removeManifest(ctx, repo, d)
}

// removeManifest removes a manifest, and before it everything that refers to it. The caller holds the repository's
// lock.
func (c *Content) removeManifest(ctx context.Context, repo string, d digest.Digest) error {
	key := manifestKey(repo, d)
	body, _, err := objects.Read(ctx, c.store, key, MaxManifest)
	if errdefs.IsNotFound(err) {
		return code(ManifestUnknown, errdefs.NotFoundf("repository %s has no manifest %s", repo, d))
	}
	if err != nil {
		return err
	}
	tags, err := c.tagged(ctx, repo)
	if err != nil {
		return err
	}
	for tag, to := range tags {
		if to == d {
			if err := c.store.Remove(ctx, tagKey(repo, tag)); err != nil {
				return err
			}
		}
	}
	if err := c.store.Remove(ctx, key); err != nil {
		return err
	}
	if doc, err := ParseManifest("", body); err == nil && doc.Subject != nil {
		if err := c.store.Remove(ctx, referrersKey(repo, doc.Subject.Digest)+"/"+flat(d)); err != nil {
			return err
		}
	}
	return c.store.Sync(ctx)
}

// tagged returns the digests of the tags of a repository; "" for a damaged tag.
func (c *Content) tagged(ctx context.Context, repo string) (map[string]digest.Digest, error) {
	tags, err := c.tags(ctx, repo)
	if err != nil {
		return nil, err
	}
	out := make(map[string]digest.Digest, len(tags))
	for _, tag := range tags {
		d, err := c.Resolve(ctx, repo, reference.Reference{Tag: tag})
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.Is(err, errdefs.DataLoss) {
			return nil, err
		}
		out[tag] = d
	}
	return out, nil
}

func (c *Content) tags(ctx context.Context, repo string) ([]string, error) {
	all, err := c.store.List(ctx, repoKey(repo)+"/_tags")
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(all))
	for _, e := range all {
		out = append(out, e.Name)
	}
	slices.Sort(out)
	return out, nil
}

// Tags lists the tags of a repository in lexical order; NotFound if the repository is empty.
func (c *Content) Tags(ctx context.Context, repo string) ([]string, error) {
	tags, err := c.tags(ctx, repo)
	if err != nil || len(tags) > 0 {
		return tags, err
	}
	has, err := c.hasManifest(ctx, repo)
	if err == nil && !has {
		err = code(NameUnknown, errdefs.NotFoundf("no repository %s", repo))
	}
	return tags, err
}

var errFound = errors.New("found")

func (c *Content) hasManifest(ctx context.Context, repo string) (bool, error) {
	err := c.eachManifest(ctx, repo, func(digest.Digest, objects.Info) error { return errFound })
	if errors.Is(err, errFound) {
		return true, nil
	}
	return false, err
}

// Repositories lists the repositories with manifests in lexical order.
func (c *Content) Repositories(ctx context.Context) ([]string, error) {
	out := []string{}
	err := c.eachRepository(ctx, func(repo string) error {
		has, err := c.hasManifest(ctx, repo)
		if has {
			out = append(out, repo)
		}
		return err
	})
	slices.Sort(out)
	return out, err
}

// refer writes the descriptor that lists the manifest among the subject's referrers. It is written before the manifest
// and has no effect without it.
func (c *Content) refer(ctx context.Context, repo string, d digest.Digest, size int64, doc *Document) error {
	data, err := json.Marshal(v1.Descriptor{MediaType: doc.MediaType, Digest: d, Size: size, ArtifactType: doc.Type(), Annotations: doc.Annotations})
	if err != nil {
		return err
	}
	return c.store.Write(ctx, referrersKey(repo, doc.Subject.Digest)+"/"+flat(d), data)
}

// Referrers lists the manifests with the given subject, of one artifact type or, with "", of all types.
func (c *Content) Referrers(ctx context.Context, repo string, subject digest.Digest, artifactType string) ([]v1.Descriptor, error) {
	all, err := c.store.List(ctx, referrersKey(repo, subject))
	if err != nil {
		return nil, err
	}
	out := []v1.Descriptor{}
	for _, e := range all {
		data, _, err := objects.Read(ctx, c.store, referrersKey(repo, subject)+"/"+e.Name, MaxManifest)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var desc v1.Descriptor
		if err := json.Unmarshal(data, &desc); err != nil || desc.Digest.Validate() != nil {
			c.cfg.Log.Warn("damaged entry of referrers ignored", "op", "referrers", "err", err)
			continue
		}
		if artifactType != "" && desc.ArtifactType != artifactType {
			continue
		}
		if _, err := c.store.Stat(ctx, manifestKey(repo, desc.Digest)); errdefs.IsNotFound(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		out = append(out, desc)
	}
	slices.SortFunc(out, func(a, b v1.Descriptor) int { return cmp.Compare(a.Digest, b.Digest) })
	return out, nil
}
