package content

import (
	"context"
	"hash/maphash"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

// A blob is fresh until a manifest names it: all clients can read it and it survives this process, but a power cut may
// damage it. PutManifest settles it: it flushes the bytes and moves the blob to its permanent key. Blobs that are fresh
// when a process starts are suspect: they are read and verified before use.

// fresh tracks the fresh blobs of a store.
type fresh struct {
	mu    sync.Mutex
	blobs map[digest.Digest]bool // value: whether it is suspect
}

func (f *fresh) get(d digest.Digest) (suspect, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	suspect, ok = f.blobs[d]
	return suspect, ok
}

func (f *fresh) set(d digest.Digest, suspect bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blobs[d] = suspect
}

func (f *fresh) drop(d digest.Digest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.blobs, d)
}

func freshKey(d digest.Digest) string { return "fresh/" + d.Algorithm().String() + "/" + d.Encoded() }

// guard locks where a blob is stored: nobody else changes it until unlock is called.
func (c *Content) guard(d digest.Digest) (unlock func()) {
	mu := &c.taking[maphash.String(c.seed, d.String())%uint64(len(c.taking))]
	mu.Lock()
	return mu.Unlock
}

// find calls look with the key of a blob. NotFound from look means that the blob was settled concurrently, or does not
// exist.
func (c *Content) find(ctx context.Context, d digest.Digest, look func(key string) error) error {
	suspect, ok := c.fresh.get(d)
	if suspect {
		if err := c.vet(ctx, d); err != nil {
			return err
		}
	}
	if ok {
		if err := look(freshKey(d)); !errdefs.IsNotFound(err) {
			return err
		}
	}
	return look(blobKey(d))
}

func (c *Content) statBlob(ctx context.Context, d digest.Digest) (info objects.Info, err error) {
	err = c.find(ctx, d, func(key string) (err error) {
		info, err = c.store.Stat(ctx, key)
		return err
	})
	return info, err
}

// vet reads a suspect blob and removes it if it is damaged.
func (c *Content) vet(ctx context.Context, d digest.Digest) error {
	defer c.guard(d)()
	return c.vetLocked(ctx, d)
}

func (c *Content) vetLocked(ctx context.Context, d digest.Digest) error {
	if suspect, _ := c.fresh.get(d); !suspect {
		return nil
	}
	f, info, err := c.store.Open(ctx, freshKey(d))
	if errdefs.IsNotFound(err) {
		c.fresh.drop(d)
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got, _, err := hashOf(ctx, f, d.Algorithm())
	if err != nil {
		return err
	}
	if digest.NewDigest(d.Algorithm(), got) == d {
		c.fresh.set(d, false)
		return nil
	}
	c.cfg.Log.Warn("a blob that no manifest names was damaged by a power cut; removed", "op", "vet", "digest", d)
	if err := c.store.Remove(ctx, freshKey(d)); err != nil {
		return err
	}
	return c.lost(ctx, d, info.Size)
}

// lost stops tracking a fresh blob of size bytes that no longer exists. A settled one may still exist. The caller holds
// the guard.
func (c *Content) lost(ctx context.Context, d digest.Digest, size int64) error {
	c.fresh.drop(d)
	settled, err := c.store.Stat(ctx, blobKey(d))
	c.used.Add(settled.Size - size)
	if errdefs.IsNotFound(err) {
		c.count.Add(-1)
		return nil
	}
	return err
}

// takeBlob makes the file at path, of size bytes, the blob d. Preconditions: its bytes have that digest.
func (c *Content) takeBlob(ctx context.Context, d digest.Digest, path string, size int64) error {
	defer c.guard(d)()
	old, err := c.store.Stat(ctx, blobKey(d))
	if _, ok := c.fresh.get(d); ok {
		old, err = c.store.Stat(ctx, freshKey(d))
	}
	added := errdefs.IsNotFound(err)
	if err != nil && !added {
		return err
	}
	key := blobKey(d)
	if c.flusher != nil {
		key = freshKey(d)
	}
	if err := c.store.Take(ctx, key, path); err != nil {
		return err
	}
	if c.flusher != nil {
		c.fresh.set(d, false)
	}
	c.used.Add(size - old.Size)
	if added {
		c.count.Add(1)
	}
	return nil
}

// settle makes blobs survive a power cut; it takes effect with the next sync of the store.
func (c *Content) settle(ctx context.Context, all []digest.Digest) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, d := range all {
		if _, ok := c.fresh.get(d); ok && ctx.Err() == nil {
			group.Go(func() error { return c.settleOne(ctx, d) })
		}
	}
	return group.Wait()
}

func (c *Content) settleOne(ctx context.Context, d digest.Digest) error {
	defer c.guard(d)()
	if err := c.vetLocked(ctx, d); err != nil {
		return err
	}
	if _, ok := c.fresh.get(d); !ok {
		return nil
	}
	if err := c.flusher.Flush(ctx, freshKey(d)); err != nil {
		return err
	}
	if err := c.store.Move(ctx, freshKey(d), blobKey(d)); err != nil {
		return err
	}
	c.fresh.drop(d)
	return nil
}

// removeBlob deletes a blob and returns its size; removed is false if it did not exist any more.
func (c *Content) removeBlob(ctx context.Context, d digest.Digest) (size int64, removed bool, err error) {
	defer c.guard(d)()
	info, err := c.store.Stat(ctx, blobKey(d))
	_, isFresh := c.fresh.get(d)
	if isFresh {
		info, err = c.store.Stat(ctx, freshKey(d))
	}
	if errdefs.IsNotFound(err) {
		return 0, false, nil
	}
	if err == nil {
		err = c.store.Remove(ctx, blobKey(d))
	}
	if err == nil && isFresh {
		err = c.store.Remove(ctx, freshKey(d))
	}
	if err != nil {
		return 0, false, err
	}
	c.fresh.drop(d)
	c.used.Add(-info.Size)
	c.count.Add(-1)
	return info.Size, true, nil
}
