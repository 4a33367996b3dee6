package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/sparse"
)

// withSums returns files, each followed by its checksum file.
func withSums(files []string) []string {
	out := make([]string, 0, 2*len(files))
	for _, f := range files {
		out = append(out, f, f+sparse.SumSuffix)
	}
	return out
}

// seal makes files and their checksums durable. It reads a file for its checksums while the file is written to disk and
// still in the page cache: that adds almost no time to a save.
func (d *draft) seal(ctx context.Context, files []string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(1 + parallelSyncs)
	g.Go(func() error { return syncFiles(ctx, d.Dir(), files) })
	for _, f := range files {
		g.Go(func() error {
			if layerRE.MatchString(f) {
				return d.store.sumLayer(ctx, filepath.Join(d.Dir(), f))
			}
			return sum(ctx, filepath.Join(d.Dir(), f))
		})
	}
	return g.Wait()
}

// sum makes the checksums of a file, unless they exist.
func sum(ctx context.Context, path string) error {
	if _, err := os.Lstat(path + sparse.SumSuffix); err == nil {
		return nil
	}
	f, err := openPlain(path)
	if err != nil {
		return err
	}
	defer f.Close()
	s, err := sparse.SumOf(ctx, f)
	if err != nil {
		return fmt.Errorf("make the checksums of %s: %w", path, err)
	}
	return s.Write(path + sparse.SumSuffix)
}

// sumLayer is sum for a layer, which may have checksums from another snapshot.
func (s *Store) sumLayer(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	key := keyOf(info)
	known := s.path("sums", key.name())
	if err := os.Link(known, path+sparse.SumSuffix); err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err := sum(ctx, path); err != nil {
		return err
	}
	s.layers.found(key, nil)
	// Losing it only costs another read of the layer.
	if err := os.Link(path+sparse.SumSuffix, known); err != nil && !errors.Is(err, fs.ErrExist) {
		s.cfg.Log.Debug("checksums of a layer not kept", "err", err)
	}
	return nil
}

// sumsRest is how long the checksums of a layer stay after no snapshot contains it. The layers of VMs that hibernate
// now and then are in a snapshot only while hibernated.
const sumsRest = 90 * 24 * time.Hour

// forgetSums removes old checksums of layers that are in no snapshot.
func (s *Store) forgetSums() error {
	entries, err := os.ReadDir(s.path("sums"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		st, _ := info.Sys().(*syscall.Stat_t) // always, on Linux
		if st.Nlink > 1 || time.Since(info.ModTime()) < sumsRest {
			continue
		}
		if err := os.Remove(s.path("sums", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// layerKey identifies a layer, and tells old content from new. Links do not change it.
type layerKey struct {
	dev, ino    uint64
	size, mtime int64
}

func keyOf(info fs.FileInfo) layerKey {
	st, _ := info.Sys().(*syscall.Stat_t) // always, on Linux
	return layerKey{st.Dev, st.Ino, st.Size, st.Mtim.Nano()}
}

// name is the file name of its checksums in the store's folder, which is on the same file system as all layers.
func (k layerKey) name() string { return fmt.Sprintf("%x-%x-%x", k.ino, k.size, k.mtime) }
