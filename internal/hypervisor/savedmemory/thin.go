package savedmemory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Written is the result of Thin.
type Written struct {
	Used  int64 // bytes that are not zero
	Delta bool  // the file contains only what differs from the base
}

// thinPiece is how many bytes are read at once.
const thinPiece = 256 << 10

// Thin makes memory, a file of size bytes to which a hypervisor has written everything, sparse. If base, which may be nil, has at least half of its data,
// it becomes a delta to base.
// Errors: DataLoss if memory has another size, ResourceExhausted.
func Thin(ctx context.Context, memory, base *os.File, size int64) (Written, error) {
	st, err := memory.Stat()
	if err == nil && (st.Size() != size || size%sparse.Block != 0) {
		err = errdefs.DataLossf("%d bytes of memory were saved, and the guest has %d", st.Size(), size)
	}
	if err == nil && base != nil {
		var b os.FileInfo
		if b, err = base.Stat(); err == nil && b.Size() != size {
			base = nil
		}
	}
	if err != nil {
		return Written{}, err
	}
	zero, shared, err := compare(ctx, memory, base, size)
	if err != nil {
		return Written{}, fmt.Errorf("look at the saved memory: %w", err)
	}
	pages := size / sparse.Block
	w := Written{Used: (pages - zero.Count()) * sparse.Block}
	w.Delta = base != nil && shared.Count() >= (pages-zero.Count()+1)/2
	if err := punch(ctx, memory, zero, size); err != nil || !w.Delta {
		return w, failed(err)
	}
	if err := punch(ctx, memory, shared, size); err != nil {
		return w, failed(err)
	}
	own := sparse.NewPages(size)
	for n := range pages {
		if !shared.Has(n) {
			own.Set(n)
		}
	}
	return w, failed(sparse.EndDelta(memory, size, own))
}

func failed(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errdefs.Exhaustedf("write the guest's memory: %w; free some space there", err)
	}
	return fmt.Errorf("write the guest's memory: %w", err)
}

// compare finds the blocks of memory that are zero, and those that are not and that base has too.
func compare(ctx context.Context, memory, base *os.File, size int64) (zero, shared sparse.Pages, err error) {
	zero, shared = sparse.NewPages(size), sparse.NewPages(size)
	data, old, none := make([]byte, thinPiece), make([]byte, thinPiece), make([]byte, sparse.Block)
	for at := int64(0); at < size; at += thinPiece {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		n := min(thinPiece, size-at)
		if err := readAt(memory, data[:n], at); err != nil {
			return nil, nil, err
		}
		read := false
		for off := int64(0); off < n; off += sparse.Block {
			block := data[off : off+sparse.Block]
			if bytes.Equal(block, none) {
				zero.Set((at + off) / sparse.Block)
				continue
			}
			if base == nil {
				continue
			}
			if !read {
				if err := readAt(base, old[:n], at); err != nil {
					return nil, nil, err
				}
				read = true
			}
			if bytes.Equal(block, old[off:off+sparse.Block]) {
				shared.Set((at + off) / sparse.Block)
			}
		}
	}
	return zero, shared, nil
}

func readAt(f *os.File, p []byte, at int64) error {
	_, err := f.ReadAt(p, at)
	if errors.Is(err, io.EOF) {
		return errdefs.DataLossf("%s is truncated", f.Name())
	}
	return err
}

// punch makes the blocks of pages holes.
func punch(ctx context.Context, f *os.File, pages sparse.Pages, size int64) error {
	for _, e := range pages.Extents(size) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, e.Offset, e.Length); err != nil {
			return err
		}
	}
	return nil
}
