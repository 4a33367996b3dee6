package chunked

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/ociname"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/vm"
)

// chunk is one blob of a file, and where its bytes are in the file.
type chunk struct {
	Offset     int64           `json:"o"` // 0 if it has ranges
	Length     int64           `json:"l"` // of the blob, uncompressed
	Digest     string          `json:"d"`
	Size       int64           `json:"n"` // of the blob
	Compressed bool            `json:"z,omitempty"`
	Ranges     artifact.Ranges `json:"r,omitempty"` // nil: all of it is in the file
}

// parts returns where the bytes of the blob are in the file.
func (c chunk) parts() artifact.Ranges {
	if c.Ranges == nil {
		return artifact.Ranges{{Offset: c.Offset, Length: c.Length}}
	}
	return c.Ranges
}

// whole returns the parts of the file from which the blob can be made again, in the order of the blob; nil: the file has
// not all of its bytes.
func (c chunk) whole() artifact.Ranges {
	parts := slices.SortedFunc(slices.Values(c.parts()), func(a, b artifact.Range) int { return cmp.Compare(a.From, b.From) })
	end := int64(0)
	for _, r := range parts {
		if r.From != end {
			return nil
		}
		end += r.Length
	}
	if end != c.Length {
		return nil
	}
	return parts
}

// readChunk fills raw with the bytes of a chunk, which are in parts of f.
func readChunk(f io.ReaderAt, parts artifact.Ranges, raw []byte) error {
	for _, r := range parts {
		if _, err := f.ReadAt(raw[r.From:r.From+r.Length], r.Offset); err != nil {
			return err
		}
	}
	return nil
}

// identity tells whether a file is still the one that was read. Snapshots that share a file by hard links also share
// its chunk index. Nobody writes to the files of a snapshot.
type identity struct {
	dev, ino    uint64
	size, mtime int64
}

func identityOf(info fs.FileInfo) identity {
	id := identity{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		id.dev, id.ino = uint64(st.Dev), st.Ino //nolint:unconvert // not the same type everywhere
	}
	return id
}

func (id identity) String() string {
	return fmt.Sprintf("%x-%x-%x-%x", id.dev, id.ino, id.size, id.mtime)
}

// index stores the chunks of local files, one document per file, and the bases of pushes. It is a cache: missing or
// damaged documents cause a new read.
type index struct {
	dir string      // "": stores nothing
	mu  *sync.Mutex // for writing bases
}

const indexSuffix = ".chunks"

// document is one file of the index.
type document struct {
	Codec   string  `json:"codec"`
	Average int     `json:"average"`
	Chunks  []chunk `json:"chunks"`
	Pages   string  `json:"pages,omitempty"` // artifact.File.Pages
}

func (x index) path(id identity) string { return filepath.Join(x.dir, id.String()+indexSuffix) }

func (x index) load(id identity) (document, bool) {
	if x.dir == "" {
		return document{}, false
	}
	data, err := os.ReadFile(x.path(id))
	if err != nil {
		return document{}, false
	}
	var d document
	if json.Unmarshal(data, &d) != nil || !d.sane(id.size) {
		return document{}, false
	}
	return d, true
}

// sane refuses a damaged document that would cause invalid reads.
func (d document) sane(size int64) bool {
	for _, c := range d.Chunks {
		if c.Length > maxForeignChunk || !ociname.IsSHA256(c.Digest) || c.Size <= 0 {
			return false
		}
	}
	_, err := artifact.Pieces(d.wire(), size)
	return err == nil
}

// save stores a document; a failure is no failure of the transfer.
func (x index) save(id identity, d document) error {
	if x.dir == "" {
		return nil
	}
	data, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("encode the chunk index: %w", err)
	}
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return fmt.Errorf("make the chunk index: %w", err)
	}
	return atomicfile.WriteFile(x.path(id), data, 0o600)
}

func (x index) forget(id identity) { _ = os.Remove(x.path(id)) }

// place is the location of a blob's bytes in a local snapshot.
type place struct {
	snapshot string // id
	file     string
	id       identity
	chunk    chunk
}

// places finds the wanted blobs in the snapshots of store, and deletes documents of files that are in no snapshot.
func (x index) places(ctx context.Context, store snapshot.Store, wanted map[string]bool) map[string]place {
	if x.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(x.dir)
	if err != nil || len(entries) == 0 {
		return nil
	}
	ctx = vm.OnBehalf(ctx, vm.Owner{}) // of all owners: a caller that knows a chunk's digest may have its bytes
	all, err := store.List(ctx)
	if err != nil {
		return nil
	}
	found, live := map[string]place{}, map[string]bool{}
	for _, s := range all {
		h, err := store.Hold(ctx, s.ID)
		if err != nil {
			return found // the snapshot is just being removed: sweep another time
		}
		files, err := os.ReadDir(h.Dir())
		for _, f := range files {
			info, err := f.Info()
			if err != nil || !info.Mode().IsRegular() {
				continue
			}
			id := identityOf(info)
			if live[id.String()] {
				continue
			}
			live[id.String()] = true
			d, ok := x.load(id)
			if !ok {
				continue
			}
			for _, c := range d.Chunks {
				if wanted[c.Digest] && c.whole() != nil {
					found[c.Digest] = place{s.ID, f.Name(), id, c}
				}
			}
		}
		h.Release()
		if err != nil {
			return found
		}
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), indexSuffix); ok && !live[name] {
			_ = os.Remove(filepath.Join(x.dir, e.Name()))
		}
	}
	return found
}

// native reports whether the chunks can be our own: chunks of other systems have other sizes and would match none of
// ours.
func (d document) native() bool {
	return !slices.ContainsFunc(d.Chunks, func(c chunk) bool { return c.Offset%page != 0 || c.Length > int64(sizing{d.Average}.max()) })
}
