package guestagent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// stdinWindow is how much input of one command the guest may queue, in bytes.
const stdinWindow = 256 << 10

// endOfFile is the character that a terminal treats as the end of input (Ctrl-D).
const endOfFile = 0x04

type execStream = grpc.BidiStreamingServer[guestv1.ExecInput, guestv1.ExecOutput]

// admit takes one of tokens for a call with streams and returns its first message.
func admit(ss execStream, tokens chan struct{}, what string) (_ *guestv1.ExecStart, release func(), _ error) {
	release, err := take(tokens, what)
	if err != nil {
		return nil, nil, err
	}
	first, err := ss.Recv()
	if err == nil && first.GetStart() == nil {
		err = errdefs.Invalidf("the first message must say what to start")
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return first.GetStart(), release, nil
}

// Exec implements guestv1.GuestServer.
func (s *Server) Exec(ss execStream) error {
	start, release, err := admit(ss, s.execs, "commands")
	if err != nil {
		return err
	}
	defer release()
	if err := s.mayWrite(); err != nil {
		return err
	}
	c, err := s.execCommand(start)
	if err != nil {
		return err
	}
	f, err := openFiles(c.tty, start.GetStdin())
	if err != nil {
		return err
	}
	if w := start.GetSize(); c.tty && w.GetRows() > 0 && w.GetCols() > 0 {
		if err := resize(f.in, w.GetRows(), w.GetCols()); err != nil {
			f.closeChild()
			f.close()
			return err
		}
	}
	child, err := c.start(s.procs, f)
	f.closeChild()
	if err != nil {
		f.close()
		return err
	}
	e := &execution{stream: ss, child: child, files: f, tty: c.tty, input: newInput()}
	return e.run(ss.Context(), start.GetStdin())
}

// execCommand is the command of start. Fields that start leaves empty come from the main process, or from that of the
// container.
func (s *Server) execCommand(start *guestv1.ExecStart) (command, error) {
	c := command{args: start.GetCommand(), dir: start.GetWorkdir(), user: start.GetUser(), tty: start.GetTty()}
	m, err := s.processOf(start.GetContainer())
	if err != nil {
		return c, err
	}
	var base []string
	if m != nil {
		base, c.groups = slices.Clone(m.command.env), m.command.groups
		c.within, c.cgroup, c.limits, c.oomScoreAdj = m.command.within, m.command.cgroup, m.command.limits, m.command.oomScoreAdj
		if m.command.pids != (pids{}) {
			c.pids.of = m.child
		}
		s.mu.Lock()
		c.hostname = s.hostname
		s.mu.Unlock()
		c.dir, c.user = cmp.Or(c.dir, m.command.dir), cmp.Or(c.user, m.command.user)
	}
	c.env = environ(base, start.GetEnv())
	return c, nil
}

// execution is one call with streams: to a running command, to the main process or to a connection.
type execution struct {
	stream execStream
	child  *child // nil for a connection
	files  files
	tty    bool
	input  *input

	sending sync.Mutex // a stream allows one Send at a time
}

// run serves the command until it has ended and its output is sent, then sends its exit code.
func (e *execution) run(ctx context.Context, stdin bool) error {
	defer e.files.close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { e.child.signal(killSignal) })
	defer stop()

	go e.receive(cancel)
	var feeding sync.WaitGroup
	if stdin {
		if err := e.send(credit(stdinWindow)); err != nil {
			cancel(err)
		}
		feeding.Go(func() { e.feed() })
	}
	var pumping sync.WaitGroup
	pumping.Go(func() { pump(e.files.out, e.child.done, nil, e.output(ctx, stdout)) })
	if e.files.err != nil {
		pumping.Go(func() { pump(e.files.err, e.child.done, nil, e.output(ctx, stderr)) })
	}
	pumping.Wait()
	<-e.child.done // it may close its output and continue to run
	e.input.stop()
	if e.files.in != nil {
		e.files.in.Close() // wakes a write to a pipe that nobody reads
	}
	feeding.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return e.end(e.child.code())
}

// end sends the exit code to the host, as the last message.
func (e *execution) end(code int) error {
	return e.send(&guestv1.ExecOutput{Output: &guestv1.ExecOutput_ExitCode{ExitCode: int32(code)}})
}

func credit(n int) *guestv1.ExecOutput {
	return &guestv1.ExecOutput{Output: &guestv1.ExecOutput_StdinCredit{StdinCredit: uint32(n)}}
}

// spent lets the host send as many further bytes as p has, which input.take returned.
func (e *execution) spent(p []byte) error {
	e.input.done() // first, or the bytes sent for the credit exceed the window
	return e.send(credit(len(p)))
}

func stdout(p []byte) *guestv1.ExecOutput {
	return &guestv1.ExecOutput{Output: &guestv1.ExecOutput_Stdout{Stdout: p}}
}

func stderr(p []byte) *guestv1.ExecOutput {
	return &guestv1.ExecOutput{Output: &guestv1.ExecOutput_Stderr{Stderr: p}}
}

func (e *execution) output(ctx context.Context, wrap func([]byte) *guestv1.ExecOutput) func([]byte) error {
	return func(p []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return e.send(wrap(p))
	}
}

func (e *execution) send(m *guestv1.ExecOutput) error {
	e.sending.Lock()
	defer e.sending.Unlock()
	return e.stream.Send(m)
}

// receive handles the host's messages until the last one, and ends with the call at the latest, because Recv then fails. It
// reports an error, which means that the command must be killed, to failed.
func (e *execution) receive(failed context.CancelCauseFunc) {
	if err := e.distribute(); err != nil {
		failed(err)
	}
}

func (e *execution) distribute() error {
	for {
		m, err := e.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch m := m.GetInput().(type) {
		case *guestv1.ExecInput_Stdin:
			if err := e.input.add(m.Stdin); err != nil {
				return err
			}
		case *guestv1.ExecInput_StdinClosed:
			e.input.end()
		case *guestv1.ExecInput_Resize:
			if e.tty {
				_ = resize(e.files.in, m.Resize.GetRows(), m.Resize.GetCols()) // the terminal may be closed already
			}
		case *guestv1.ExecInput_Signal:
			if e.child != nil && m.Signal > 0 && m.Signal < 65 {
				e.child.signal(unix.Signal(m.Signal))
			}
		}
	}
}

// feed writes input to the command until there is no more, or the command accepts no more.
func (e *execution) feed() {
	for {
		p, ok := e.input.take()
		if !ok {
			break
		}
		_, err := e.files.in.Write(p)
		if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.EIO) {
			return
		}
		if e.spent(p) != nil { // also for input that a command with closed stdin drops
			return
		}
	}
	if e.input.complete() {
		if e.tty {
			_, _ = e.files.in.Write([]byte{endOfFile})
		} else {
			e.files.in.Close()
		}
	}
}

// input is the bounded queue between the host and a command's stdin.
type input struct {
	mu      sync.Mutex
	cond    *sync.Cond
	waiting bytes.Buffer
	taken   int  // bytes being written now
	ended   bool // the host sends no more
	stopped bool // the command has ended
}

func newInput() *input {
	i := &input{}
	i.cond = sync.NewCond(&i.mu)
	return i
}

func (i *input) add(p []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.waiting.Len()+i.taken+len(p) > stdinWindow {
		return errdefs.Exhaustedf("more input was sent than the guest had allowed")
	}
	if !i.ended && !i.stopped {
		i.waiting.Write(p)
		i.cond.Signal()
	}
	return nil
}

// take returns queued bytes; false when no more will come. The bytes count as queued in the guest until done.
func (i *input) take() ([]byte, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for i.waiting.Len() == 0 && !i.ended && !i.stopped {
		i.cond.Wait()
	}
	if i.stopped || i.waiting.Len() == 0 {
		return nil, false
	}
	p := bytes.Clone(i.waiting.Next(32 << 10))
	i.taken = len(p)
	return p, true
}

func (i *input) done() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.taken = 0
}

func (i *input) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.ended = true
	i.cond.Signal()
}

func (i *input) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.stopped = true
	i.cond.Signal()
}

// complete reports whether the host has sent all of its input.
func (i *input) complete() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.ended && !i.stopped
}

var _ guestv1.GuestServer = (*Server)(nil)
