package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// inputPiece is how much of stdin is read and sent at once, in bytes.
const inputPiece = 32 << 10

// ended reports whether a stream's error is its normal end.
func ended(err error) bool { return errors.Is(err, io.EOF) }

var (
	_ guest.Attacher  = (*session)(nil)
	_ guest.Forwarder = (*session)(nil)
)

// Exec implements guest.Agent. See talk for st.Stdin.
func (s *session) Exec(ctx context.Context, e guest.Exec, st guest.Streams) (int, error) {
	return s.talk(ctx, "run a command in the guest", s.client.Exec, &guestv1.ExecStart{
		Command: e.Command, Env: environ(e.Env), Workdir: e.WorkDir, User: e.User, Tty: e.TTY,
		Size: size(e.Rows, e.Cols), Stdin: st.Stdin != nil, Container: e.Container,
	}, st)
}

// Attach implements guest.Attacher. See talk for st.Stdin.
func (s *session) Attach(ctx context.Context, a guest.Attach, st guest.Streams) error {
	_, err := s.talk(ctx, "attach to the guest's process", s.client.Attach, &guestv1.ExecStart{
		Size: size(a.Rows, a.Cols), Stdin: st.Stdin != nil, Container: a.Container,
	}, st)
	return err
}

// Forward implements guest.Forwarder. See talk for st.Stdin.
func (s *session) Forward(ctx context.Context, port int, st guest.Streams) error {
	_, err := s.talk(ctx, fmt.Sprintf("connect to port %d in the guest", port), s.client.Forward, &guestv1.ExecStart{Port: uint32(port)}, st)
	return err
}

func size(rows, cols uint16) *guestv1.WindowSize {
	return &guestv1.WindowSize{Rows: uint32(rows), Cols: uint32(cols)}
}

// talk carries streams to and from what a call started in the guest, and returns the exit code.
//
// A Read of st.Stdin that is in progress when the command ends cannot be interrupted. It keeps one goroutine until the
// reader returns, and its bytes are dropped. Callers must close their reader.
func (s *session) talk(
	ctx context.Context, what string,
	call func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[guestv1.ExecInput, guestv1.ExecOutput], error),
	start *guestv1.ExecStart, st guest.Streams,
) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := call(ctx)
	if err != nil {
		return 0, s.failure(ctx, what, err)
	}
	x := &execution{stream: stream, credit: make(chan int, 1)}
	err = x.send(&guestv1.ExecInput{Input: &guestv1.ExecInput_Start{Start: start}})
	if err != nil && !ended(err) { // on io.EOF, Recv returns the reason
		return 0, s.failure(ctx, what, err)
	}
	if st.Stdin != nil {
		go x.feed(ctx, st.Stdin) // the comment above says when it ends
	}
	var controlling sync.WaitGroup
	controlling.Go(func() { x.control(ctx, st) })
	code, err := x.receive(ctx, st)
	if cause := context.Cause(ctx); err != nil && cause == nil {
		err = s.failure(ctx, what, err)
	} else if err != nil {
		err = fmt.Errorf("%s: %w", what, cause)
	}
	cancel()
	controlling.Wait()
	return code, err
}

// execution is the host's side of one call with streams.
type execution struct {
	stream  guestv1.Guest_ExecClient
	credit  chan int   // bytes of stdin that are allowed and that feed has not seen yet
	sending sync.Mutex // a stream allows one Send at a time
}

func (x *execution) send(m *guestv1.ExecInput) error {
	x.sending.Lock()
	defer x.sending.Unlock()
	return x.stream.Send(m)
}

// receive delivers output until the exit code arrives.
func (x *execution) receive(ctx context.Context, st guest.Streams) (int, error) {
	for {
		m, err := x.stream.Recv()
		if ended(err) {
			return 0, errdefs.Unavailablef("the guest ended the call without an exit code")
		}
		if err != nil {
			return 0, err
		}
		switch m := m.GetOutput().(type) {
		case *guestv1.ExecOutput_Stdout:
			err = deliver(st.Stdout, m.Stdout)
		case *guestv1.ExecOutput_Stderr:
			err = deliver(st.Stderr, m.Stderr)
		case *guestv1.ExecOutput_StdinCredit:
			x.allow(ctx, int(m.StdinCredit))
		case *guestv1.ExecOutput_ExitCode:
			return code(m.ExitCode), nil
		}
		if err != nil {
			return 0, fmt.Errorf("deliver its output: %w", err)
		}
	}
}

func deliver(w io.Writer, p []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(p)
	return err
}

// allow adds n to the credit and never waits for feed.
func (x *execution) allow(ctx context.Context, n int) {
	for {
		select {
		case x.credit <- n:
			return
		case have := <-x.credit:
			n += have
		case <-ctx.Done():
			return
		}
	}
}

// feed sends stdin as far as the guest's credit allows.
func (x *execution) feed(ctx context.Context, stdin io.Reader) {
	buf := make([]byte, inputPiece)
	credit := 0
	for {
		for credit <= 0 {
			select {
			case n := <-x.credit:
				credit += n
			case <-ctx.Done():
				return
			}
		}
		n, err := stdin.Read(buf[:min(len(buf), credit)])
		if n > 0 {
			credit -= n
			if x.send(&guestv1.ExecInput{Input: &guestv1.ExecInput_Stdin{Stdin: buf[:n]}}) != nil {
				return
			}
		}
		if err != nil { // also for a reader that failed: the command sees the end of its input
			_ = x.send(&guestv1.ExecInput{Input: &guestv1.ExecInput_StdinClosed{StdinClosed: true}})
			return
		}
	}
}

// control sends terminal sizes and signals until ctx ends.
func (x *execution) control(ctx context.Context, st guest.Streams) {
	for st.Resize != nil || st.Signals != nil {
		var m *guestv1.ExecInput
		select {
		case <-ctx.Done():
			return
		case w, ok := <-st.Resize:
			if !ok {
				st.Resize = nil
				continue
			}
			size := &guestv1.WindowSize{Rows: uint32(w.Rows), Cols: uint32(w.Cols)}
			m = &guestv1.ExecInput{Input: &guestv1.ExecInput_Resize{Resize: size}}
		case n, ok := <-st.Signals:
			if !ok {
				st.Signals = nil
				continue
			}
			m = &guestv1.ExecInput{Input: &guestv1.ExecInput_Signal{Signal: int32(n)}}
		}
		if x.send(m) != nil {
			return
		}
	}
}
