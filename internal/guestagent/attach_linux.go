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

// viewerPatience is how long the main process waits for an attached session that accepts no output, before the session
// is ended. A session must not miss output: it may be the content of a file.
const viewerPatience = 30 * time.Second

// viewerBacklog is how many pieces of output, each at most 32 KiB, may wait for one attached session.
const viewerBacklog = 4

// audience is the set of sessions that receive a main process's output. The zero value is ready.
type audience struct {
	mu      sync.Mutex
	viewers []*viewer
	over    bool // no more output comes
}

type viewer struct {
	out  chan piece    // closed after the last piece
	gone chan struct{} // closed when the viewer accepts no more
	late chan struct{} // closed when the viewer was dropped as too slow
}

type piece struct {
	stderr bool
	data   []byte
}

// join adds a viewer; false when no more output comes.
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

// leave removes v. It is called once.
func (a *audience) leave(v *viewer) {
	a.remove(v)
	close(v.gone)
}

// show sends a copy of p to every viewer and waits for slow ones.
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
		case <-v.late: // dropped by the other output stream
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

// end releases the viewers when they have received everything. Preconditions: show is not called any more.
func (a *audience) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	for _, v := range a.viewers {
		close(v.out)
	}
	a.viewers = nil
}

// mainInput is the standard input of a main process. It outlives the sessions that write to it.
type mainInput struct {
	file    *os.File
	once    bool          // it ends with the first session that wrote
	pieces  chan []byte   // to the single goroutine that writes, so that nobody else waits for a process that does not read
	closing chan struct{} // closed when the input is to end
	ending  sync.Once
}

func newMainInput(file *os.File, once bool) *mainInput {
	return &mainInput{file: file, once: once, pieces: make(chan []byte), closing: make(chan struct{})}
}

// feed writes until the process ends. Input for a process that closed its stdin is discarded.
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
	start, release, err := admit(ss, s.execs, "commands")
	if err != nil {
		return err
	}
	defer release()
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
		_ = resize(e.files.out, w.GetRows(), w.GetCols()) // the terminal may be closed already
	}
	return e.attach(m, view, start.GetStdin())
}

// attachable is the process that start names.
func (s *Server) attachable(start *guestv1.ExecStart) (*mainProcess, error) {
	m, err := s.processOf(start.GetContainer())
	switch {
	case err != nil:
		return nil, err
	case m == nil:
		return nil, errdefs.Preconditionf("the main process does not run")
	case start.GetStdin() && m.input == nil:
		return nil, errdefs.Preconditionf("the process was started without a standard input (stdin: true of its container); attach without input, or exec a command of its own")
	case start.GetStdin() && isClosed(m.input.closing):
		return nil, errdefs.Preconditionf("the process's standard input ended with the first session (stdinOnce); attach without input, or exec a command of its own")
	}
	return m, nil
}

// attach serves the session until the process ends or the session leaves.
func (e *execution) attach(m *mainProcess, view *viewer, stdin bool) error {
	ctx, cancel := context.WithCancelCause(e.stream.Context())
	var feeding sync.WaitGroup
	defer feeding.Wait()
	defer e.input.stop()
	defer cancel(nil)
	go e.receive(cancel)
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
			return errdefs.Exhaustedf("the session did not read the output of the process for %s", viewerPatience)
		case <-left:
			return e.end(0)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// offer gives the session's input to the process; true when all of it was given.
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

// showPatience limits how long a power-off waits until attached sessions have seen the end of the processes.
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
