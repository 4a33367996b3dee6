package pid1

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"
)

// Child is a program that process 1 keeps running.
type Child struct {
	Name string // of its log, too
	Path string
	Args []string // without the program's own
	Env  []string // besides that of process 1

	// Watched children say that they are alive, as systemd wants it. There is at most one.
	Watched bool
}

const (
	firstDelay = 500 * time.Millisecond // before a child that ended is started again
	longDelay  = 30 * time.Second
	lived      = 10 * time.Second // a child that lived as long starts again at once
	logLimit   = 4 << 20          // bytes of a log, and of the one before it
)

// supervisor keeps children running. Each has a session of its own, so that a signal for it reaches nobody else, and writes into a pipe that stays open when it
// dies: what it started can go on to write.
type supervisor struct {
	children []Child
	reaper   *reaper
	log      *slog.Logger
	logs     string // folder
	life     *life  // of the watched child; nil: nobody wants to know

	done  sync.WaitGroup
	ended map[string]chan struct{} // of each child, closed when it is not started again

	mu      sync.Mutex
	running map[string]*os.Process
	outputs map[string]*os.File
}

func newSupervisor(children []Child, r *reaper, log *slog.Logger, logs string) *supervisor {
	return &supervisor{children: children, reaper: r, log: log, logs: logs, ended: map[string]chan struct{}{}, running: map[string]*os.Process{}, outputs: map[string]*os.File{}}
}

// start keeps the children running until ctx ends.
func (s *supervisor) start(ctx context.Context) {
	for _, c := range s.children {
		ended := make(chan struct{})
		s.ended[c.Name] = ended
		s.done.Go(func() {
			defer close(ended)
			s.keep(ctx, c)
		})
	}
}

// stop asks the children to end, kills those that have not in time, and waits for them. The watched child is the first one, because it needs the others while it
// ends. Preconditions: start was called, and its context has ended.
func (s *supervisor) stop(watched, others time.Duration) {
	for _, c := range s.children {
		if !c.Watched {
			continue
		}
		s.signal(unix.SIGTERM, c.Name)
		kill := time.AfterFunc(watched, func() { s.signal(unix.SIGKILL, c.Name) })
		<-s.ended[c.Name]
		kill.Stop()
	}
	s.signal(unix.SIGTERM, "")
	kill := time.AfterFunc(others, func() { s.signal(unix.SIGKILL, "") })
	s.done.Wait()
	kill.Stop()
}

// signal sends a signal to the child of that name; "": to all.
func (s *supervisor) signal(signal unix.Signal, only string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, p := range s.running {
		if only != "" && name != only {
			continue
		}
		if err := p.Signal(signal); err != nil {
			s.log.Warn("not signalled", "child", name, "err", err)
		}
	}
}

// firstBeat returns how long the watched child may be silent after its start. Without such a child nothing counts as hung.
func (s *supervisor) firstBeat() time.Duration {
	if slices.ContainsFunc(s.children, func(c Child) bool { return c.Watched }) {
		return firstBeat
	}
	return math.MaxInt64
}

// killWatched kills the watched child.
func (s *supervisor) killWatched() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.children {
		if p := s.running[c.Name]; c.Watched && p != nil {
			if err := p.Kill(); err != nil {
				s.log.Warn("not killed", "child", c.Name, "err", err)
			}
		}
	}
}

// keep starts a child again and again. A child that does not start, or dies early, waits longer each time.
func (s *supervisor) keep(ctx context.Context, c Child) {
	delays := delays()
	for ctx.Err() == nil {
		begin := time.Now()
		err := s.once(ctx, c)
		if ctx.Err() != nil {
			return
		}
		if time.Since(begin) >= lived {
			delays.Reset()
		}
		delay := delays.NextBackOff()
		s.log.Error("child ended", "child", c.Name, "err", err, "dur", time.Since(begin).Round(time.Millisecond), "again", delay, "said", lastSaid(filepath.Join(s.logs, c.Name+".log")))
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

func delays() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval, b.Multiplier, b.RandomizationFactor = firstDelay, longDelay, 2, 0
	b.Reset()
	return b
}

// once runs a child to its end.
func (s *supervisor) once(ctx context.Context, c Child) error {
	out, err := s.output(c.Name)
	if err != nil {
		return err
	}
	cmd := exec.Command(c.Path, c.Args...) //nolint:noctx // stop ends it
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), c.Env...)
	if c.Watched && s.life != nil {
		cmd.Env = append(cmd.Env, speaks()...)
		s.life.begin(firstBeat)
		defer s.life.begin(firstBeat) // it starts again before that is over
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	s.mu.Lock()
	if ctx.Err() != nil { // stop has signalled those that run
		s.mu.Unlock()
		return ctx.Err()
	}
	if err := s.reaper.start(cmd); err != nil {
		s.mu.Unlock()
		return fmt.Errorf("start %s: %w", c.Path, err)
	}
	s.running[c.Name] = cmd.Process
	s.mu.Unlock()
	s.log.Info("child started", "child", c.Name, "pid", cmd.Process.Pid)
	err = s.reaper.wait(cmd)
	s.mu.Lock()
	delete(s.running, c.Name)
	s.mu.Unlock()
	if err == nil {
		return fmt.Errorf("it ended by itself")
	}
	return err
}

// output returns the pipe whose lines go to the log of that name.
func (s *supervisor) output(name string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.outputs[name]; w != nil {
		return w, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for the log of %s: %w", name, err)
	}
	s.outputs[name] = w
	go keepLog(r, filepath.Join(s.logs, name+".log")) // for as long as process 1 lives
	return w, nil
}

// keepLog writes what r has to the file path. When that is full, it becomes path.1. What cannot be written is lost: a child never waits for its log.
func keepLog(r io.Reader, path string) {
	var f *os.File
	var size int64
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		if f == nil || size > logLimit {
			if f != nil {
				_ = f.Close()
				_ = os.Rename(path, path+".1")
			}
			f, _ = os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
			size = 0
		}
		if f != nil {
			n, _ := f.Write(line)
			size += int64(n)
		}
		if err != nil && len(line) == 0 {
			return
		}
	}
}
