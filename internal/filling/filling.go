// Package filling is the conversation about a file that one process still writes while others already read it: which parts of the file are there,
// and which are wanted first.
//
// The writer serves any number of readers. Each is told of every part that is there, and then of every other one as it is written. A reader may say
// what it waits for. Where the file is, and what is in it, is the business of both; nothing of it passes here.
package filling

import (
	"encoding/binary"
	"strings"
	"unicode"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// A message to a reader is two numbers of 64 bits, little-endian: offset and length of a part. A length of 0 means that the rest will never be there;
// then the offset is the length of the reason, which follows. A message of a reader is one number, an offset. Offsets and lengths are multiples of
// sparse.Block, as the size of the file is.
const (
	partSize  = 16
	wantSize  = 8
	maxReason = 1000 // bytes
)

func encodePart(e sparse.Extent) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(e.Offset))
	return binary.LittleEndian.AppendUint64(b, uint64(e.Length))
}

func encodeReason(why string) []byte {
	why = line(why)
	return append(encodePart(sparse.Extent{Offset: int64(len(why))}), why...)
}

// Want is the message of a reader that waits for what is at offset.
func Want(offset int64) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(offset)) }

// line makes a reason fit to show.
func line(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	return strings.ToValidUTF8(s[:min(len(s), maxReason)], "")
}

// Decoder reads what a reader is told of a file of Size bytes, in pieces of any length.
type Decoder struct {
	Size int64
	rest []byte
}

// Decode returns the parts that are there according to all that was read up to the end of p.
// Errors: DataLoss with the reason if the rest of the file will never be there, Internal for nonsense.
func (d *Decoder) Decode(p []byte) (parts []sparse.Extent, err error) {
	d.rest = append(d.rest, p...)
	for len(d.rest) >= partSize {
		at, n := binary.LittleEndian.Uint64(d.rest), binary.LittleEndian.Uint64(d.rest[8:])
		if n == 0 {
			if at > maxReason {
				return parts, errdefs.New(errdefs.Internal, "a reason of %d bytes", at)
			}
			if uint64(len(d.rest)-partSize) < at {
				return parts, nil
			}
			return parts, errdefs.DataLossf("%s", line(string(d.rest[partSize:partSize+at])))
		}
		size := uint64(max(d.Size, 0))
		if at > size || n > size-at || (at|n)%sparse.Block != 0 {
			return parts, errdefs.New(errdefs.Internal, "the part of %d bytes at %d is not in a file of %d bytes", n, at, d.Size)
		}
		parts = append(parts, sparse.Extent{Offset: int64(at), Length: int64(n)})
		d.rest = d.rest[partSize:]
	}
	return parts, nil
}
