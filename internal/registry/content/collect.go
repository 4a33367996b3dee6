package content

import (
	"context"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/reference"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// Collected is the result of a garbage collection.
type Collected struct {
	Manifests int   `json:"manifests"` // snapshots without a tag
	Links     int   `json:"links"`     // blobs that a repository no longer has
	Blobs     int   `json:"blobs"`
	Bytes     int64 `json:"bytes"`
	Uploads   int   `json:"uploads"`
}

// Collect removes unreferenced content: old untagged snapshots, then blobs of repositories that no manifest there
// names, then the bytes of blobs that no repository has. It can run concurrently with pushes: content that was pushed
// or requested within the grace period stays, whether a manifest names it yet or not.
//
// Which clients were told that a blob exists is only kept in memory. So after a restart nothing is collected during the
// first grace period, unless offline states that there are no clients.
func (c *Content) Collect(ctx context.Context, offline bool) (Collected, error) {
	c.working.Lock()
	defer c.working.Unlock()
	var done Collected
	now := c.cfg.Now()
	cutoff := now.Add(-c.cfg.Grace)
	done.Uploads = c.SweepUploads()
	if !offline && c.started.After(cutoff) && c.cfg.Grace > 0 {
		return done, nil
	}
	kept := map[digest.Digest]struct{}{}
	err := c.eachRepository(ctx, func(repo string) error {
		if c.cfg.Untagged > 0 {
			n, err := c.collectUntagged(ctx, repo, now.Add(-c.cfg.Untagged))
			done.Manifests += n
			if err != nil {
				return err
			}
		}
		n, err := c.collectLinks(ctx, repo, cutoff, kept)
		done.Links += n
		return err
	})
	if err != nil {
		return done, fmt.Errorf("collect garbage: %w", err)
	}
	err = c.eachBlob(ctx, func(d digest.Digest, info objects.Info) error {
		if _, ok := kept[d]; ok || info.Modified.After(cutoff) {
			return nil
		}
		_, err := c.leases.remove(d, cutoff, func() error {
			size, removed, err := c.removeBlob(ctx, d)
			if removed {
				done.Blobs++
				done.Bytes += size
			}
			return err
		})
		return err
	})
	c.leases.forget(cutoff)
	if err != nil {
		return done, fmt.Errorf("collect garbage: %w", err)
	}
	return done, c.store.Sync(ctx)
}

// collectLinks removes from a repository the blobs that its manifests do not name, and adds the remaining ones to kept.
func (c *Content) collectLinks(ctx context.Context, repo string, cutoff time.Time, kept map[digest.Digest]struct{}) (int, error) {
	named := map[digest.Digest]struct{}{}
	whole := true
	err := c.eachManifest(ctx, repo, func(d digest.Digest, _ objects.Info) error {
		_, _, doc, err := c.Manifest(ctx, repo, reference.Reference{Digest: d})
		switch {
		case errdefs.IsNotFound(err): // removed concurrently
			return nil
		case errdefs.Is(err, errdefs.DataLoss): // it is unknown what it names
			c.cfg.Log.Warn("a damaged manifest: all blobs of its repository stay", "op", "gc", "repository", repo, "err", err)
			whole = false
			return nil
		case err != nil:
			return err
		}
		for _, b := range doc.blobs() {
			named[b.Digest] = struct{}{}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if lost, err := c.dangling(ctx, repo); err != nil {
		return 0, err
	} else if lost != "" { // in quarantine since damage was found
		c.cfg.Log.Warn("a tag leads to no manifest: all blobs of its repository stay until it is pushed again or deleted", "op", "gc", "repository", repo, "tag", lost)
		whole = false
	}
	removed := 0
	err = c.eachLink(ctx, repo, func(d digest.Digest, info objects.Info) error {
		if _, ok := named[d]; !ok && whole && !info.Modified.After(cutoff) {
			gone, err := c.leases.remove(d, cutoff, func() error { return c.store.Remove(ctx, linkKey(repo, d)) })
			if err != nil {
				return err
			}
			if gone {
				removed++
				return nil
			}
		}
		kept[d] = struct{}{}
		return nil
	})
	return removed, err
}

// dangling returns a tag of a repository whose manifest is missing, "" if there is none.
func (c *Content) dangling(ctx context.Context, repo string) (string, error) {
	tags, err := c.tagged(ctx, repo)
	if err != nil {
		return "", err
	}
	for tag, d := range tags {
		if d == "" {
			continue // the tag itself is damaged
		}
		if _, err := c.store.Stat(ctx, manifestKey(repo, d)); errdefs.IsNotFound(err) {
			return tag, nil
		} else if err != nil {
			return "", err
		}
	}
	return "", nil
}

// collectUntagged removes a repository's manifests of snapshots that have no tag any more: a VM that hibernates every
// night leaves these behind. Other manifests stay: clients may know their digests.
func (c *Content) collectUntagged(ctx context.Context, repo string, cutoff time.Time) (int, error) {
	var old []digest.Digest
	err := c.eachManifest(ctx, repo, func(d digest.Digest, info objects.Info) error {
		if !info.Modified.After(cutoff) {
			old = append(old, d)
		}
		return nil
	})
	if err != nil || len(old) == 0 {
		return 0, err
	}
	removed := 0
	for _, d := range old {
		gone, err := c.removeUntagged(ctx, repo, d, cutoff)
		if err != nil {
			return removed, err
		}
		if gone {
			removed++
		}
	}
	return removed, nil
}

func (c *Content) removeUntagged(ctx context.Context, repo string, d digest.Digest, cutoff time.Time) (bool, error) {
	defer c.repo(repo)()
	_, _, doc, err := c.Manifest(ctx, repo, reference.Reference{Digest: d})
	if errdefs.IsNotFound(err) || errdefs.Is(err, errdefs.DataLoss) {
		return false, nil
	}
	if err != nil || !artifact.IsSnapshot(doc.ArtifactType) {
		return false, err
	}
	tags, err := c.tagged(ctx, repo)
	if err != nil {
		return false, err
	}
	for _, to := range tags {
		if to == d {
			return false, nil
		}
	}
	info, err := c.store.Stat(ctx, manifestKey(repo, d)) // pushed again concurrently?
	if errdefs.IsNotFound(err) || err == nil && info.Modified.After(cutoff) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, c.removeManifest(ctx, repo, d)
}

// Scrubbed is the result of a scrub.
type Scrubbed struct {
	Objects int   `json:"objects"`
	Bytes   int64 `json:"bytes"`
	Damaged int   `json:"damaged"`
}

// Scrub reads everything and moves objects whose bytes do not match their digest to quarantine. Nothing is served from
// there; a push of the same bytes repairs the object.
func (c *Content) Scrub(ctx context.Context) (Scrubbed, error) {
	c.working.Lock()
	defer c.working.Unlock()
	var done Scrubbed
	err := c.eachBlob(ctx, func(d digest.Digest, _ objects.Info) error {
		n, good, err := c.scrubBlob(ctx, d)
		if err == nil {
			done.Objects++
			done.Bytes += n
			if !good {
				done.Damaged++
			}
		}
		return err
	})
	if err != nil {
		return done, fmt.Errorf("scrub: %w", err)
	}
	err = c.eachRepository(ctx, func(repo string) error {
		return c.eachManifest(ctx, repo, func(d digest.Digest, info objects.Info) error {
			_, _, _, err := c.Manifest(ctx, repo, reference.Reference{Digest: d})
			if errdefs.IsNotFound(err) {
				return nil
			}
			done.Objects++
			done.Bytes += info.Size
			if errdefs.Is(err, errdefs.DataLoss) {
				done.Damaged++
				return nil
			}
			return err
		})
	})
	if err != nil {
		return done, fmt.Errorf("scrub: %w", err)
	}
	return done, nil
}

func (c *Content) scrubBlob(ctx context.Context, d digest.Digest) (n int64, good bool, err error) {
	f, info, err := c.openBlob(ctx, d)
	if errdefs.IsNotFound(err) {
		return 0, true, nil
	}
	if err != nil {
		return 0, true, err
	}
	defer f.Close()
	h, n, err := hashOf(ctx, f, d.Algorithm())
	if err != nil && ctx.Err() != nil {
		return n, true, err
	}
	if err == nil && digest.NewDigest(d.Algorithm(), h) == d {
		return n, true, nil
	}
	// A disk that cannot be read is damage too. But good bytes may have been pushed in the meantime.
	now, statErr := c.statBlob(ctx, d)
	if statErr != nil || now != info {
		return n, true, nil
	}
	_ = c.corruptedBlob(ctx, d, info)
	return n, false, nil
}
