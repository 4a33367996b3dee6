package nodeapi

import (
	"context"
	"errors"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"

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
	return connect(stream, con, "console of "+m.GetRef())
}

func (v *vms) Display(stream nodev1.VMs_DisplayServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	open := m.GetDisplay()
	if open.GetRef() == "" {
		return errdefs.Invalidf("the first message to a screen must name the VM")
	}
	con, err := v.guests.Display(stream.Context(), open.GetRef(), open.GetKeep())
	if err != nil {
		return err
	}
	return connect(stream, con, "screen of "+open.GetRef())
}

func (v *vms) Screenshot(r *nodev1.ScreenshotRequest, stream grpc.ServerStreamingServer[nodev1.ExportResponse]) error {
	png, err := v.guests.Screenshot(stream.Context(), r.GetRef(), r.GetWake())
	if err != nil {
		return err
	}
	w := exportWriter(stream)
	if _, err := w.Write(png); err != nil {
		return err
	}
	return w.Flush()
}

// connect copies between the client and con, which it closes.
func connect(stream nodev1.VMs_ConsoleServer, con io.ReadWriteCloser, what string) error {
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
			return errdefs.New(errdefs.Unavailable, "read the %s: %w", what, err)
		}
	}
}
