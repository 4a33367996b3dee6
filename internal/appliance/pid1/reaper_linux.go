package pid1

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper takes the exit status of processes whose parents have ended, which are process 1's. It never takes that of a process that this program started: it looks at a dead process before it takes it, and leaves it to
// who waits for it.
type reaper struct {
	mu      sync.Mutex
	owned   map[int]chan struct{} // closed once its owner has its status
	started *sync.Cond            // a process was started
}

func newReaper() *reaper {
	r := &reaper{owned: map[int]chan struct{}{}}
	r.started = sync.NewCond(&r.mu)
	return r
}

// run does so forever.
func (r *reaper) run() {
	for {
		pid, err := dead()
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil: // there is no child: an orphan may become one, and nobody says so
			r.pause()
		default:
			r.one(pid)
		}
	}
}

// dead waits for a process to die that nobody has taken, and looks at it only.
func dead() (pid int, err error) {
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		return 0, err
	}
	// For SIGCHLD the number of the process comes first in the part of the structure that depends on the signal.
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), siginfoPid))), nil //nolint:gosec // within the structure
}

const siginfoPid = 16 // bytes, on each architecture of 64 bits

// one takes a dead process, or waits until its owner has.
func (r *reaper) one(pid int) {
	r.mu.Lock()
	taken, ok := r.owned[pid]
	r.mu.Unlock()
	if ok {
		<-taken
		return
	}
	_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
}

// pause waits for a child, at most a second.
func (r *reaper) pause() {
	wake := time.AfterFunc(time.Second, r.started.Broadcast)
	defer wake.Stop()
	r.mu.Lock()
	r.started.Wait()
	r.mu.Unlock()
}

// start starts a command. Whoever does so calls wait. Its output goes to files: a pipe that this program reads would be held open by processes that the command leaves.
func (r *reaper) start(cmd *exec.Cmd) error {
	r.mu.Lock() // until the process is in the table nobody looks at it
	defer r.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	r.owned[cmd.Process.Pid] = make(chan struct{})
	r.started.Broadcast()
	return nil
}

// wait waits for a command that start started.
func (r *reaper) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.owned[cmd.Process.Pid])
	delete(r.owned, cmd.Process.Pid)
	return err
}

// settle waits until process 1 has no children, at most for limit.
func (r *reaper) settle(limit time.Duration) {
	for end := time.Now().Add(limit); time.Now().Before(end); {
		if err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); errors.Is(err, unix.ECHILD) {
			return
		}
		<-time.After(50 * time.Millisecond)
	}
}

// run runs a program to its end and returns what it wrote to its standard output. The error has the end of what it wrote to the other one.
func (m *machine) run(ctx context.Context, program string, args ...string) ([]byte, error) {
	out, err := memory("out")
	if err != nil {
		return nil, err
	}
	defer out.Close()
	bad, err := memory("err")
	if err != nil {
		return nil, err
	}
	defer bad.Close()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = out, bad
	if err := m.reaper.start(cmd); err != nil {
		return nil, fmt.Errorf("run %s: %w", program, err)
	}
	failed := m.reaper.wait(cmd)
	text, err := content(out)
	if failed != nil {
		said, _ := content(bad)
		said = bytes.TrimSpace(said)
		return text, fmt.Errorf("%s %s: %w: %s", program, first(args), failed, said[max(0, len(said)-500):])
	}
	return text, err
}

func first(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

func memory(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func content(f *os.File) ([]byte, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}
