package guestagent

import (
	"bytes"
	"context"
	"os"
	"slices"
	"sync"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// viewerPatience is how long the main process waits for an attached session that takes no output, before the session is
// ended. Nothing may be left out of what a session is shown: it may be the content of a file.
const viewerPatience = 30 * time.Second

// viewerBacklog is how many pieces of output, of 32 KiB at most, may wait for one attached session.
const viewerBacklog = 4

// audience are the sessions that a main process's output is shown to. The zero value is ready.
type audience struct {
	mu      sync.Mutex
	viewers []*viewer
	over    bool // there is no more output
}

type viewer struct {
	out  chan piece    // closed when there is no more
	gone chan struct{} // closed when it takes no more
	late chan struct{} // closed when it was given up
}

type piece struct {
	stderr bool
	data   []byte
}

// join adds a viewer; false when there is nothing more to see.
func (a *audience) join() (*viewer, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return nil, false
	}
	v := &viewer{out: make(chan piece, viewerBacklog), gone: make(chan struct{}), late: make(chan struct{})}
	a.viewers = append(a.viewers, v)
	return v, true
}

func (a *audience) remove(v *viewer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.viewers = slices.DeleteFunc(a.viewers, func(x *viewer) bool { return x == v })
}

// leave takes v off. It is called once.
func (a *audience) leave(v *viewer) {
	a.remove(v)
	close(v.gone)
}

// show hands p, which is copied, to every viewer and waits for the slow ones.
func (a *audience) show(stderr bool, p []byte) {
	a.mu.Lock()
	viewers := slices.Clone(a.viewers)
	a.mu.Unlock()
	if len(viewers) == 0 {
		return
	}
	out := piece{stderr: stderr, data: bytes.Clone(p)}
	for _, v := range viewers {
		select {
		case v.out <- out:
			continue
		default:
		}
		patience := time.NewTimer(viewerPatience)
		select {
		case v.out <- out:
		case <-v.gone:
		case <-v.late: // the other stream's
		case <-patience.C:
			a.giveUp(v)
		}
		patience.Stop()
	}
}

func (a *audience) giveUp(v *viewer) {
	a.remove(v)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !isClosed(v.late) {
		close(v.late)
	}
}

// end lets the viewers go when they have seen all. Preconditions: nothing is shown any more.
func (a *audience) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	for _, v := range a.viewers {
		close(v.out)
	}
	a.viewers = nil
}

// mainInput is the standard input of a main process. It outlives those who write to it.
type mainInput struct {
	file    *os.File
	once    bool          // it ends with the first who wrote
	pieces  chan []byte   // to the one goroutine that writes: nobody else waits for a process that does not read
	closing chan struct{} // closed when it is to end
	ending  sync.Once
}

func newMainInput(file *os.File, once bool) *mainInput {
	return &mainInput{file: file, once: once, pieces: make(chan []byte), closing: make(chan struct{})}
}

// feed writes until the process ends. A process that closed its input is told more in vain.
func (in *mainInput) feed(ended <-chan struct{}) {
	for {
		select {
		case p := <-in.pieces:
			_, _ = in.file.Write(p)
		case <-in.closing:
			in.file.Close()
			return
		case <-ended:
			return
		}
	}
}

func (in *mainInput) close() { in.ending.Do(func() { close(in.closing) }) }

// Attach implements guestv1.GuestServer.
func (s *Server) Attach(ss execStream) error {
	release, err := take(s.execs, "commands")
	if err != nil {
		return err
	}
	defer release()
	start, err := opening(ss)
	if err != nil {
		return err
	}
	m, err := s.attachable(start)
	if err != nil {
		return err
	}
	view, ok := m.shown.join()
	if !ok {
		return errdefs.Preconditionf("the process has ended")
	}
	defer m.shown.leave(view)
	defer s.watching()()
	e := &execution{stream: ss, child: m.child, files: m.files, tty: m.command.tty, input: newInput()}
	if w := start.GetSize(); e.tty && w.GetRows() > 0 && w.GetCols() > 0 {
		_ = resize(e.files.out, w.GetRows(), w.GetCols()) // the terminal may be gone already
	}
	return e.attach(m, view, start.GetStdin())
}

// attachable is the process that start means.
func (s *Server) attachable(start *guestv1.ExecStart) (*mainProcess, error) {
	m := s.mainProcess()
	if name := start.GetContainer(); name != "" {
		var err error
		if m, err = s.containers().running(name); err != nil {
			return nil, err
		}
	}
	switch {
	case m == nil:
		return nil, errdefs.Preconditionf("the main process does not run")
	case start.GetStdin() && m.input == nil:
		return nil, errdefs.Preconditionf("the process was started without a standard input (stdin: true of its container); attach without input, or exec a command of its own")
	case start.GetStdin() && isClosed(m.input.closing):
		return nil, errdefs.Preconditionf("the process's standard input ended with the first session (stdinOnce); attach without input, or exec a command of its own")
	}
	return m, nil
}

// attach serves the session until the process ends or the session leaves it.
func (e *execution) attach(m *mainProcess, view *viewer, stdin bool) error {
	ctx, cancel := context.WithCancelCause(e.stream.Context())
	var feeding sync.WaitGroup
	defer feeding.Wait()
	defer e.input.stop()
	defer cancel(nil)
	go func() { // ends when this call returns: Recv fails then
		if err := e.receive(); err != nil {
			cancel(err)
		}
	}()
	left := make(chan struct{})
	if stdin {
		if err := e.send(credit(stdinWindow)); err != nil {
			return err
		}
		feeding.Go(func() {
			all := e.offer(ctx, m)
			switch {
			case m.input.once:
				m.input.close()
			case all:
				close(left)
			}
		})
	}
	for {
		select {
		case p, ok := <-view.out:
			if !ok {
				return e.end(0)
			}
			wrap := stdout
			if p.stderr {
				wrap = stderr
			}
			if err := e.send(wrap(p.data)); err != nil {
				return err
			}
		case <-view.late:
			return errdefs.Exhaustedf("the session took no output of the process for %s", viewerPatience)
		case <-left:
			return e.end(0)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// offer hands the session's input to the process; true when it was all of it.
func (e *execution) offer(ctx context.Context, m *mainProcess) bool {
	for {
		p, ok := e.input.take()
		if !ok {
			return e.input.complete()
		}
		select {
		case m.input.pieces <- p:
		case <-m.input.closing:
			return false
		case <-m.child.done:
			return false
		case <-ctx.Done():
			return false
		}
		if e.spent(p) != nil {
			return false
		}
	}
}

// watching counts a session until the function it returns is called.
func (s *Server) watching() (done func()) {
	count := func(n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.attached += n
		close(s.unshown)
		s.unshown = make(chan struct{})
	}
	count(1)
	return func() { count(-1) }
}

// showPatience bounds how long a power-off waits for attached sessions to see how the processes ended.
const showPatience = 5 * time.Second

// showAll waits for the attached sessions, which end with the processes.
func (s *Server) showAll(ctx context.Context) {
	patience := time.NewTimer(showPatience)
	defer patience.Stop()
	for {
		s.mu.Lock()
		left, changed := s.attached, s.unshown
		s.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-changed:
		case <-patience.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
