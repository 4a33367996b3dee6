package link

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// How often the host repeats HELLO. A guest that boots finds the first HELLO in its port. Repeating helps only when an
// old session consumed it, so the rate may slow down.
const (
	helloFirst = 50 * time.Millisecond
	helloMost  = 250 * time.Millisecond
	goPatience = 2 * time.Second // then the handshake starts again: the agent was restarted in between
)

// Open starts a session on conn, the host's end of the pipe, and returns it. It waits for a guest that is still booting
// until ctx ends. On error the caller still owns conn; on success the session owns it.
// Errors: those of ctx, Unavailable when the pipe ends.
func Open(ctx context.Context, conn net.Conn) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	h := &host{conn: conn, buf: make([]byte, 4096)}
	for {
		rest, err := h.attempt(ctx)
		switch {
		case ctx.Err() != nil:
			return nil, fmt.Errorf("wait for the guest agent: %w", context.Cause(ctx))
		case errors.Is(err, errAgain):
			continue
		case err != nil:
			return nil, errdefs.Unavailablef("wait for the guest agent: %w", err)
		}
		if !stop() {
			return nil, fmt.Errorf("wait for the guest agent: %w", context.Cause(ctx))
		}
		if err := conn.SetDeadline(time.Time{}); err != nil {
			return nil, errdefs.Unavailablef("open session with the guest agent: %w", err)
		}
		return &session{Conn: conn, rest: rest}, nil
	}
}

var errAgain = errors.New("no SESSION after GO")

type host struct {
	conn net.Conn
	buf  []byte
	scan scanner
}

// attempt is one handshake with its own nonce. It returns what followed SESSION in the same read.
func (h *host) attempt(ctx context.Context) ([]byte, error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand aborts the process instead
	nonce := binary.BigEndian.Uint64(random[:])

	for pause := helloFirst; ; pause = min(pause*3/2, helloMost) {
		if err := h.send(frame{kindHello, nonce}, helloFirst); err != nil {
			return nil, err
		}
		_, err := h.await(ctx, frame{kindReady, nonce}, pause)
		if err == nil {
			break
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return nil, err
		}
	}
	if err := h.send(frame{kindGo, nonce}, goPatience); err != nil {
		return nil, err
	}
	rest, err := h.await(ctx, frame{kindSession, nonce}, goPatience)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, errAgain
	}
	return rest, err
}

// send writes f. A pipe that is full because nobody reads yet is no error: earlier HELLOs fill it.
func (h *host) send(f frame, patience time.Duration) error {
	_ = h.conn.SetWriteDeadline(time.Now().Add(patience))
	_, err := h.conn.Write(f.bytes())
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// await reads until want arrives and returns the bytes after it.
func (h *host) await(ctx context.Context, want frame, patience time.Duration) ([]byte, error) {
	_ = h.conn.SetReadDeadline(time.Now().Add(patience))
	for ctx.Err() == nil {
		n, err := h.conn.Read(h.buf)
		data := h.buf[:n]
		for len(data) > 0 {
			f, rest, ok := h.scan.next(data)
			if ok && f == want {
				return rest, nil
			}
			data = rest
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, ctx.Err()
}

// session is conn plus the bytes that the handshake read after SESSION.
type session struct {
	net.Conn
	rest []byte
}

func (s *session) Read(p []byte) (int, error) {
	if len(s.rest) > 0 {
		n := copy(p, s.rest)
		s.rest = s.rest[n:]
		return n, nil
	}
	return s.Conn.Read(p)
}
