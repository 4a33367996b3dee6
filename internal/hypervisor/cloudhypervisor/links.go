package cloudhypervisor

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// carrier is an interface of a guest.
type carrier struct {
	Place int `json:"place"`
	FD    int `json:"fd,omitempty"` // of its tap in the process; 0: packets have always passed it
}

// A packet begins with a header. While the kernel expects a longer one than any packet has, it refuses each packet with EINVAL, in both directions, and the
// program drops what is refused so. With another error, such as that of a tap that is down, the program would end.
const (
	headerSize = 12 // as the program sets it
	headerNone = 1 << 30
)

// pass lets packets pass a tap, or lets none pass.
// Errors: Unavailable.
func pass(tap *os.File, packets bool) error {
	size := headerNone
	if packets {
		size = headerSize
	}
	req, err := unix.NewIfreq("")
	if err == nil {
		err = unix.IoctlIfreq(int(tap.Fd()), unix.TUNGETIFF, req) // it is a tap: the process may be in the hands of its guest
	}
	if err == nil {
		err = unix.IoctlSetPointerInt(int(tap.Fd()), unix.TUNSETVNETHDRSZ, size)
	}
	if err != nil {
		return errdefs.Unavailablef("let packets pass a tap, or none: %w", err)
	}
	return nil
}

// SetLink implements hypervisor.Linker for the end of Incoming.LinksDown alone: the program cannot take the carrier of a guest.
func (i *instance) SetLink(_ context.Context, place int, up bool) error {
	if err := i.Alive(); err != nil {
		return err
	}
	for _, l := range i.h.Links {
		if l.Place != place {
			continue
		}
		if !up {
			return errdefs.Unsupportedf("VM %s: Cloud Hypervisor cannot take the carrier of an interface; run the VM with the driver qemu", i.h.ID)
		}
		if l.FD == 0 {
			return nil
		}
		tap, err := i.Proc.Descriptor(l.FD)
		if err != nil {
			return i.Named(i.OrEnded(err))
		}
		defer tap.Close()
		return i.Named(pass(tap, true))
	}
	return errdefs.NotFoundf("VM %s has no interface at place %d", i.h.ID, place)
}
