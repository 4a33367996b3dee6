package appliance

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

// Unreadable serves on the address of a machine whose state cannot be read, because of why, until ctx ends. Every call is answered with
// that error, so that whoever calls learns it, and nobody can adopt the machine. Its certificate is another one each time. Console shows
// the reason to the person in front of the machine; it may be nil.
func Unreadable(ctx context.Context, listen string, why error, console io.Writer, log *slog.Logger) error {
	log.Error("STATE UNREADABLE: the machine cannot be used or adopted until its state is repaired", "err", why)
	if console != nil {
		fmt.Fprintf(console, "\n  STATE UNREADABLE: the machine cannot be used or adopted until its state is repaired\n  %v\n\n", why)
	}
	certificate, err := identity.Temporary()
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return fmt.Errorf("serve the API of the appliance: %w", err)
	}
	refusal := grpcerr.ToStatus(errdefs.DataLossf("the state of this machine cannot be read, so it cannot be used or adopted; look at its console"))
	s := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate}})),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return refusal }),
	)
	defer context.AfterFunc(ctx, s.Stop)()
	if err := s.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}
