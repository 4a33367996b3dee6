package chunked

import (
	"fmt"

	"github.com/klauspost/compress"
	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// codecVersion is part of the validity of an index document: it changes whenever equal bytes become different blobs.
const codecVersion = "zstd-fastest-2"

// encoder makes the blob of a chunk: one zstd frame, or the chunk itself if the frame is hardly smaller. Equal chunks
// give equal blobs: one thread, one level, no state. Only one goroutine may use it.
type encoder struct {
	z      *zstd.Encoder // nil: nothing is compressed
	out    []byte
	sample []byte
}

const (
	sampleSize  = 512      // bytes
	sampleEvery = 16 << 10 // bytes: a chunk whose samples look random is not compressed at all
	noise       = 0.06     // the estimate for so few random bytes is below this, for anything else above
)

// random reports whether, judged by samples, compression cannot shrink raw: it is encrypted or compressed already.
func (e *encoder) random(raw []byte) bool {
	if len(raw) < 8*sampleEvery {
		return false
	}
	e.sample = e.sample[:0]
	for at := 0; at+sampleSize <= len(raw); at += sampleEvery {
		e.sample = append(e.sample, raw[at:at+sampleSize]...)
	}
	return compress.Estimate(e.sample) < noise
}

func newEncoder(uncompressed bool) (*encoder, error) {
	if uncompressed {
		return &encoder{}, nil
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("make an encoder: %w", err)
	}
	return &encoder{z: z}, nil
}

// encode returns the blob of raw and whether it is compressed. The blob is valid until the next call and as long as raw
// is.
func (e *encoder) encode(raw []byte) ([]byte, bool) {
	if e.z == nil || e.random(raw) {
		return raw, false
	}
	e.out = e.z.EncodeAll(raw, e.out[:0])
	if len(e.out) > len(raw)-len(raw)/32 {
		return raw, false
	}
	return e.out, true
}

// keep is the largest buffer that a worker keeps for its next chunk, in bytes: the budget bounds larger ones only while
// they are in use.
const keep = 4 << 20

func (e *encoder) trim() {
	if cap(e.out) > keep {
		e.out = nil
	}
}

func (d *decoder) trim() {
	if cap(d.out) > keep {
		d.out = nil
	}
}

// decoder decodes what encoder made. Only one goroutine may use it.
type decoder struct {
	z   *zstd.Decoder
	out []byte
}

func newDecoder() (*decoder, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxForeignChunk+1), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		return nil, fmt.Errorf("make a decoder: %w", err)
	}
	return &decoder{z: z}, nil
}

func (d *decoder) close() { d.z.Close() }

// decode returns the length bytes of a chunk, valid until the next call. It never unpacks more, whatever the frame
// claims.
func (d *decoder) decode(blob []byte, length int) ([]byte, error) {
	if cap(d.out) < length {
		d.out = make([]byte, 0, length)
	}
	out, err := d.z.DecodeAll(blob, d.out[:0:length])
	if err != nil {
		return nil, errdefs.DataLossf("its blob is not a zstd frame of %d bytes: %w", length, err)
	}
	if len(out) != length {
		return nil, errdefs.DataLossf("its blob holds %d bytes instead of %d", len(out), length)
	}
	return out, nil
}
