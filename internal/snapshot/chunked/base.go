package chunked

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/vm"
)

// A base is what a repository has of the memory of a VM: the blobs of its last push or pull, and the hash of each page in
// them. It outlives the snapshot, because a VM that hibernates again has no earlier snapshot on the node any more. Like all
// of the index it is a cache. A damaged one is not used, because it could make a push refer to wrong bytes.
type base struct {
	document

	identity string // of the file
	pages    *pages
	pieces   []artifact.Piece
}

// baseKey tells what a base is of. Bases of other owners, repositories and sizes are never used.
type baseKey struct {
	Namespace  string `json:"namespace"` // of the owner
	Repository string `json:"repository"`
	Size       int64  `json:"size"` // bytes of memory
	vm         vm.ID
}

// Limits of the bases on a node; the oldest are removed. A base has one byte for 256 of memory.
const (
	maxBases     = 1024
	maxBaseBytes = 1 << 30
	maxBaseHead  = 64 << 20
)

const (
	baseSuffix = ".base"
	baseMagic  = "cocoonb1"
)

// family begins the names of the bases that a VM can use; name is that of its own.
func (k baseKey) family() string { return digestName(k) + "-" }
func (k baseKey) name() string   { return k.family() + digestName(k.vm) + baseSuffix }

func digestName(v any) string {
	data, _ := json.Marshal(v) // plain values always encode
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:16])
}

// baseHead is the beginning of the file of a base. The hashes follow, then the sha256 of all before it.
type baseHead struct {
	Identity string   `json:"identity"`
	Key      baseKey  `json:"key"`
	Document document `json:"document"`
}

// base returns the base for a push: the VM's own, else the last one of another VM of the same owner, repository and size.
// That is the VM itself if it came here from another node.
func (x index) base(k baseKey) (*base, bool) {
	if x.dir == "" {
		return nil, false
	}
	if b, err := x.openBase(k.name(), k); err == nil {
		return b, true
	}
	for _, name := range x.bases(k.family()) {
		if b, err := x.openBase(name, k); err == nil {
			return b, true
		}
	}
	return nil, false
}

// isBase reports whether the base of k itself is of the file with that identity.
func (x index) isBase(k baseKey, identity string) bool {
	b, err := x.openBase(k.name(), k)
	if err != nil {
		return false
	}
	b.pages.close()
	return b.identity == identity
}

// bases returns the names of the bases that begin with prefix, the last one first.
func (x index) bases(prefix string) []string {
	entries, err := os.ReadDir(x.dir)
	if err != nil {
		return nil
	}
	var found []fs.FileInfo
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && strings.HasSuffix(e.Name(), baseSuffix) {
			if info, err := e.Info(); err == nil {
				found = append(found, info)
			}
		}
	}
	slices.SortFunc(found, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	names := make([]string, 0, len(found))
	for _, info := range found {
		names = append(names, info.Name())
	}
	return names
}

// openBase reads a base and checks it. The caller must close its pages.
func (x index) openBase(name string, k baseKey) (_ *base, err error) {
	f, err := os.Open(filepath.Join(x.dir, name))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	body := info.Size() - sha256.Size
	r := io.TeeReader(io.NewSectionReader(f, 0, body), sum)
	var start [len(baseMagic) + 8]byte
	if _, err := io.ReadFull(r, start[:]); err != nil {
		return nil, err
	}
	length := binary.LittleEndian.Uint64(start[len(baseMagic):])
	if string(start[:len(baseMagic)]) != baseMagic || length > maxBaseHead {
		return nil, errdefs.DataLossf("%s is not a base", name)
	}
	head := make([]byte, length)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, err
	}
	var want [sha256.Size]byte
	if _, err := f.ReadAt(want[:], body); err != nil || !bytes.Equal(sum.Sum(nil), want[:]) {
		return nil, errdefs.DataLossf("%s is damaged", name)
	}
	var h baseHead
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, err
	}
	at := int64(len(start)) + int64(length)
	k.vm = ""
	if h.Key != k || body-at != k.Size/page*pageHash || !h.Document.sane(k.Size) {
		return nil, errdefs.DataLossf("%s is the base of something else", name)
	}
	b := &base{document: h.Document, identity: h.Identity, pages: &pages{f: f, at: at, size: k.Size}}
	b.pieces, err = artifact.Pieces(b.wire(), k.Size)
	return b, err
}

// saveBase stores a base, and removes the oldest if there are too many.
func (x index) saveBase(k baseKey, identity string, d document, p *pages) (err error) {
	if err := p.err(); err != nil {
		return err
	}
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return fmt.Errorf("make the chunk index: %w", err)
	}
	name := k.name()
	k.vm = ""
	head, err := json.Marshal(baseHead{identity, k, d})
	if err != nil {
		return fmt.Errorf("encode the base: %w", err)
	}
	if len(head) > maxBaseHead {
		return errdefs.Exhaustedf("the base has %d bytes of chunks; at most %d are allowed", len(head), maxBaseHead)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.pruneBases(maxBases-1, maxBaseBytes)
	f, err := os.CreateTemp(x.dir, basePartial)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err == nil {
			err = os.Rename(f.Name(), filepath.Join(x.dir, name))
		}
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	sum := sha256.New()
	w := io.MultiWriter(f, sum)
	start := binary.LittleEndian.AppendUint64([]byte(baseMagic), uint64(len(head)))
	for _, r := range []io.Reader{bytes.NewReader(start), bytes.NewReader(head), p.reader()} {
		if _, err := io.CopyBuffer(w, struct{ io.Reader }{r}, make([]byte, readSize)); err != nil {
			return err
		}
	}
	_, err = f.Write(sum.Sum(nil))
	return err
}

// newPages returns the hashes of a file of size zeros.
func (x index) newPages(size int64) (*pages, error) {
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the chunk index: %w", err)
	}
	return newPages(x.dir, size)
}

const basePartial = ".base-" // begins the name of a base that is being written

// pruneBases removes the oldest of more than most bases or of more than room bytes, and what a crash left. Preconditions:
// x.mu is held.
func (x index) pruneBases(most int, room int64) {
	left, _ := filepath.Glob(filepath.Join(x.dir, basePartial+"*"))
	for _, path := range left {
		_ = os.Remove(path)
	}
	for n, name := range x.bases("") {
		path := filepath.Join(x.dir, name)
		if info, err := os.Stat(path); err == nil {
			room -= info.Size()
		}
		if n >= most || room < 0 {
			_ = os.Remove(path)
		}
	}
}

// wire returns the chunks of a document as a manifest has them.
func (d document) wire() []artifact.Chunk {
	out := make([]artifact.Chunk, 0, len(d.Chunks))
	for _, c := range d.Chunks {
		out = append(out, c.wire())
	}
	return out
}

func (c chunk) wire() artifact.Chunk {
	return artifact.Chunk{Offset: c.Offset, Length: c.Length, Layer: c.Digest, Ranges: c.Ranges}
}

// first is the offset of the first byte of a file that is in the chunk.
func (c chunk) first() int64 {
	if len(c.Ranges) > 0 {
		return c.Ranges[0].Offset
	}
	return c.Offset
}

// byFirst sorts chunks.
func byFirst(a, b *chunk) int { return cmp.Compare(a.first(), b.first()) }
