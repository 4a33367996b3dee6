package nodeapi

import (
	"context"
	"errors"
	"io"
	"sync/atomic"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (v *vms) Console(stream nodev1.VMs_ConsoleServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetRef() == "" {
		return errdefs.Invalidf("the first message of a console must name the VM")
	}
	con, err := v.guests.Console(stream.Context(), m.GetRef())
	if err != nil {
		return err
	}
	defer con.Close()
	// Close unblocks Read below when the client or the server goes away.
	defer context.AfterFunc(stream.Context(), func() { con.Close() })()
	if err := stream.Send(&nodev1.ConsoleResponse{Of: &nodev1.ConsoleResponse_Opened{Opened: true}}); err != nil {
		return err
	}
	var left atomic.Bool // the client has announced its end, and the guest has all that it sent
	// Ends with this call, whose return ends Recv and closes con.
	go func() {
		defer con.Close()
		for {
			m, err := stream.Recv()
			if err != nil {
				left.Store(errors.Is(err, io.EOF))
				return
			}
			if _, err := con.Write(m.GetData()); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, outputChunk)
	for {
		n, err := con.Read(buf)
		if n > 0 {
			if err := stream.Send(&nodev1.ConsoleResponse{Of: &nodev1.ConsoleResponse_Data{Data: buf[:n]}}); err != nil {
				return err
			}
		}
		switch {
		case err == nil:
		case left.Load():
			return nil
		case stream.Context().Err() != nil:
			return stream.Context().Err()
		case errors.Is(err, io.EOF):
			return nil
		default:
			return errdefs.New(errdefs.Unavailable, "read the console of %s: %w", m.GetRef(), err)
		}
	}
}
