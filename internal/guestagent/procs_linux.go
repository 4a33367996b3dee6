package guestagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Signals of a power-off.
const (
	stopSignal = unix.SIGTERM
	killSignal = unix.SIGKILL
)

// procs starts processes and collects their exit status. As PID 1 it reaps every process of the machine in one loop,
// and gives the status of a child to its starter. Otherwise it waits for its own children only.
type procs struct {
	init     bool
	mu       sync.Mutex // held while starting, so that no child ends before it is registered
	children map[int]*child
	score    *os.File // of the agent, which its children inherit; nil until a container may have one of its own
	adjusted int      // what score has
}

func newProcs(init bool) *procs { return &procs{init: init, children: map[int]*child{}} }

// child is a process that procs started, the leader of its own session and process group.
type child struct {
	procs    *procs
	pid      int
	done     chan struct{} // closed at its end; then status and finished are set
	status   unix.WaitStatus
	finished time.Time

	user *vm.ContainerUser // that it began as
}

// scored lets processes have OOM scores of their own.
func (p *procs) scored() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.score == nil && p.init {
		p.score, _ = os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0) // a guest works without it
	}
}

// start runs launch, which returns the pid of the new process. The process inherits oomScoreAdj from the agent. The agent keeps it
// until another process needs another one: nothing ends process 1, and a program that looks at process 1 for that of its
// container, as in a container runtime, finds it.
func (p *procs) start(oomScoreAdj int, launch func() (int, error)) (*child, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.score != nil && p.adjusted != oomScoreAdj {
		if _, err := p.score.WriteAt([]byte(strconv.Itoa(oomScoreAdj)), 0); err == nil {
			p.adjusted = oomScoreAdj
		}
	}
	pid, err := launch()
	if err != nil {
		return nil, err
	}
	c := &child{procs: p, pid: pid, done: make(chan struct{})}
	p.children[pid] = c
	if !p.init {
		go p.collect(c) // ends with the process; its starter waits for done
	}
	return c, nil
}

// collect waits for one child.
func (p *procs) collect(c *child) {
	var info unix.Siginfo
	// This only looks: the pid must stay reserved until settle, under the lock, has removed the child.
	for errors.Is(unix.Waitid(unix.P_PID, c.pid, &info, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(c.pid, &status, 0, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	p.settle(c.pid, status)
}

// reap reaps every process of the machine until ctx ends.
func (p *procs) reap(ctx context.Context) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	defer signal.Stop(ended)
	for {
		p.reapAll()
		select {
		case <-ended:
		case <-ctx.Done():
			return
		}
	}
}

func (p *procs) reapAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		p.settle(pid, status)
	}
}

// settle records the end of pid. Preconditions: p.mu is held and pid has just been reaped.
func (p *procs) settle(pid int, status unix.WaitStatus) {
	c, ok := p.children[pid]
	if !ok {
		return // an orphan that was reparented to us
	}
	delete(p.children, pid)
	c.status, c.finished = status, time.Now()
	close(c.done)
}

// signal sends sig to the child's process group, unless the child has ended: its pid may then belong to another
// process.
func (c *child) signal(sig unix.Signal) {
	c.procs.mu.Lock()
	defer c.procs.mu.Unlock()
	if !c.ended() {
		_ = unix.Kill(-c.pid, sig) // ESRCH: it is just ending
	}
}

// join lets the processes that this thread starts from now on see what the child sees. Preconditions: the thread is locked and ends with its work.
// Errors: FailedPrecondition if the child has ended.
func (c *child) join() error {
	c.procs.mu.Lock()
	defer c.procs.mu.Unlock()
	if c.ended() {
		return errdefs.Preconditionf("the process whose processes it would see has ended")
	}
	fd, err := unix.PidfdOpen(c.pid, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", c.pid, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWPID); err != nil {
		return fmt.Errorf("enter the PID namespace of process %d: %w", c.pid, err)
	}
	return nil
}

func (c *child) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// waitFor reports whether the child ended within d.
func (c *child) waitFor(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.done:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return c.ended()
}

// code is the exit code, 128+n for death by signal n. Preconditions: the child has ended.
func (c *child) code() int {
	if c.status.Signaled() {
		return 128 + int(c.status.Signal())
	}
	return c.status.ExitStatus()
}
