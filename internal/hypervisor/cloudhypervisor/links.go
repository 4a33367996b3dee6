package cloudhypervisor

import (
	"context"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// carrier is an interface with which a guest was launched.
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

// OpenLink implements hypervisor.LinkOpener. The program cannot take the carrier of a guest.
func (i *instance) OpenLink(ctx context.Context, place int) error {
	if err := i.Alive(); err != nil {
		return err
	}
	at := slices.IndexFunc(i.h.Links, func(l carrier) bool { return l.Place == place && l.FD != 0 })
	if at >= 0 {
		tap, err := i.Proc.Descriptor(i.h.Links[at].FD)
		if err != nil {
			return i.Named(i.OrEnded(err))
		}
		defer tap.Close()
		if err := pass(tap, true); !errors.Is(err, unix.EBADFD) {
			return i.Named(err)
		}
		// The tap is gone with its interface, in whose place there may be another one.
	}
	now, err := i.devices(ctx)
	if err != nil {
		return i.Named(err)
	}
	if !now.configured(nicID(place)) {
		return errdefs.NotFoundf("VM %s has no interface at place %d", i.h.ID, place)
	}
	return nil
}
