package oci

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
)

// tape hashes the tar that is read through it, and records the parts that are not file content. The record (the recipe)
// and the file system together give the tar again, byte for byte:
//
//	recipe  = zstd(record...)
//	record  = uvarint(len) literal uvarint(block) uvarint(size)   the literal, then size bytes of the file system from block on
type tape struct {
	r       io.Reader
	sum     hash.Hash
	out     *zstd.Encoder // nil: no recipe
	literal []byte
	paused  bool
	n       int64 // bytes read so far
	err     error
}

const maxLiteral = 1 << 16

func newTape(r io.Reader, recipe io.Writer) (*tape, error) {
	t := &tape{r: r, sum: sha256.New()}
	if recipe == nil {
		return t, nil
	}
	var err error
	t.out, err = zstd.NewWriter(recipe, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	return t, err
}

func (t *tape) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.sum.Write(p[:n])
	t.n += int64(n)
	if t.out != nil && !t.paused {
		if t.literal = append(t.literal, p[:n]...); len(t.literal) > maxLiteral {
			t.record(ext4.Extent{})
		}
	}
	return n, err
}

// pause marks the start of a file's content. resume marks its end and gives its place in the file system.
func (t *tape) pause() { t.paused = true }

func (t *tape) resume(e ext4.Extent) {
	t.paused = false
	if e.Size > 0 && t.out != nil {
		t.record(e)
	}
}

func (t *tape) record(e ext4.Extent) {
	b := binary.AppendUvarint(nil, uint64(len(t.literal)))
	b = append(b, t.literal...)
	b = binary.AppendUvarint(b, uint64(e.Block))
	b = binary.AppendUvarint(b, uint64(e.Size))
	t.literal = t.literal[:0]
	if _, err := t.out.Write(b); err != nil && t.err == nil {
		t.err = err
	}
}

func (t *tape) close() error {
	if t.out == nil {
		return nil
	}
	t.record(ext4.Extent{})
	return errors.Join(t.err, t.out.Close())
}

// Restore writes the original tar of a layer from its file system and its recipe, and checks that its digest is want.
// Errors: DataLoss when it is not; errors of w are returned as they are.
func Restore(ctx context.Context, w io.Writer, fs io.ReaderAt, recipe io.Reader, want string) error {
	z, err := zstd.NewReader(recipe, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer z.Close()
	r, sum := bufio.NewReader(z), sha256.New()
	out := io.MultiWriter(w, sum)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := binary.ReadUvarint(r)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || n > 2*maxLiteral+1<<20 {
			return errdefs.DataLossf("the stored metadata of the layer %s is damaged; remove the image and fetch it again", want)
		}
		if _, err := io.CopyN(out, r, int64(n)); err != nil {
			return err
		}
		block, err1 := binary.ReadUvarint(r)
		size, err2 := binary.ReadUvarint(r)
		if err1 != nil || err2 != nil || block > 1<<32-1 || size > uint64(ext4.MaxFile) {
			return errdefs.DataLossf("the stored metadata of the layer %s is damaged; remove the image and fetch it again", want)
		}
		if size > 0 {
			if _, err := io.CopyN(out, io.NewSectionReader(fs, ext4.Extent{Block: uint32(block)}.Offset(), int64(size)), int64(size)); err != nil {
				return err
			}
		}
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != want {
		return errdefs.DataLossf("the stored layer has the digest %s instead of %s; remove the image and fetch it again", got, want)
	}
	return nil
}

// ahead reads ahead in its own goroutine, so that decompressing and writing run in parallel.
type ahead struct {
	chunks chan chunk
	free   chan []byte
	quit   chan struct{}
	cur    chunk
	rest   []byte
}

type chunk struct {
	data []byte
	err  error
}

const (
	aheadChunks = 4
	aheadSize   = 1 << 18
)

func readAhead(r io.Reader) *ahead {
	a := &ahead{chunks: make(chan chunk, aheadChunks), free: make(chan []byte, aheadChunks+2), quit: make(chan struct{})}
	for range aheadChunks {
		a.free <- make([]byte, aheadSize)
	}
	go func() {
		defer close(a.chunks)
		for {
			select {
			case <-a.quit:
				return
			case buf := <-a.free:
				n, err := fill(r, buf)
				select {
				case a.chunks <- chunk{buf[:n], err}:
				case <-a.quit:
					return
				}
				if err != nil {
					return
				}
			}
		}
	}()
	return a
}

// fill is io.ReadFull, but returns the error of r unchanged.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var k int
		k, err = r.Read(buf[n:])
		n += k
	}
	return n, err
}

func (a *ahead) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		if a.cur.data != nil {
			a.free <- a.cur.data[:cap(a.cur.data)]
		}
		next, ok := <-a.chunks
		if !ok {
			return 0, io.ErrUnexpectedEOF // not reached: an error comes before the end
		}
		a.cur, a.rest = next, next.data
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

// stop ends the goroutine. When it returns, the goroutine no longer uses the reader.
func (a *ahead) stop() {
	close(a.quit)
	for range a.chunks { //nolint:revive // drained until it is closed
	}
}
