package nodeapi

import (
	"context"
	"errors"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
)

var errStopping = errors.New("cocoond is stopping; VMs keep running, try again when it is back")

// unary converts every error to its status and logs the call for debugging.
func (s *Server) unary(caller context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	began := time.Now()
	var resp any
	ctx, err := nodewire.TakeBehalf(caller)
	if err == nil {
		resp, err = handler(ctx, req)
	}
	s.note(info.FullMethod, began, err)
	// If a trailer cannot be set, the client only gets a less exact message.
	_ = grpc.SetTrailer(caller, metadata.Pairs(nodeclient.AnsweredKey, "1"))
	return resp, grpcerr.ToStatus(err)
}

// stream does the same for streams, bounds their number and ends them when the server stops.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	began := time.Now()
	ss.SetTrailer(metadata.Pairs(nodeclient.AnsweredKey, "1"))
	select {
	case s.streams <- struct{}{}:
		defer func() { <-s.streams }()
	default:
		return grpcerr.ToStatus(errdefs.Exhaustedf("cocoond serves %d streams already; close some watches, logs or execs", maxStreams))
	}
	ctx, err := nodewire.TakeBehalf(ss.Context())
	if err != nil {
		return grpcerr.ToStatus(err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-s.closing:
			cancel(errStopping)
		case <-done:
		}
	}()
	err = handler(srv, &bounded{ServerStream: ss, ctx: ctx})
	if errors.Is(context.Cause(ctx), errStopping) && err != nil {
		err = errdefs.As(errdefs.Unavailable, errStopping)
	}
	s.note(info.FullMethod, began, err)
	return grpcerr.ToStatus(err)
}

// bounded is a stream whose context also ends with the server.
type bounded struct {
	grpc.ServerStream
	ctx context.Context
}

func (b *bounded) Context() context.Context { return b.ctx }

func (s *Server) note(method string, began time.Time, err error) {
	s.log.Debug("call", "op", path.Base(method), "dur", time.Since(began), "err", err)
}
