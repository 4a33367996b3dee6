package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

// Listens reports whether a program of the host listens on a port of it, which would get no more connections if the port led to a guest.
func Listens(ctx context.Context, p vm.PortMapping) bool {
	at := net.JoinHostPort(p.HostIP, fmt.Sprint(p.HostPort))
	var l io.Closer
	var err error
	switch p.Protocol {
	case vm.TCP:
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", at)
	case vm.UDP:
		l, err = (&net.ListenConfig{}).ListenPacket(ctx, "udp4", at)
	default:
		return false
	}
	if err == nil {
		err = l.Close()
	}
	return errors.Is(err, unix.EADDRINUSE)
}
