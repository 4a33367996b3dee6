package link

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
)

// A session may begin with plain messages: the host sends one, the guest answers with one, and so on until the host
// starts the session's protocol. They serve a guest that was resumed from saved state and needs one request before any
// other. Where its instructions are emulated, the first call of a larger protocol takes longer than the work that it
// asks for.

// MaxPlain limits a plain message, in bytes: either side may be hostile.
const MaxPlain = 64 << 10

// The first byte of a plain message is its type. The rest is encoded as Protocol Buffers.
const (
	PlainResumed = 'R' // request: guestv1.ResumedRequest
	PlainAnswer  = 'A' // answer: the reply to the request
	PlainRefusal = 'E' // answer: one byte, the gRPC code, then a text
)

// A plain message is plainMagic, its length (big endian) and as many bytes. No HTTP/2 preface begins like that.
const (
	plainMagic  = "\xc0CKP"
	plainHeader = len(plainMagic) + 4
)

var errPlain = errors.New("the answer is not a plain message")

func plainMessage(m []byte) []byte {
	b := make([]byte, 0, plainHeader+len(m))
	b = append(b, plainMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(m)))
	return append(b, m...)
}

// cutPlain takes the first message off b. need is the minimum length of b for another try; 0 means that b does not
// begin with a plain message.
func cutPlain(b []byte) (m, rest []byte, need int) {
	head := b[:min(len(b), len(plainMagic))]
	if string(head) != plainMagic[:len(head)] {
		return nil, nil, 0
	}
	if len(b) < plainHeader {
		return nil, nil, plainHeader
	}
	n := binary.BigEndian.Uint32(b[len(plainMagic):])
	if n > MaxPlain {
		return nil, nil, 0
	}
	end := plainHeader + int(n)
	if len(b) < end {
		return nil, nil, end
	}
	return b[plainHeader:end], b[end:], end
}

// Ask sends a plain message on a session in which nothing else was sent yet, and returns the answer. After an error the
// session is unusable. The caller sets deadlines.
func Ask(session net.Conn, m []byte) ([]byte, error) {
	if _, err := session.Write(plainMessage(m)); err != nil {
		return nil, err
	}
	return readPlain(session)
}

func readPlain(r io.Reader) ([]byte, error) {
	var head [plainHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[len(plainMagic):])
	if string(head[:len(plainMagic)]) != plainMagic || n > MaxPlain {
		return nil, errPlain
	}
	m := make([]byte, n)
	_, err := io.ReadFull(r, m)
	return m, err
}

// opening is the guest's side of a session until the session's protocol starts.
type opening struct {
	port *Port
	met  func()
	buf  []byte
}

// plain answers plain messages. It returns the first bytes of the session's protocol, or the HELLO of another host,
// which may come at any time, or io.EOF when this host leaves.
func (o *opening) plain(rest []byte) (spoken, hello []byte, err error) {
	for {
		if len(rest) > 0 {
			m, more, need := cutPlain(rest)
			if need == 0 || o.port.plain == nil {
				return rest, nil, nil
			}
			if more != nil {
				if _, err := o.port.dev.Write(plainMessage(o.port.plain(m))); err != nil {
					return nil, nil, err
				}
				rest = more
				continue
			}
		}
		n, err := o.port.dev.Read(o.buf, true)
		if err != nil {
			return nil, nil, err
		}
		if onlyHello(o.buf[:n]) {
			return nil, append([]byte(nil), o.buf[:n]...), nil
		}
		rest = append(rest, o.buf[:n]...)
	}
}
