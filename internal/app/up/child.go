package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// child is one long-running process of an instance.
type child struct {
	name string
	path string
	args []string
	env  []string
	log  string        // file for its output
	stop time.Duration // between SIGTERM and SIGKILL
	own  uintptr       // namespaces of its own: flags of clone
}

const (
	restartFirst = time.Second
	restartMost  = 30 * time.Second
	steady       = time.Minute // a child that ran this long restarts with the shortest back-off
	startTries   = 3           // a child that ended this often in a row does not start
	maxLog       = 32 << 20    // size in bytes at which a child's log is rotated at the next start
)

// spawner starts children from one OS thread that never ends before the supervisor does. The kernel ties the
// parent-death signal to the thread that forked, and that signal ends the children if the supervisor is killed. Children
// have the namespaces of that thread.
type spawner struct{ requests chan func() }

func newSpawner() *spawner {
	s := &spawner{requests: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range s.requests {
			f()
		}
	}()
	return s
}

// do runs f on that thread.
func (s *spawner) do(f func() error) error {
	done := make(chan error, 1)
	s.requests <- func() { done <- f() }
	return <-done
}

func (s *spawner) start(cmd *exec.Cmd) error { return s.do(cmd.Start) }

// process is a started child.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it ended
	err  error         // exit error, valid once done is closed
}

func (s *spawner) run(c child) (*process, error) {
	if fi, err := os.Stat(c.log); err == nil && fi.Size() > maxLog {
		if err := os.Rename(c.log, c.log+".1"); err != nil {
			return nil, fmt.Errorf("rename the log of %s: %w", c.name, err)
		}
	}
	out, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", c.name, err)
	}
	defer out.Close()
	cmd := exec.Command(c.path, c.args...)
	cmd.Env = append(inherited(os.Environ()), c.env...)
	cmd.Stdout, cmd.Stderr = out, out
	// A separate process group: Ctrl-C on the terminal reaches the supervisor, which stops children in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, Cloneflags: c.own}
	if err := s.start(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// inherited returns the variables of the user's shell that children get. They describe the machine. A variable that is a setting
// of one of our programs, such as EPOCH_TOKEN, is meant for the user's own commands: the settings of an instance come from its
// options and files. CLONE_DIRS has no option: it only tells the manager's admission which folders the nodes allow, and each node
// checks its own list.
func inherited(env []string) []string {
	return slices.DeleteFunc(env, func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return !ofMachine.MatchString(name)
	})
}

var ofMachine = regexp.MustCompile(`^(PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|CLONE_DIRS|SSL_CERT_(FILE|DIR)|(?i:(http|https|no|all)_proxy)|GO[A-Z]*)$`)

// halt asks p to end, and kills it after the child's grace.
func (p *process) halt(c child, log *slog.Logger) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(c.stop):
		log.Warn("child did not stop in time, killing it", "child", c.name)
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// keep runs c until ctx ends, and restarts it with back-off when it ends by itself. A caller that waits until the child is ready
// learns from ended that it does not start: it receives the exit error of the end number startTries in a row, because a busy
// machine may fail the first start, or the error of a program that cannot be run. The channel has room for one.
func (s *spawner) keep(ctx context.Context, c child, log *slog.Logger, ended chan<- error) {
	pauses := backoff.ExponentialBackOff{InitialInterval: restartFirst, RandomizationFactor: 0.1, Multiplier: 2, MaxInterval: restartMost}
	ends, told := 0, false
	for {
		began := time.Now()
		p, err := s.run(c)
		runs := err == nil
		if runs {
			select {
			case <-ctx.Done():
				p.halt(c, log)
				return
			case <-p.done:
				err = p.err
			}
		}
		if err == nil {
			err = errors.New("it ended without an error")
		}
		if time.Since(began) > steady {
			pauses.Reset()
			ends = 0
		}
		if ends++; !told && (ends == startTries || !runs) {
			ended <- err
			told = true
		}
		wait := pauses.NextBackOff()
		log.Error("child ended, restarting it", "child", c.name, "err", err, "dur", wait)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
