package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestNoiseOpensNoSession floods the host with every kind of frame, but none with its nonce.
func TestNoiseOpensNoSession(t *testing.T) {
	var flood []byte
	for _, k := range []kind{kindHello, kindReady, kindGo, kindSession} {
		flood = append(flood, frame{k, 0}.bytes()...)
		flood = append(flood, frame{k, 1<<64 - 1}.bytes()...)
	}
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		go func() {
			for range 200 {
				if _, err := far.Write(flood); err != nil {
					return
				}
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := Open(ctx, near); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("noise opened a session: %v", err)
		}
		near.Close()
		far.Close()
	})
}

// FuzzOpen makes a guest send anything around an honest handshake, in any pieces, or omit the handshake. The host opens
// a session only with a guest that has answered its nonce, and always with one that keeps answering it. The bytes after
// SESSION are what the host reads in the session, byte for byte. What it keeps of the rest is limited (see
// FuzzScanner).
func FuzzOpen(f *testing.F) {
	f.Add([]byte("boot noise"), []byte(""), []byte("PRI * HTTP/2.0"), uint8(7), true)
	f.Add(frame{kindReady, 1}.bytes(), frame{kindSession, 1}.bytes(), frame{kindSession, 1}.bytes(), uint8(19), true)
	f.Add(frame{kindHello, 9}.bytes()[:19], append(frame{kindGo, 3}.bytes()[:19], magic[0]), []byte{}, uint8(0), true)
	f.Add(frame{kindSession, 0}.bytes(), bytes.Repeat([]byte(magic), 3000), []byte("x"), uint8(255), true)
	f.Add(frame{kindReady, 0}.bytes(), frame{kindSession, 0}.bytes(), []byte("never"), uint8(20), false)
	f.Fuzz(func(t *testing.T, before, between, after []byte, cut uint8, honest bool) {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			g := &liar{conn: far, before: before, between: between, after: after, size: int(cut) + 1, honest: honest}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				g.serve()
			}()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			session, err := Open(ctx, near)
			switch {
			case honest && err != nil:
				t.Errorf("an honest guest behind noise: %v", err)
			case !honest && err == nil:
				t.Error("a session with a guest that never had the nonce")
			case !honest && !errors.Is(err, context.DeadlineExceeded):
				t.Errorf("a guest that says the wrong things: %v", err)
			}
			if err == nil {
				got := make([]byte, len(after))
				if _, err := io.ReadFull(session, got); err != nil || !bytes.Equal(got, after) {
					t.Errorf("the session begins with %q (%v) instead of %q", got, err, after)
				}
			}
			near.Close()
			far.Close()
			<-ended
		})
	})
}

// liar is a guest that sends before and between in addition to the handshake, and after in the session. A dishonest one
// omits the handshake.
type liar struct {
	conn                   net.Conn
	before, between, after []byte
	size                   int
	honest                 bool
}

func (l *liar) serve() {
	var scan scanner
	buf := make([]byte, 64)
	out := make(chan []byte, 1024) // a pipe has no buffer, the port has one
	said := make(chan struct{})
	go func() {
		defer close(said)
		for b := range out {
			for len(b) > 0 {
				n := min(l.size, len(b))
				if _, err := l.conn.Write(b[:n]); err != nil {
					return
				}
				b = b[n:]
			}
		}
	}()
	defer func() { close(out); <-said }()
	for {
		n, err := l.conn.Read(buf)
		if err != nil {
			return
		}
		for data := buf[:n]; len(data) > 0; {
			f, rest, ok := scan.next(data)
			if data = rest; !ok {
				continue
			}
			var say []byte
			if f.kind == kindHello {
				say = append(say, l.before...)
				if l.honest {
					say = append(say, frame{kindReady, f.nonce}.bytes()...)
				}
				l.before = nil
			}
			if f.kind == kindGo {
				say = append(say, l.between...)
				if l.honest {
					say = append(append(say, frame{kindSession, f.nonce}.bytes()...), l.after...)
				}
				l.between = nil
			}
			select {
			case out <- say:
			default: // the host reads no more
			}
		}
	}
}
