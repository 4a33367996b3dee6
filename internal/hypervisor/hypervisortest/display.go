package hypervisortest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// Greet begins a session as an RFB client (RFC 6143, 7.1 and 7.3), without a password and shared with others. It returns the size of the
// screen.
func Greet(server io.ReadWriter) (width, height int, err error) {
	const version = "RFB 003.008\n"
	read := func(n int) []byte {
		buf := make([]byte, n)
		if err == nil {
			_, err = io.ReadFull(server, buf)
		}
		return buf
	}
	write := func(b ...byte) {
		if err == nil {
			_, err = server.Write(b)
		}
	}
	if got := read(len(version)); err == nil && string(got) != version {
		return 0, 0, fmt.Errorf("the server begins with %q, not with %q", got, version)
	}
	write([]byte(version)...)
	const none = 1 // the security type without a password
	if types := read(int(read(1)[0])); err == nil && !bytes.Contains(types, []byte{none}) {
		return 0, 0, fmt.Errorf("the server offers the security types %v, not %d", types, none)
	}
	write(none)
	if result := binary.BigEndian.Uint32(read(4)); err == nil && result != 0 {
		return 0, 0, fmt.Errorf("the server refuses a client without a password: %d", result)
	}
	write(1) // shared
	init := read(24)
	read(int(binary.BigEndian.Uint32(init[20:]))) // the name of the screen
	return int(binary.BigEndian.Uint16(init)), int(binary.BigEndian.Uint16(init[2:])), err
}

func displayerOf(t *testing.T, i hypervisor.Instance) hypervisor.Displayer {
	t.Helper()
	d, ok := hypervisor.As[hypervisor.Displayer](i)
	if !ok {
		t.Skip("no Displayer")
	}
	return d
}

// watch opens a display and begins a session.
func (s *suite) watch(t *testing.T, d hypervisor.Displayer) (conn net.Conn, size image.Point) {
	t.Helper()
	conn, err := d.OpenDisplay(s.ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(s.Limit))
	width, height, err := Greet(conn)
	if err != nil {
		t.Fatal(err)
	}
	return conn, image.Pt(width, height)
}

// testDisplay looks at a screen: two viewers at a time, pictures, and both after a restart of the daemon.
func testDisplay(t *testing.T, s *suite) {
	p := s.plan(t)
	p.Graphics = true
	i := asking[hypervisor.Displayer](t, s, p)
	d := displayerOf(t, i)
	s.Booted(t, i)
	_, size := s.watch(t, d)
	_, again := s.watch(t, d)
	if size.X == 0 || size.Y == 0 || size != again {
		t.Errorf("two viewers see screens of %v and %v", size, again)
	}
	for _, wake := range []bool{false, true} {
		picture, err := d.Screenshot(s.ctx(t), wake)
		if err != nil {
			t.Fatal(err)
		}
		if seen, err := png.Decode(bytes.NewReader(picture)); err != nil || seen.Bounds().Size() != size {
			t.Errorf("a picture of a screen of %v: %v, %v", size, seen.Bounds(), err)
		}
	}
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	d = displayerOf(t, i)
	last, _ := s.watch(t, d)
	if _, err := d.Screenshot(s.ctx(t), false); err != nil {
		t.Errorf("after a restart of the daemon: %v", err)
	}
	s.kill(t, i)
	if _, err := io.Copy(io.Discard, last); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the stream of an ended guest does not end: %v", err)
	}
	_, err := d.OpenDisplay(s.ctx(t))
	_, perr := d.Screenshot(s.ctx(t), false)
	for _, err := range []error{err, perr} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("after the end: %v, want NotFound", err)
		}
	}
	s.nothingLeft(t, p)
}

// testDisplaySaved: a guest that resumes from saved state has its screen.
func testDisplaySaved(t *testing.T, s *suite) {
	p := s.plan(t)
	p.Graphics = true
	s.kill(t, asking[hypervisor.Displayer](t, s, p))
	i, snapshotter := s.saver(t, p)
	_, size := s.watch(t, displayerOf(t, i))
	saved := savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), saved); err != nil {
		t.Fatal(err)
	}
	q := s.from(t, saved)
	q.Graphics = true
	j := s.launch(t, q)
	if _, again := s.watch(t, displayerOf(t, j)); again != size {
		t.Errorf("the screen had the size %v when it was saved, and has %v", size, again)
	}
	if _, err := displayerOf(t, j).Screenshot(s.ctx(t), false); err != nil {
		t.Error(err)
	}
	s.kill(t, i)
	s.kill(t, j)
}

func testNoDisplay(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	d := displayerOf(t, i)
	if c, err := d.OpenDisplay(s.ctx(t)); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("%v, %v, want Unsupported", c, err)
	}
	if _, err := d.Screenshot(s.ctx(t), false); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("%v, want Unsupported", err)
	}
	s.kill(t, i)
}
