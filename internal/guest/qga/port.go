package qga

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Limits on what a possibly hostile guest can make the host hold, in bytes.
const (
	answerLimit = 1 << 20  // of any answer except a command's output
	outputLimit = 24 << 20 // of an answer with a command's output, which is base64 in JSON
	syncLimit   = 4 << 10  // of an answer to a sync, and of the text of an error
)

// sentinel is never part of a JSON text. When it is sent, the agent drops a command that was cut off. The agent puts
// one before its answer to guest-sync-delimited, so that everything earlier can be dropped here as well.
const sentinel = 0xff

var errLong = errors.New("the answer is too long")

// port is the stream to the agent, used by one caller at a time. It reads ahead by one piece, so that it notices the
// end of the stream even when nobody waits for an answer.
type port struct {
	conn   net.Conn
	in     *bufio.Reader // buffers Read
	pieces chan []byte
	closed chan struct{}
	gone   chan struct{} // closed when reading has ended; err is set then
	err    error
	once   sync.Once

	rest      []byte // of the last piece
	limit     time.Time
	cancelled <-chan struct{}
}

func newPort(conn net.Conn) *port {
	p := &port{conn: conn, pieces: make(chan []byte), closed: make(chan struct{}), gone: make(chan struct{})}
	p.in = bufio.NewReaderSize(p, 16<<10)
	go p.pump() // until close
	return p
}

func (p *port) pump() {
	defer close(p.gone)
	buf := make([]byte, 32<<10)
	for {
		n, err := p.conn.Read(buf)
		if n > 0 {
			select {
			case p.pieces <- bytes.Clone(buf[:n]):
			case <-p.closed:
			}
		}
		if err != nil {
			p.err = err
			return
		}
	}
}

// close ends the stream and waits until reading has ended.
func (p *port) close() error {
	var err error
	p.once.Do(func() {
		close(p.closed)
		err = p.conn.Close()
	})
	<-p.gone
	return err
}

// arm sets the timeout of the reads that follow.
func (p *port) arm(ctx context.Context, limit time.Time) {
	p.cancelled, p.limit = ctx.Done(), limit
}

// Read implements io.Reader.
func (p *port) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		t := time.NewTimer(time.Until(p.limit))
		defer t.Stop()
		select {
		case p.rest = <-p.pieces:
		case <-p.gone:
			return 0, p.err
		case <-p.cancelled:
			return 0, context.Canceled
		case <-t.C:
			return 0, os.ErrDeadlineExceeded
		}
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// write sends all of b, or fails when ctx ends or limit has passed.
func (p *port) write(ctx context.Context, b []byte, limit time.Time) error {
	if err := p.conn.SetWriteDeadline(limit); err != nil {
		return err
	}
	past := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(past)
		_ = p.conn.SetWriteDeadline(time.Unix(1, 0))
	})
	_, err := p.conn.Write(b)
	if !cancel() {
		<-past // the deadline must not affect the next write
	}
	return err
}

// request is a command in the protocol's terms.
type request struct {
	Execute   string `json:"execute"`
	Arguments any    `json:"arguments,omitempty"`
}

func (p *port) send(ctx context.Context, command string, args any, limit time.Time) error {
	b, err := json.Marshal(request{command, args})
	if err != nil {
		return err
	}
	return p.write(ctx, append(b, '\n'), limit)
}

// line reads the next non-empty line, without its end. A line longer than most bytes is errLong.
func (p *port) line(ctx context.Context, most int, limit time.Time) ([]byte, error) {
	p.arm(ctx, limit)
	return readLine(p.in, most)
}

func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > limit:
			return nil, errLong
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return nil, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return line, nil
		}
	}
}

// sync drops everything in progress in both directions.
func (p *port) sync(ctx context.Context, limit time.Time) error {
	id := syncID()
	ask := fmt.Appendf([]byte{sentinel}, "{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":%d}}\n", id)
	if err := p.write(ctx, ask, limit); err != nil {
		return err
	}
	p.arm(ctx, limit)
	for {
		if err := skip(p.in); err != nil {
			return err
		}
		line, err := readLine(p.in, syncLimit)
		if err != nil && !errors.Is(err, errLong) {
			return err
		}
		if err == nil && answers(line, id) {
			return nil
		}
	}
}

// settle asks for a sign that everything earlier is done, and returns the answer that came before that sign, nil if
// none came.
func (p *port) settle(ctx context.Context, limit time.Time) ([]byte, error) {
	id := syncID()
	if err := p.send(ctx, "guest-sync", map[string]int64{"id": id}, limit); err != nil {
		return nil, err
	}
	p.arm(ctx, limit)
	var first []byte
	for {
		line, err := readLine(p.in, syncLimit)
		if err != nil || answers(line, id) {
			return first, err
		}
		if first == nil {
			first = line
		}
	}
}

// syncID is a number that every JSON parser represents exactly.
func syncID() int64 { return rand.Int64N(1 << 53) }

// skip reads up to and including the next sentinel.
func skip(r *bufio.Reader) error {
	for {
		switch _, err := r.ReadSlice(sentinel); {
		case err == nil:
			return nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return err
		}
	}
}

func answers(line []byte, id int64) bool {
	var got int64
	return decode(line, &got) == nil && got == id
}

// classUnknown is the class of the error of a command that the agent does not have or has switched off.
const classUnknown = "CommandNotFound"

// refusal is the agent's error.
type refusal struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (r *refusal) Error() string { return "qemu-guest-agent says: " + r.Desc }

// decode reads an answer: its result, or its error as a *refusal. Anything else is an error of another type.
func decode(line []byte, result any) error {
	var reply struct {
		Return json.RawMessage `json:"return"`
		Error  *refusal        `json:"error"`
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	if err := dec.Decode(&reply); err != nil {
		return errors.New("the answer of qemu-guest-agent is not JSON")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("the answer of qemu-guest-agent is followed by other data")
	}
	switch {
	case reply.Error != nil:
		return &refusal{Class: reply.Error.Class, Desc: printable(reply.Error.Desc)}
	case reply.Return == nil:
		return errors.New("the answer of qemu-guest-agent has neither a result nor an error")
	case result == nil:
		return nil
	}
	if err := json.Unmarshal(reply.Return, result); err != nil {
		return errors.New("the result of qemu-guest-agent does not match its protocol")
	}
	return nil
}

// printable is a text of the guest, made safe for a message or a table.
func printable(s string) string {
	const most = 300
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// parseBoot reads a boot id and an uptime, each on a line of its own.
func parseBoot(out []byte) (id string, uptimeMS int64) {
	f := strings.Fields(string(out))
	if len(f) < 2 || len(f[0]) != 36 || printable(f[0]) != f[0] {
		return "", 0
	}
	up, err := strconv.ParseFloat(f[1], 64)
	if err != nil || !(up >= 0 && up < 1e12) {
		return f[0], 0
	}
	return f[0], int64(up * 1000)
}
