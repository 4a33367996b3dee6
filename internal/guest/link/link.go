// Package link turns the byte pipe between a node and a guest into sessions, with a handshake that both sides share.
//
// The pipe (a virtio-serial port) has no notion of a connection: either side may vanish and come back without the other
// noticing, and bytes of the old session may still be in transit. So the host sends HELLO with a fresh nonce until it
// receives READY with that nonce. It then answers GO, and the session begins with the guest's SESSION. Anything else
// that arrives before SESSION is dropped. The package does not know the protocol inside a session.
package link

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"

	"cocoonstack.io/cocoon/internal/guest"
)

// PortName is the name of the virtio-serial port that the agent serves.
const PortName = guest.PortCocoon

// kind is the meaning of a frame.
type kind byte

const (
	kindHello   kind = 'H' // host: is a guest there?
	kindReady   kind = 'R' // guest: yes, and any earlier session is released
	kindGo      kind = 'G' // host: these were my last handshake bytes
	kindSession kind = 'S' // guest: the session follows
)

// A frame is magic, kind, three zero bytes, nonce (big endian) and the CRC-32 (IEEE) of all that.
const (
	frameSize = 20
	magic     = "\xc0CKN"
)

type frame struct {
	kind  kind
	nonce uint64
}

func (f frame) bytes() []byte {
	b := make([]byte, 0, frameSize)
	b = append(b, magic...)
	b = append(b, byte(f.kind), 0, 0, 0)
	b = binary.BigEndian.AppendUint64(b, f.nonce)
	return binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// parse decodes the frame in b, which must be of frameSize bytes.
func parse(b []byte) (frame, bool) {
	if string(b[:4]) != magic || b[5]|b[6]|b[7] != 0 {
		return frame{}, false
	}
	if crc32.ChecksumIEEE(b[:16]) != binary.BigEndian.Uint32(b[16:]) {
		return frame{}, false
	}
	f := frame{kind: kind(b[4]), nonce: binary.BigEndian.Uint64(b[8:])}
	switch f.kind {
	case kindHello, kindReady, kindGo, kindSession:
		return f, true
	}
	return frame{}, false
}

// scanner finds frames in a stream that may hold any other bytes in between.
type scanner struct{ buf []byte }

// next consumes p up to and including the first frame and returns the frame and what follows it. Without a frame it
// consumes all of p and keeps at most the beginning of a frame.
func (s *scanner) next(p []byte) (f frame, rest []byte, ok bool) {
	s.buf = append(s.buf, p...)
	for {
		i := bytes.IndexByte(s.buf, magic[0])
		if i < 0 {
			s.buf = s.buf[:0]
			return frame{}, nil, false
		}
		s.buf = s.buf[i:]
		if len(s.buf) < frameSize {
			s.buf = append(make([]byte, 0, 2*frameSize), s.buf...) // releases the memory of a large read
			return frame{}, nil, false
		}
		if f, ok = parse(s.buf[:frameSize]); ok {
			rest, s.buf = s.buf[frameSize:], nil
			return f, rest, true
		}
		s.buf = s.buf[1:]
	}
}

// onlyHello reports whether p holds only HELLO frames: a new host came before the guest noticed that the old one left.
func onlyHello(p []byte) bool {
	if len(p) == 0 || len(p)%frameSize != 0 {
		return false
	}
	for ; len(p) > 0; p = p[frameSize:] {
		if f, ok := parse(p[:frameSize]); !ok || f.kind != kindHello {
			return false
		}
	}
	return true
}
