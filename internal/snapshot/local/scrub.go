package local

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// scrubNow is how many bytes of layers Verify reads while its caller waits; the rest is read in the background
// afterwards.
var scrubNow int64 = 256 << 20 // a variable for tests

// scrub records which layers are verified. The zero value knows none.
type scrub struct {
	mu    sync.Mutex
	known map[layerKey]error // nil: undamaged
	queue []layer            // to be read, including the one that is being read
	stop  context.CancelFunc // stops the worker; nil: no worker runs
	done  chan struct{}      // closed when the last worker has ended
	over  bool
}

// layer is one layer that waits to be read.
type layer struct {
	key  layerKey
	of   string // snapshot name, for messages
	f    *os.File
	sums *sparse.Sums
}

func (c *scrub) found(key layerKey, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known == nil {
		c.known = map[layerKey]error{}
	}
	c.known[key] = err
}

// look reports whether a layer is verified or queued.
func (c *scrub) look(key layerKey) (known bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.queue {
		known = known || l.key == key
	}
	if err, ok := c.known[key]; ok {
		return true, err
	}
	return known, nil
}

// Verify implements snapshot.Held.
func (h *held) Verify(ctx context.Context) error {
	if !h.s.Summed {
		return nil
	}
	left := scrubNow
	for _, d := range h.s.Disks {
		for _, l := range d.Layers {
			if err := h.store.verify(ctx, h, l.File, &left); err != nil {
				return fmt.Errorf("disk %s of snapshot %s: %w", d.Serial, name(h.s), err)
			}
		}
	}
	return nil
}

// verify compares one layer: now if it has at most left bytes of data, else later.
func (s *Store) verify(ctx context.Context, h *held, file string, left *int64) error {
	path := filepath.Join(h.dir, file)
	f, err := openPlain(path)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	key := keyOf(info)
	if known, err := s.layers.look(key); known {
		f.Close()
		return err
	}
	sums, err := sparse.ReadSums(path + sparse.SumSuffix)
	if err != nil {
		f.Close()
		return err
	}
	if sums.Data() > *left {
		s.later(ctx, layer{key: key, of: name(h.s), f: f, sums: sums})
		return nil
	}
	defer f.Close()
	*left -= sums.Data()
	err = sums.Verify(ctx, f)
	if err == nil || errdefs.Is(err, errdefs.DataLoss) {
		s.layers.found(key, err)
	}
	return err
}

// later queues a layer for the worker, which ends when the queue is empty or when the store is closed.
func (s *Store) later(ctx context.Context, l layer) {
	c := &s.layers
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		l.f.Close()
		return
	}
	c.queue = append(c.queue, l)
	if c.stop == nil {
		ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
		c.stop, c.done = stop, make(chan struct{})
		go s.scrubAll(ctx, c.done)
	}
}

func (s *Store) scrubAll(ctx context.Context, done chan struct{}) {
	defer close(done)
	for l, ok := s.layers.first(ctx); ok; l, ok = s.layers.next(ctx) {
		err := l.sums.Verify(ctx, l.f)
		l.f.Close()
		switch {
		case ctx.Err() != nil:
			continue
		case errdefs.Is(err, errdefs.DataLoss):
			s.cfg.Log.Error("layer of a snapshot is damaged: VMs cloned from it read wrong data", "snapshot", l.of, "err", err)
		case err != nil:
			s.cfg.Log.Warn("layer of a snapshot not verified", "snapshot", l.of, "err", err)
			err = nil // it is not known to be damaged
		}
		s.layers.found(l.key, err)
	}
}

func (c *scrub) next(ctx context.Context) (layer, bool) {
	c.mu.Lock()
	c.queue = c.queue[1:]
	c.mu.Unlock()
	return c.first(ctx)
}

// first returns the layer to read; false: the worker must end.
func (c *scrub) first(ctx context.Context) (layer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) > 0 && ctx.Err() == nil {
		return c.queue[0], true
	}
	for _, l := range c.queue {
		l.f.Close()
	}
	c.stop()
	c.queue, c.stop = nil, nil
	return layer{}, false
}

// end stops the worker and waits for it.
func (c *scrub) end() {
	c.mu.Lock()
	c.over = true
	done := c.done
	if c.stop != nil {
		c.stop()
	}
	c.mu.Unlock()
	if done != nil {
		<-done
	}
}
