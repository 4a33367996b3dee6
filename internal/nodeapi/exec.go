package nodeapi

import (
	"context"
	"errors"
	"io"
	"sync"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodewire"
)

const (
	stdinWindow   = 256 << 10 // bytes of stdin that may wait in the daemon for one command
	signalBacklog = 32        // signals that may wait; more are dropped, as a process would merge them
)

// Exec implements nodev1.VMsServer.
func (v *vms) Exec(stream nodev1.VMs_ExecServer) error {
	start, err := opening(stream)
	if err != nil {
		return err
	}
	ref, command, stdin := nodewire.DecodeExec(start)
	if len(command.Command) == 0 {
		return errdefs.Invalidf("exec in %s: a command is needed", ref)
	}
	return talk(stream, stdin, true, func(ctx context.Context, s guest.Streams) (int, error) {
		return v.guests.Exec(ctx, ref, command, s)
	})
}

// Attach implements nodev1.VMsServer.
func (v *vms) Attach(stream nodev1.VMs_AttachServer) error {
	start, err := opening(stream)
	if err != nil {
		return err
	}
	ref, a, stdin := nodewire.DecodeAttach(start)
	return talk(stream, stdin, true, func(ctx context.Context, s guest.Streams) (int, error) {
		return 0, v.guests.Attach(ctx, ref, a, s)
	})
}

// Forward implements nodev1.VMsServer.
func (v *vms) Forward(stream nodev1.VMs_ForwardServer) error {
	start, err := opening(stream)
	if err != nil {
		return err
	}
	return talk(stream, true, false, func(ctx context.Context, s guest.Streams) (int, error) {
		return 0, v.guests.Forward(ctx, start.GetRef(), int(start.GetPort()), s)
	})
}

// talking is the stream of such a call.
type talking = grpc.BidiStreamingServer[nodev1.ExecRequest, nodev1.ExecResponse]

// opening returns the first message of a stream.
func opening(stream talking) (*nodev1.ExecStart, error) {
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if m.GetStart() == nil {
		return nil, errdefs.Invalidf("the first message must name the VM and what to start")
	}
	return m.GetStart(), nil
}

// talk lets run use the client's streams. Unless started is true, run counts as started when it first reads or
// writes; the client then keeps its input if run cannot start.
func talk(stream talking, withStdin, started bool, run func(context.Context, guest.Streams) (int, error)) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	x := &execution{
		stream: stream,
		stdin:  newQueue(stdinWindow),
		resize: make(chan guest.WinSize, 1),
		signal: make(chan int, signalBacklog),
	}
	defer x.stdin.close(io.ErrClosedPipe)
	if started {
		if err := x.start(); err != nil {
			return err
		}
	}
	// Ends with this call, whose return ends Recv.
	go func() {
		defer cancel()
		x.receive(ctx)
	}()
	streams := guest.Streams{Stdout: x.output(stdoutMessage), Stderr: x.output(stderrMessage), Resize: x.resize, Signals: x.signal}
	if withStdin {
		streams.Stdin = x
	}
	code, err := run(ctx, streams)
	if err != nil {
		return err
	}
	return x.send(&nodev1.ExecResponse{Of: &nodev1.ExecResponse_ExitCode{ExitCode: int32(code)}})
}

// execution is one call with streams in progress: it distributes the client's messages to the streams that the engine
// reads.
type execution struct {
	stream talking
	stdin  *queue
	resize chan guest.WinSize
	signal chan int

	mu      sync.Mutex // guards Send
	started sync.Once
}

// start tells the client, once, that it may send input.
func (x *execution) start() (err error) {
	x.started.Do(func() {
		err = x.send(&nodev1.ExecResponse{Of: &nodev1.ExecResponse_Started{Started: &nodev1.ExecStarted{StdinWindow: stdinWindow}}})
	})
	return err
}

func (x *execution) send(m *nodev1.ExecResponse) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.stream.Send(m)
}

// receive never waits for the command, so that a signal is not stuck behind stdin. It returns when the client is
// gone. If the client has only ended its input, it waits for the end of the call.
func (x *execution) receive(ctx context.Context) {
	for {
		m, err := x.stream.Recv()
		if errors.Is(err, io.EOF) {
			x.stdin.close(io.EOF)
			<-ctx.Done()
			return
		}
		if err != nil {
			x.stdin.close(err)
			return
		}
		switch of := m.GetOf().(type) {
		case *nodev1.ExecRequest_Stdin:
			if !x.stdin.push(of.Stdin) {
				x.stdin.close(errdefs.Exhaustedf("the client sent more than %d bytes of stdin ahead", stdinWindow))
				return
			}
		case *nodev1.ExecRequest_StdinClose:
			x.stdin.close(io.EOF)
		case *nodev1.ExecRequest_Resize:
			latest(x.resize, nodewire.DecodeWinSize(of.Resize))
		case *nodev1.ExecRequest_Signal:
			select {
			case x.signal <- int(of.Signal):
			default:
			}
		}
	}
}

// Read gives stdin to the engine, and returns credit for what was read to the client.
func (x *execution) Read(p []byte) (int, error) {
	if err := x.start(); err != nil {
		return 0, err
	}
	n, err := x.stdin.Read(p)
	if n > 0 {
		if err := x.send(&nodev1.ExecResponse{Of: &nodev1.ExecResponse_StdinCredit{StdinCredit: uint32(n)}}); err != nil {
			return n, err
		}
	}
	return n, err
}

// latest replaces a value that nobody has taken yet: only the newest window size matters. There must be only one
// sender.
func latest(c chan guest.WinSize, v guest.WinSize) {
	select {
	case <-c:
	default:
	}
	c <- v
}

func stdoutMessage(b []byte) *nodev1.ExecResponse {
	return &nodev1.ExecResponse{Of: &nodev1.ExecResponse_Stdout{Stdout: b}}
}

func stderrMessage(b []byte) *nodev1.ExecResponse {
	return &nodev1.ExecResponse{Of: &nodev1.ExecResponse_Stderr{Stderr: b}}
}

type writerFunc func(p []byte) (int, error)

func (w writerFunc) Write(p []byte) (int, error) { return w(p) }

// output returns a writer of messages. Send waits for a client that reads slowly: then the command waits, not the
// daemon.
func (x *execution) output(message func([]byte) *nodev1.ExecResponse) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		if err := x.start(); err != nil {
			return 0, err
		}
		for sent := 0; sent < len(p); {
			part := p[sent:min(len(p), sent+outputChunk)]
			if err := x.send(message(part)); err != nil {
				return sent, err
			}
			sent += len(part)
		}
		return len(p), nil
	})
}

// queue is a bounded pipe whose writer never waits.
type queue struct {
	mu    sync.Mutex
	ready sync.Cond
	buf   []byte
	max   int
	err   error // what Read returns once buf is empty
}

func newQueue(limit int) *queue {
	q := &queue{max: limit}
	q.ready.L = &q.mu
	return q
}

// push appends b; false when it does not fit. After close it is dropped.
func (q *queue) push(b []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return true
	}
	if len(q.buf)+len(b) > q.max {
		return false
	}
	q.buf = append(q.buf, b...)
	q.ready.Signal()
	return true
}

// close makes Read return err after what was pushed. Only the first call counts.
func (q *queue) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
	}
	q.ready.Broadcast()
}

func (q *queue) Read(p []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.buf) == 0 && q.err == nil {
		q.ready.Wait()
	}
	if len(q.buf) == 0 {
		return 0, q.err
	}
	n := copy(p, q.buf)
	q.buf = q.buf[n:]
	return n, nil
}
