package registry

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"io"
	"sync"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/stream"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

const (
	// maxUnpacked limits the bytes of the blobs that are kept for the next use.
	maxUnpacked = 128 << 20
	// maxInUse limits the bytes of the blobs that downloads use at the same time, and of the decoders that unpack them. A blob has
	// at most artifact.MaxRangedBlob, and its decoder as much again.
	maxInUse = 256 << 20
	// minWindow is what a decoder may have for a blob that is smaller.
	minWindow = 8 << 20
	// maxTurns and someTurns limit what is unpacked for one file: maxTurns times the file and someTurns bytes. Pushes write blobs
	// in the order of the file, so a file needs a few blobs in turns, which are all kept, and unpacks each once.
	maxTurns  = 16
	someTurns = 1 << 30
)

// unpacked keeps the uncompressed bytes of the blobs that downloads used last. A file of ranges needs a few blobs in turns:
// one of the first push, and one of each later push.
type unpacked struct {
	room *semaphore.Weighted

	mu   sync.Mutex
	kept recent
}

func newUnpacked() *unpacked { return &unpacked{room: semaphore.NewWeighted(maxInUse)} }

// blobKey names bytes. A blob has others if a manifest says that it is compressed than if another one does not.
type blobKey struct {
	digest     digest.Digest
	compressed bool
}

// recent has the blobs that were used last, with at most maxUnpacked bytes. The zero value is empty.
type recent struct {
	at    map[blobKey]*list.Element
	order list.List // of recentBlob, the last used first
	bytes int64
}

type recentBlob struct {
	key  blobKey
	size int64
	data []byte
}

func (u *recent) get(k blobKey) (data []byte, ok bool) {
	e, ok := u.at[k]
	if !ok {
		return nil, false
	}
	u.order.MoveToFront(e)
	return e.Value.(recentBlob).data, true
}

func (u *recent) put(k blobKey, size int64, data []byte) {
	if _, ok := u.at[k]; ok {
		return
	}
	if u.at == nil {
		u.at = map[blobKey]*list.Element{}
	}
	u.at[k] = u.order.PushFront(recentBlob{k, size, data})
	for u.bytes += size; u.bytes > maxUnpacked; {
		old := u.order.Remove(u.order.Back()).(recentBlob)
		delete(u.at, old.key)
		u.bytes -= old.size
	}
}

// turns returns how many bytes are unpacked to send the pieces of a file in their order, as long as no other download needs room.
func turns(pieces []artifact.Piece, chunks []artifact.Chunk) (total int64) {
	var kept recent
	for _, p := range pieces {
		c := chunks[p.Chunk]
		if k := (blobKey{digest: digest.Digest(c.Layer)}); c.Ranges != nil {
			if _, ok := kept.get(k); !ok {
				total += c.Length
				kept.put(k, c.Length, nil)
			}
		}
	}
	return total
}

// ranged returns a range of a layer that has length bytes, uncompressed. The whole layer is verified before a byte of it is
// sent. Preconditions: a.have(l), and length is at most artifact.MaxRangedBlob.
func (a *assembly) ranged(l v1.Descriptor, length int64, r artifact.Range) stream.Piece {
	return a.g.unpacked.piece(blobKey{l.Digest, compressed(l)}, length, r, a.g.source(a.repo, l))
}

// piece returns a range of a blob. Its reader waits until there is room for the blob, and has the room until it is closed.
func (u *unpacked) piece(k blobKey, length int64, r artifact.Range, open stream.Source) stream.Piece {
	return stream.Piece{Size: r.Length, Open: func(ctx context.Context, offset int64) (io.ReadCloser, error) {
		window := int64(0)
		if k.compressed {
			window = max(length, minWindow)
		}
		if err := u.room.Acquire(ctx, length+window); err != nil {
			return nil, err
		}
		data, err := u.bytes(ctx, k, length, window, open)
		u.room.Release(window)
		if err != nil {
			u.room.Release(length)
			return nil, err
		}
		return &held{Reader: bytes.NewReader(data[r.From+offset : r.From+r.Length]), release: sync.OnceFunc(func() { u.room.Release(length) })}, nil
	}}
}

// held is a part of a blob that has room.
type held struct {
	*bytes.Reader
	release func()
}

func (h *held) Close() error {
	h.Reader = bytes.NewReader(nil)
	h.release()
	return nil
}

// bytes returns the bytes of a blob. Preconditions: there is room for them.
func (u *unpacked) bytes(ctx context.Context, k blobKey, length, window int64, open stream.Source) ([]byte, error) {
	u.mu.Lock()
	data, ok := u.kept.get(k)
	u.mu.Unlock()
	if !ok {
		var err error
		if data, err = unpack(ctx, k, length, window, open); err != nil {
			return nil, err
		}
		u.mu.Lock()
		u.kept.put(k, length, data)
		u.mu.Unlock()
	}
	if int64(len(data)) != length {
		return nil, errdefs.DataLossf("layer %s has %d bytes instead of %d", k.digest, len(data), length)
	}
	return data, nil
}

func unpack(ctx context.Context, k blobKey, length, window int64, open stream.Source) ([]byte, error) {
	p := stream.Plain(length, open)
	if k.compressed {
		p = stream.UnpackedWithin(length, window, open)
	}
	f, err := p.Open(ctx, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data := make([]byte, length)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, short(k.digest, err)
	}
	var one [1]byte
	if _, err := io.ReadFull(f, one[:]); !errors.Is(err, io.EOF) { // only a reader at its end has verified the digest
		return nil, errors.Join(err, errdefs.DataLossf("layer %s has more than %d bytes", k.digest, length))
	}
	return data, nil
}

func short(d digest.Digest, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errdefs.DataLossf("layer %s has fewer bytes than its description says", d)
	}
	return err
}
