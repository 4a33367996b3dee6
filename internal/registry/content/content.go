// Package content stores what a registry holds: repositories with blobs, manifests, tags and referrers, and uploads in
// progress. It also does the maintenance (garbage collection, scrubbing, quota).
//
// It knows neither HTTP nor access rights. Only one process at a time may use a store.
//
// Keys of the store:
//
//	blobs/ALGORITHM/XX/HEX                                a blob, once for all repositories
//	fresh/ALGORITHM/HEX                                   a blob that a power cut may still damage
//	repositories/NAME/_blobs/ALGORITHM/HEX                empty: the repository has that blob
//	repositories/NAME/_manifests/ALGORITHM/HEX            a manifest
//	repositories/NAME/_tags/TAG                           the digest of a manifest
//	repositories/NAME/_referrers/ALGORITHM/HEX/ALG-HEX    descriptor of a manifest with this subject
//	quarantine/...                                        objects whose bytes do not match their digest
//
// Everything that a manifest needs is durable before the manifest, so a crash leaves at worst garbage, which is
// collected.
package content

import (
	"context"
	"errors"
	"hash/maphash"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

// Config configures a registry's content. The zero value has no quota and no grace period.
type Config struct {
	Quota     int64         // bytes of blobs and uploads; 0: no limit
	Grace     time.Duration // how long unreferenced content is kept after its last use
	UploadTTL time.Duration // how long an upload is kept after its last byte
	Uploads   UploadLimits
	Untagged  time.Duration // how long a snapshot's manifest is kept without a tag; 0: forever
	Log       *slog.Logger
	Now       func() time.Time // default time.Now
}

// Content is the content of one store.
type Content struct {
	cfg     Config
	store   objects.Store
	flusher objects.Flusher // nil: objects are durable as soon as the store takes them
	fresh   fresh
	leases  leases
	started time.Time
	seed    maphash.Seed
	repos   [64]sync.Mutex // guard a repository's manifests and tags, by hash of the name
	taking  [64]sync.Mutex // guard the location of a blob, by hash of the digest: a blob is counted once
	working sync.Mutex     // one collection or scrub at a time

	used    atomic.Int64 // bytes of blobs
	count   atomic.Int64 // blobs
	staged  atomic.Int64 // bytes of uploads
	corrupt atomic.Int64 // corrupt objects found since the start

	refusedOwner, refusedTotal atomic.Int64 // uploads refused by a limit

	mu       sync.Mutex
	sessions map[string]*Upload
}

// New counts the content of the store. Uploads of an earlier process can be resumed.
func New(ctx context.Context, store objects.Store, cfg Config) (*Content, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	c := &Content{
		cfg: cfg, store: store, started: cfg.Now(), seed: maphash.MakeSeed(), sessions: map[string]*Upload{},
		leases: leases{now: cfg.Now, held: map[digest.Digest]*lease{}}, fresh: fresh{blobs: map[digest.Digest]bool{}},
	}
	c.flusher, _ = store.(objects.Flusher)
	if t, ok := store.(objects.Tidier); ok {
		if err := t.Tidy(ctx, "repositories"); err != nil {
			return nil, err
		}
	}
	err := c.digestsUnder(ctx, "fresh", false, func(d digest.Digest, _ objects.Info) error {
		c.fresh.set(d, true)
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = c.eachBlob(ctx, func(_ digest.Digest, info objects.Info) error {
		c.used.Add(info.Size)
		c.count.Add(1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return c, c.countUploads()
}

// Usage is the current usage.
type Usage struct {
	Blobs, Bytes, Staged, Quota int64
	Uploads                     int
	Corrupt                     int64 // objects found corrupt since the start
}

// Usage returns the current usage.
func (c *Content) Usage() Usage {
	c.mu.Lock()
	n := len(c.sessions)
	c.mu.Unlock()
	return Usage{Blobs: c.count.Load(), Bytes: c.used.Load(), Staged: c.staged.Load(), Quota: c.cfg.Quota, Uploads: n, Corrupt: c.corrupt.Load()}
}

// repo locks the manifests and tags of a repository until unlock is called.
func (c *Content) repo(name string) (unlock func()) {
	mu := &c.repos[maphash.String(c.seed, name)%uint64(len(c.repos))]
	mu.Lock()
	return mu.Unlock
}

func repoKey(repo string) string { return "repositories/" + repo }

func blobKey(d digest.Digest) string {
	hex := d.Encoded()
	return "blobs/" + d.Algorithm().String() + "/" + hex[:2] + "/" + hex
}

func linkKey(repo string, d digest.Digest) string {
	return repoKey(repo) + "/_blobs/" + d.Algorithm().String() + "/" + d.Encoded()
}

func manifestKey(repo string, d digest.Digest) string {
	return repoKey(repo) + "/_manifests/" + d.Algorithm().String() + "/" + d.Encoded()
}

func tagKey(repo, tag string) string { return repoKey(repo) + "/_tags/" + tag }

func referrersKey(repo string, subject digest.Digest) string {
	return repoKey(repo) + "/_referrers/" + subject.Algorithm().String() + "/" + subject.Encoded()
}

func flat(d digest.Digest) string { return d.Algorithm().String() + "-" + d.Encoded() }

// Code is the error code of the distribution specification.
type Code string

// The codes.
const (
	BlobUnknown         Code = "BLOB_UNKNOWN"
	BlobUploadInvalid   Code = "BLOB_UPLOAD_INVALID"
	BlobUploadUnknown   Code = "BLOB_UPLOAD_UNKNOWN"
	DigestInvalid       Code = "DIGEST_INVALID"
	ManifestBlobUnknown Code = "MANIFEST_BLOB_UNKNOWN"
	ManifestInvalid     Code = "MANIFEST_INVALID"
	ManifestUnknown     Code = "MANIFEST_UNKNOWN"
	NameInvalid         Code = "NAME_INVALID"
	NameUnknown         Code = "NAME_UNKNOWN"
	SizeInvalid         Code = "SIZE_INVALID"
	TooManyRequests     Code = "TOOMANYREQUESTS"
	Unauthorized        Code = "UNAUTHORIZED"
	Denied              Code = "DENIED"
	Unsupported         Code = "UNSUPPORTED"
)

type coded struct {
	Code
	error
}

func (e *coded) Unwrap() error { return e.error }

func code(c Code, err error) error {
	if err == nil {
		return nil
	}
	return &coded{c, err}
}

// CodeOf returns the code of an error, or "".
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*coded](err); ok {
		return e.Code
	}
	return ""
}

// digestsUnder calls f with the digests below a prefix that has a folder per algorithm and, if sharded, shards below
// it.
func (c *Content) digestsUnder(ctx context.Context, prefix string, sharded bool, f func(digest.Digest, objects.Info) error) error {
	for _, alg := range []digest.Algorithm{digest.SHA256, digest.SHA512} {
		folders := []string{prefix + "/" + alg.String()}
		if sharded {
			all, err := c.store.List(ctx, folders[0])
			if err != nil {
				return err
			}
			folders = folders[:0]
			for _, s := range all {
				folders = append(folders, prefix+"/"+alg.String()+"/"+s.Name)
			}
		}
		for _, folder := range folders {
			all, err := c.store.List(ctx, folder)
			if err != nil {
				return err
			}
			for _, e := range all {
				d := digest.NewDigestFromEncoded(alg, e.Name)
				if e.Dir || d.Validate() != nil {
					continue // not one of our objects
				}
				if err := f(d, e.Info); err != nil {
					return err
				}
			}
		}
	}
	return ctx.Err()
}

// eachBlob calls f with every blob. It may miss a blob that is settled concurrently.
func (c *Content) eachBlob(ctx context.Context, f func(digest.Digest, objects.Info) error) error {
	err := c.digestsUnder(ctx, "blobs", true, func(d digest.Digest, info objects.Info) error {
		if _, ok := c.fresh.get(d); ok {
			return nil // listed below: a blob that is pushed again exists twice
		}
		return f(d, info)
	})
	if err != nil {
		return err
	}
	return c.digestsUnder(ctx, "fresh", false, f)
}

func (c *Content) eachManifest(ctx context.Context, repo string, f func(digest.Digest, objects.Info) error) error {
	return c.digestsUnder(ctx, repoKey(repo)+"/_manifests", false, f)
}

func (c *Content) eachLink(ctx context.Context, repo string, f func(digest.Digest, objects.Info) error) error {
	return c.digestsUnder(ctx, repoKey(repo)+"/_blobs", false, f)
}

// eachRepository calls f with the names of all repositories, including those without a manifest, in ascending order of
// their parts.
func (c *Content) eachRepository(ctx context.Context, f func(string) error) error {
	var walk func(name string) error
	walk = func(name string) error {
		all, err := c.store.List(ctx, strings.TrimSuffix(repoKey(name), "/"))
		if err != nil {
			return err
		}
		own := false
		for _, e := range all {
			own = own || e.Dir && strings.HasPrefix(e.Name, "_")
		}
		if own {
			if err := f(name); err != nil {
				return err
			}
		}
		for _, e := range all {
			if !e.Dir || strings.HasPrefix(e.Name, "_") {
				continue
			}
			below := e.Name
			if name != "" {
				below = name + "/" + e.Name
			}
			if err := walk(below); err != nil {
				return err
			}
		}
		return ctx.Err()
	}
	return walk("")
}

// corrupted records that an object's bytes do not match its digest, and moves it to quarantine, so that it is missing
// and pushed again instead of being served.
func (c *Content) corrupted(ctx context.Context, key string, d digest.Digest) error {
	c.corrupt.Add(1)
	c.cfg.Log.Error("stored bytes do not match their digest; moved to quarantine", "op", "scrub", "object", key)
	if err := c.store.Move(ctx, key, "quarantine/"+key); err != nil && !errdefs.IsNotFound(err) {
		c.cfg.Log.Error("quarantine failed", "op", "scrub", "object", key, "err", err)
	}
	return damaged(d)
}

func damaged(d digest.Digest) error {
	return errdefs.DataLossf("the stored bytes of %s are damaged and were moved to quarantine; push it again", d)
}

// corruptedBlob is corrupted for the blob that info describes. It does not touch a blob that was moved or replaced
// concurrently.
func (c *Content) corruptedBlob(ctx context.Context, d digest.Digest, info objects.Info) error {
	defer c.guard(d)()
	key := blobKey(d)
	_, isFresh := c.fresh.get(d)
	if isFresh {
		key = freshKey(d)
	}
	if now, err := c.store.Stat(ctx, key); err != nil || now != info {
		return damaged(d)
	}
	if isFresh {
		return errors.Join(c.corrupted(ctx, key, d), c.lost(ctx, d, info.Size))
	}
	c.used.Add(-info.Size)
	c.count.Add(-1)
	return c.corrupted(ctx, key, d)
}
