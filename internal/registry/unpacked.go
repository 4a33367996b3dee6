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

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/stream"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// maxUnpacked limits the bytes of all blobs in unpacked. Every download uses one more blob, of at most
// artifact.MaxRangedBlob.
const maxUnpacked = 128 << 20

// unpacked keeps the uncompressed bytes of the blobs that downloads used last. A file of ranges needs a few blobs in turns:
// one of the first push, and one of each later push.
type unpacked struct {
	mu    sync.Mutex
	kept  map[digest.Digest]*list.Element
	order list.List // of unpackedBlob, the last used first
	bytes int
}

type unpackedBlob struct {
	digest digest.Digest
	data   []byte
}

func (u *unpacked) get(d digest.Digest) ([]byte, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	e, ok := u.kept[d]
	if !ok {
		return nil, false
	}
	u.order.MoveToFront(e)
	return e.Value.(unpackedBlob).data, true
}

func (u *unpacked) put(d digest.Digest, data []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.kept[d]; ok {
		return
	}
	if u.kept == nil {
		u.kept = map[digest.Digest]*list.Element{}
	}
	u.kept[d] = u.order.PushFront(unpackedBlob{d, data})
	for u.bytes += len(data); u.bytes > maxUnpacked; {
		old := u.order.Remove(u.order.Back()).(unpackedBlob)
		delete(u.kept, old.digest)
		u.bytes -= len(old.data)
	}
}

// ranged returns a range of a layer that has length bytes, uncompressed. The whole layer is verified before a byte of it is
// sent.
func (a *assembly) ranged(l v1.Descriptor, length int64, r artifact.Range) stream.Piece {
	return stream.Piece{Size: r.Length, Open: func(ctx context.Context, offset int64) (io.ReadCloser, error) {
		data, err := a.unpack(ctx, l, length)
		if err != nil {
			return nil, err
		}
		return io.NopCloser(bytes.NewReader(data[r.From+offset : r.From+r.Length])), nil
	}}
}

// unpack returns the bytes of a layer. Preconditions: a.have(l), and length is at most artifact.MaxRangedBlob.
func (a *assembly) unpack(ctx context.Context, l v1.Descriptor, length int64) ([]byte, error) {
	data, ok := a.g.unpacked.get(l.Digest)
	if !ok {
		p := stream.Plain(length, a.g.source(a.repo, l))
		if compressed(l) {
			p = stream.Unpacked(length, a.g.source(a.repo, l))
		}
		f, err := p.Open(ctx, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		data = make([]byte, length)
		if _, err := io.ReadFull(f, data); err != nil {
			return nil, short(l, err)
		}
		var one [1]byte
		if _, err := io.ReadFull(f, one[:]); !errors.Is(err, io.EOF) { // only a reader at its end has verified the digest
			return nil, errors.Join(err, errdefs.DataLossf("layer %s has more than %d bytes", l.Digest, length))
		}
		a.g.unpacked.put(l.Digest, data)
	}
	if int64(len(data)) != length {
		return nil, errdefs.DataLossf("layer %s has %d bytes instead of %d", l.Digest, len(data), length)
	}
	return data, nil
}

func short(l v1.Descriptor, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errdefs.DataLossf("layer %s has fewer bytes than its description says", l.Digest)
	}
	return err
}
