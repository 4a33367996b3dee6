package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/guest/link/linktest"
)

// hostile is a guest that has been taken over.
type hostile struct {
	guestv1.UnimplementedGuestServer
}

func (hostile) Info(context.Context, *guestv1.InfoRequest) (*guestv1.InfoReply, error) {
	return &guestv1.InfoReply{Version: strings.Repeat("x", 2*maxMessage)}, nil
}

func (hostile) Exec(s grpc.BidiStreamingServer[guestv1.ExecInput, guestv1.ExecOutput]) error {
	for range 3 { // allows more input than memory can hold
		if err := s.Send(&guestv1.ExecOutput{Output: &guestv1.ExecOutput_StdinCredit{StdinCredit: 1<<32 - 1}}); err != nil {
			return err
		}
	}
	if err := s.Send(&guestv1.ExecOutput{}); err != nil {
		return err
	}
	return nil // without an exit code
}

func connectHostile(t *testing.T) guest.Agent {
	t.Helper()
	sim := linktest.New()
	srv := grpc.NewServer()
	guestv1.RegisterGuestServer(srv, hostile{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(link.NewPort(sim))
	}()
	a, err := Connector{}.Connect(t.Context(), sim.Dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.Close()
		srv.Stop()
		<-done
		sim.Close()
	})
	return a
}

func TestHostileGuest(t *testing.T) {
	a := connectHostile(t)
	if _, err := a.Info(t.Context()); errdefs.ClassOf(err) != errdefs.ResourceExhausted {
		t.Errorf("a message of half a megabyte: %v", err)
	}
	st := guest.Streams{Stdin: bytes.NewReader(make([]byte, 1<<20)), Stdout: io.Discard}
	if code, err := a.Exec(t.Context(), guest.Exec{Command: []string{"true"}}, st); err == nil {
		t.Errorf("an exec without exit code gave %d", code)
	}
	if _, err := a.Stats(t.Context()); errdefs.ClassOf(err) != errdefs.Unsupported {
		t.Errorf("a call an old agent does not know: %v", err)
	}
}

func TestConnectErrors(t *testing.T) {
	dead := func(context.Context) (net.Conn, error) { return nil, errors.New("no socket") }
	if _, err := (Connector{}).Connect(t.Context(), dead); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	sim := linktest.New()
	defer sim.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := (Connector{}).Connect(ctx, sim.Dial); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a guest that never answers: %v", err)
	}
}
