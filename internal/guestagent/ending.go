package guestagent

import (
	"context"
	"time"

	"google.golang.org/grpc"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// farewell lets calls finish that are about to end, including the one that asked for the power-off.
func farewell(srv *grpc.Server) {
	done := make(chan struct{})
	go func() { // ends with srv.Stop at the latest
		defer close(done)
		srv.GracefulStop()
	}()
	select {
	case <-done:
	case <-time.After(farewellPatience):
		srv.Stop()
		<-done
	}
}

// Wait implements guestv1.GuestServer.
func (s *Server) Wait(ctx context.Context, _ *guestv1.WaitRequest) (*guestv1.WaitReply, error) {
	s.addWaiting(1)
	select {
	case <-s.started:
	case <-ctx.Done():
		s.addWaiting(-1)
		return nil, ctx.Err()
	}
	m, several := s.mainProcess(), s.containers()
	var done <-chan struct{}
	if several != nil {
		done = several.done
	} else {
		done = m.child.done
	}
	select {
	case <-done:
	case <-ctx.Done():
		s.addWaiting(-1)
		return nil, ctx.Err()
	}
	if several != nil {
		return several.exit(), nil
	}
	return &guestv1.WaitReply{
		Code: int32(m.child.code()), StartedUnixNano: m.started.UnixNano(), FinishedUnixNano: m.child.finished.UnixNano(),
	}, nil
}

func (s *Server) addWaiting(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting += n
}

// AckExit implements guestv1.GuestServer.
func (s *Server) AckExit(context.Context, *guestv1.AckExitRequest) (*guestv1.AckExitReply, error) {
	if m, several := s.mainProcess(), s.containers(); (m == nil || !m.child.ended()) && (several == nil || !isClosed(several.done)) {
		return nil, errdefs.Preconditionf("the main process has not ended; there is no exit code to acknowledge")
	}
	s.mu.Lock()
	select {
	case <-s.acked:
	default:
		close(s.acked)
	}
	s.mu.Unlock()
	s.askOff(0)
	return &guestv1.AckExitReply{}, nil
}

// Poweroff implements guestv1.GuestServer.
func (s *Server) Poweroff(_ context.Context, r *guestv1.PoweroffRequest) (*guestv1.PoweroffReply, error) {
	if r.GetGraceMs() < 0 {
		return nil, errdefs.Invalidf("the grace period of %d ms is negative", r.GetGraceMs())
	}
	s.askOff(time.Duration(r.GetGraceMs()) * time.Millisecond)
	return &guestv1.PoweroffReply{}, nil
}

// PowerButton does what Poweroff does, after a press of the machine's power button.
func (s *Server) PowerButton(grace time.Duration) { s.askOff(grace) }

// askOff requests a power-off unless one was already requested.
func (s *Server) askOff(grace time.Duration) {
	select {
	case s.off <- grace:
	default:
	}
}

// stopAll asks the main process or the containers to end, and kills what is left after grace.
func (s *Server) stopAll(ctx context.Context, grace time.Duration) {
	m, several := s.mainProcess(), s.containers()
	switch {
	case several != nil:
		several.shutdown(ctx, grace)
	case m == nil:
		return
	default:
		m.askToEnd()
		if !m.child.waitFor(ctx, grace) {
			m.child.signal(killSignal)
			m.child.waitFor(ctx, ackPatience)
		}
	}
	s.mu.Lock()
	waiting := s.waiting
	s.mu.Unlock()
	if waiting == 0 {
		return
	}
	select {
	case <-s.acked:
	case <-time.After(ackPatience):
	case <-ctx.Done():
	}
}
