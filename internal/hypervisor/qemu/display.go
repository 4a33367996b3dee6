package qemu

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
)

var _ hypervisor.Displayer = (*instance)(nil)

const (
	// graphicsOverhead is the memory in bytes that QEMU may need for a screen: 16 MiB of video memory, as much for the copy that its
	// VNC server compares with it, and what it encodes for viewers.
	graphicsOverhead = 64 << 20

	maxScreenshot   = 64 << 20 // bytes of a PNG; that of the largest screen is smaller
	screenshotLimit = 20 * time.Second
	cleanupLimit    = 5 * time.Second
)

// graphics gives the guest a screen. The VNC server listens nowhere: OpenDisplay passes it connections. The firmware shows the same on
// the screen and on the serial console. Keyboard and mouse belong to the machine.
func (c *command) graphics() {
	c.add("-vnc", "none")
	c.device(props{"driver": "VGA", "id": "vga0"}.at(slotBasic, 3))
}

// viewers numbers the connections, so that two at a time have different names.
var viewers atomic.Uint64

// OpenDisplay implements hypervisor.Displayer.
func (i *instance) OpenDisplay(ctx context.Context) (net.Conn, error) {
	if err := i.shows(); err != nil {
		return nil, err
	}
	c, err := i.connected(ctx)
	if err != nil {
		return nil, fmt.Errorf("VM %s: %w", i.h.ID, err)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("VM %s: connect to its screen: %w", i.h.ID, err)
	}
	defer theirs.Close() // QEMU has its own copy
	name := fmt.Sprintf("viewer%d", viewers.Add(1))
	if err = c.ExecuteFile(ctx, "getfd", props{"fdname": name}, nil, theirs); err == nil {
		err = c.Execute(ctx, "add_client", props{"protocol": "vnc", "fdname": name, "skipauth": true}, nil)
	}
	if err != nil {
		_ = ours.Close()
		cleanUp(ctx, c, "closefd", props{"fdname": name})
		return nil, fmt.Errorf("VM %s: connect to its screen: %w", i.h.ID, i.OrEnded(err))
	}
	return ours, nil
}

// Screenshot implements hypervisor.Displayer. QEMU writes the picture to a file in memory, which counts as its own.
func (i *instance) Screenshot(ctx context.Context, wake bool) ([]byte, error) {
	if err := i.shows(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, screenshotLimit)
	defer cancel()
	c, err := i.connected(ctx)
	var png []byte
	if err == nil && wake {
		err = i.OrEnded(nudge(ctx, c))
	}
	if err == nil {
		png, err = screendump(ctx, c)
		err = i.OrEnded(err)
	}
	if err != nil {
		return nil, fmt.Errorf("screenshot of VM %s: %w", i.h.ID, err)
	}
	return png, nil
}

// shows refuses a guest without a screen.
func (i *instance) shows() error {
	if !i.h.Graphics {
		return errdefs.Unsupportedf("VM %s has no graphics", i.h.ID)
	}
	return nil
}

// nudge moves the mouse to and fro.
func nudge(ctx context.Context, c *qmp.Client) error {
	for _, step := range []int{1, -1} {
		move := props{"type": "rel", "data": props{"axis": "x", "value": step}}
		if err := c.Execute(ctx, "input-send-event", props{"events": []props{move}}, nil); err != nil {
			return err
		}
	}
	return nil
}

func screendump(ctx context.Context, c *qmp.Client) ([]byte, error) {
	fd, err := unix.MemfdCreate("screenshot", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	picture := os.NewFile(uintptr(fd), "screenshot")
	defer picture.Close()
	// QEMU looks for a descriptor in exactly the mode in which it opens the file.
	w, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open the file in memory: %w", err)
	}
	defer w.Close()
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := c.ExecuteFile(ctx, "add-fd", nil, &set, w); err != nil {
		return nil, err
	}
	defer cleanUp(ctx, c, "remove-fd", props{"fdset-id": set.ID})
	if err := c.Execute(ctx, "screendump", props{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "format": "png"}, nil); err != nil {
		return nil, err
	}
	png, err := io.ReadAll(io.NewSectionReader(picture, 0, maxScreenshot+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the picture: %w", err)
	case len(png) > maxScreenshot:
		return nil, errdefs.Exhaustedf("the picture is larger than %d bytes", maxScreenshot)
	case !bytes.HasPrefix(png, []byte("\x89PNG\r\n\x1a\n")):
		return nil, errdefs.DataLossf("QEMU did not write a PNG")
	}
	return png, nil
}

// cleanUp runs a command that releases something, whatever becomes of ctx. If it fails, that is released with the connection to QEMU.
func cleanUp(ctx context.Context, c *qmp.Client, command string, args props) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupLimit)
	defer cancel()
	_ = c.Execute(ctx, command, args, nil)
}

// socketPair returns two connected sockets: one for this process, and a descriptor of the other.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	near, far := os.NewFile(uintptr(fds[0]), "viewer"), os.NewFile(uintptr(fds[1]), "viewer")
	conn, err := net.FileConn(near)
	_ = near.Close() // FileConn has made a duplicate
	if err != nil {
		_ = far.Close()
		return nil, nil, err
	}
	return conn, far, nil
}
