package fake

import (
	"bytes"
	"context"
	"image"
	"image/png"
	"io"
	"net"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

var _ hypervisor.Displayer = (*Instance)(nil)

// The screen of a fake guest is this large, and white.
const screenWidth, screenHeight = 8, 4

// OpenDisplay implements hypervisor.Displayer. The server greets its client and then shows nothing.
func (i *Instance) OpenDisplay(ctx context.Context) (net.Conn, error) {
	if err := i.shows(ctx); err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	go func() { // ends when either side closes
		_ = greet(theirs)
		_, _ = io.Copy(io.Discard, theirs)
		_ = theirs.Close()
	}()
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	return i.track(ours, func() {})
}

// Screenshot implements hypervisor.Displayer.
func (i *Instance) Screenshot(ctx context.Context, _ bool) ([]byte, error) {
	if err := i.shows(ctx); err != nil {
		return nil, err
	}
	picture := image.NewGray(image.Rect(0, 0, screenWidth, screenHeight))
	for n := range picture.Pix {
		picture.Pix[n] = 0xff
	}
	var b bytes.Buffer
	err := png.Encode(&b, picture)
	return b.Bytes(), err
}

func (i *Instance) shows(ctx context.Context) error {
	if err := i.usable(ctx, OpDisplay); err != nil {
		return err
	}
	if !i.v.Plan.Graphics {
		return errdefs.Unsupportedf("VM %s has no graphics", i.v.Plan.ID)
	}
	return nil
}

// greet begins an RFB session as its server, without a password (RFC 6143, sections 7.1 and 7.3).
func greet(client io.ReadWriter) error {
	const version, name = "RFB 003.008\n", "fake"
	pixels := []byte{32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0}
	screen := append([]byte{0, screenWidth, 0, screenHeight}, pixels...)
	for _, step := range []struct {
		say  []byte
		hear int // bytes of the client's answer
	}{
		{[]byte(version), len(version)},
		{[]byte{1, 1}, 1}, // one security type: none
		{[]byte{0, 0, 0, 0}, 1},
		{append(screen, append([]byte{0, 0, 0, byte(len(name))}, name...)...), 0},
	} {
		if _, err := client.Write(step.say); err != nil {
			return err
		}
		if _, err := io.ReadFull(client, make([]byte, step.hear)); err != nil {
			return err
		}
	}
	return nil
}
