package pod

import (
	"context"
	"io"
	"net"
	"strconv"
	"time"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/console"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file connects to a guest that boots itself, in which no agent of ours is.

// console connects a client to the serial console of r: with input from its last screen on, without input from the begin of its log.
func (t streams) console(ctx context.Context, r vm.Record, s guest.Streams) error {
	if s.Stdin == nil && s.Stdout != nil {
		return t.s.engine.Logs(ctx, string(r.ID), guest.LogOptions{Follow: true, Tail: -1, Serial: true}, func(e guest.LogEntry) error {
			_, err := s.Stdout.Write(e.Data)
			return err
		})
	}
	return t.s.serial.Attach(ctx, r.ID, console.Source{
		Open:   func(ctx context.Context) (io.ReadWriteCloser, error) { return t.s.engine.Console(ctx, string(r.ID)) },
		Screen: func(ctx context.Context) []byte { return console.ScreenOf(ctx, t.s.engine, r.ID) },
	}, s)
}

// dialTime limits how long a guest may take to accept a connection.
const dialTime = 10 * time.Second

// dial connects a client to a port of the address of r.
func dial(ctx context.Context, r vm.Record, port int32, stream io.ReadWriter) error {
	ip := convert.Address(r)
	if ip == "" {
		return errdefs.Preconditionf("the sandbox %s has no address", convert.SandboxID(r.ID))
	}
	limited, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	c, err := new(net.Dialer).DialContext(limited, "tcp", net.JoinHostPort(ip, strconv.Itoa(int(port))))
	if err != nil {
		return errdefs.Unavailablef("connect to port %d of sandbox %s: %w; the program in the guest must listen on the guest's address, not only on loopback", port, convert.SandboxID(r.ID), err)
	}
	return reach.Join(ctx, c, stream)
}
