//go:build e2e

package e2e

import (
	"bytes"
	"errors"
	"image/png"
	"io"
	"net"
	"os"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
)

// viewerTime is how long a viewer may wait for anything.
const viewerTime = busy * 20 * time.Second

// viewersKey is the key of the connections of a script's viewers, by name.
type viewersKey struct{}

// viewer is a VNC viewer of the script:
//
//	viewer start NAME NETWORK ADDRESS   connects as soon as somebody listens, and looks at the size of the screen
//	viewer leave NAME                   disconnects
//	viewer gone NAME                    waits until the server has ended the connection
func viewer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: viewer start|leave|gone NAME ...")
	}
	all := ts.Value(viewersKey{}).(map[string]net.Conn)
	conn := all[args[1]]
	switch args[0] {
	case "start":
		conn = dialViewer(ts, args[2], args[3])
		ts.Defer(func() { conn.Close() })
		all[args[1]] = conn
	case "leave":
		ts.Check(conn.Close())
	case "gone":
		ts.Check(conn.SetDeadline(time.Now().Add(viewerTime)))
		_, err := io.Copy(io.Discard, conn)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			ts.Fatalf("viewer %s is still connected", args[1])
		}
	}
}

func dialViewer(ts *testscript.TestScript, network, address string) net.Conn {
	if network == "unix" {
		address = ts.MkAbs(address)
	}
	var conn net.Conn
	var err error
	for deadline := time.Now().Add(viewerTime); time.Now().Before(deadline); <-time.After(50 * time.Millisecond) {
		if conn, err = net.Dial(network, address); err == nil {
			break
		}
	}
	ts.Check(err)
	ts.Check(conn.SetDeadline(time.Now().Add(viewerTime)))
	width, height, err := hypervisortest.Greet(conn)
	ts.Check(err)
	if width == 0 || height == 0 {
		ts.Fatalf("the screen is %d x %d", width, height)
	}
	return conn
}

// picture fails unless a file is a PNG of at least two colours: picture FILE
func picture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: picture FILE")
	}
	shown, err := png.Decode(bytes.NewReader([]byte(ts.ReadFile(args[0]))))
	ts.Check(err)
	size := shown.Bounds()
	first := shown.At(size.Min.X, size.Min.Y)
	other := 0
	for x := size.Min.X; x < size.Max.X; x++ {
		for y := size.Min.Y; y < size.Max.Y; y++ {
			if shown.At(x, y) != first {
				other++
			}
		}
	}
	ts.Logf("%v, %d pixels are not %v", size, other, first)
	if other == 0 {
		ts.Fatalf("%s has one colour", args[0])
	}
}
