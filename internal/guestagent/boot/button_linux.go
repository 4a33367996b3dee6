package boot

import (
	"context"
	"encoding/binary"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

// From linux/input.h and linux/input-event-codes.h; struct input_event is 24 bytes: time (16), type, code, value.
const (
	eventSize = 24
	evKey     = 1
	keyPower  = 116
)

// WatchPowerButton calls press for every press of the machine's power button until ctx ends. Without a power button it
// returns at once.
func WatchPowerButton(ctx context.Context, press func()) {
	devices, _ := filepath.Glob("/dev/input/event*")
	for _, dev := range devices {
		name, _ := os.ReadFile(filepath.Join("/sys/class/input", filepath.Base(dev), "device/name"))
		if string(name) != "Power Button\n" {
			continue
		}
		f, err := os.Open(dev)
		if err != nil {
			continue
		}
		stop := context.AfterFunc(ctx, func() { f.Close() })
		readEvents(f, press)
		stop()
		f.Close()
		return
	}
}

// CatchCtrlAltDel returns what gets every Ctrl+Alt+Del of the machine, of which the kernel tells process 1, unless it restarts the machine then. It comes first: an untold
// process 1 would end.
func CatchCtrlAltDel() <-chan os.Signal {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT)
	return told
}

// WatchCtrlAltDel calls press for every Ctrl+Alt+Del until ctx ends.
func WatchCtrlAltDel(ctx context.Context, told <-chan os.Signal, press func()) {
	for {
		select {
		case <-told:
			press()
		case <-ctx.Done():
			return
		}
	}
}

func readEvents(f *os.File, press func()) {
	buf := make([]byte, 16*eventSize)
	for {
		n, err := f.Read(buf)
		if err != nil {
			return
		}
		for b := buf[:n]; len(b) >= eventSize; b = b[eventSize:] {
			kind, code := binary.NativeEndian.Uint16(b[16:]), binary.NativeEndian.Uint16(b[18:])
			if kind == evKey && code == keyPower && binary.NativeEndian.Uint32(b[20:]) == 1 {
				press()
			}
		}
	}
}
