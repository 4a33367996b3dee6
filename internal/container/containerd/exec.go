package containerd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// idle is how long a command that has ended may be silent until its output counts as delivered, although a process that it has left
// could still write.
const idle = 2 * time.Second

// killed is the exit code of a command that was killed.
const killed = 128 + int(syscall.SIGKILL)

// Exec implements container.Access. Its streams are named pipes, which the shim of the container opens.
func (r *Runtime) Exec(ctx context.Context, id string, e container.Exec, s container.Streams) (int, error) {
	if len(e.Command) == 0 {
		return 0, errdefs.Invalidf("exec in container %s: a command is needed", id)
	}
	if _, _, err := r.get(ctx, id); err != nil {
		return 0, err
	}
	c, err := r.client.LoadContainer(ctx, id)
	if err != nil {
		return 0, failed(err, "exec in container %s", id)
	}
	t, err := c.Task(ctx, nil)
	if classOf(err) == errdefs.NotFound {
		return 0, errdefs.Preconditionf("exec in container %s: it does not run", id)
	} else if err != nil {
		return 0, failed(err, "exec in container %s", id)
	}
	spec, err := r.processOf(ctx, c, e)
	if err != nil {
		return 0, err
	}
	x := &execution{r: r, container: id, id: "e-" + rand.Text(), streams: s}
	r.begin(x.id)
	defer r.end(x.id)
	return x.run(ctx, t, spec)
}

// processOf returns the process of a command: the main process of the container with other arguments.
func (r *Runtime) processOf(ctx context.Context, c client.Container, e container.Exec) (*specs.Process, error) {
	spec, err := c.Spec(ctx)
	if err != nil {
		return nil, failed(err, "exec in container %s", c.ID())
	}
	opts := []oci.SpecOpts{oci.WithProcessArgs(e.Command...), oci.WithEnv(environment(e.Env))}
	if e.TTY {
		opts = append(opts, oci.WithTTY, oci.WithEnv([]string{"TERM=xterm"}), oci.WithEnv(environment(e.Env)))
		if e.Rows > 0 && e.Cols > 0 {
			opts = append(opts, oci.WithTTYSize(int(e.Cols), int(e.Rows)))
		}
	}
	if e.WorkDir != "" {
		opts = append(opts, oci.WithProcessCwd(e.WorkDir))
	}
	if e.User != "" {
		opts = append(opts, oci.WithUser(e.User), ofUser)
	}
	info, err := c.Info(ctx, client.WithoutRefreshedMetadata)
	if err != nil {
		return nil, failed(err, "exec in container %s", c.ID())
	}
	if err := oci.ApplyOpts(ctx, r.client, &info, spec, opts...); err != nil {
		return nil, refused(err, "exec in container %s", c.ID())
	}
	return spec.Process, nil
}

// execution is a command in progress.
type execution struct {
	r         *Runtime
	container string
	id        string
	streams   container.Streams
	process   client.Process

	moved atomic.Int64 // grows with each piece of output
	busy  atomic.Int64 // writers that wait for who reads the output
}

func (x *execution) run(ctx context.Context, t client.Task, spec *specs.Process) (code int, err error) {
	// What is done for the command goes on when ctx ends, until the command is killed: one that ctx interrupts could run or not.
	after := context.WithoutCancel(ctx)
	started := make(chan struct{})
	streams := []cio.Opt{cio.WithStreams(x.stdin(after, started), x.output(x.streams.Stdout), x.output(x.streams.Stderr)), cio.WithFIFODir(x.r.streams())}
	if spec.Terminal {
		streams = append(streams, cio.WithTerminal)
	}
	x.process, err = t.Exec(after, x.id, spec, cio.NewCreator(streams...))
	if err != nil {
		return 0, refused(err, "exec in container %s", x.container)
	}
	delivered := false
	defer func() {
		if delivered {
			err = errors.Join(err, x.remove(after))
			return
		}
		// The shim waits for the processes that the command has left; the caller does not.
		x.r.removals.Go(func() {
			if err := x.remove(after); err != nil {
				x.r.cfg.Log.Warn("command stays in the list of its shim", "container", x.container, "err", err)
			}
		})
	}()
	waiting, cancel := context.WithCancel(after)
	defer cancel()
	exit, err := x.process.Wait(waiting)
	if err != nil {
		return 0, failed(err, "exec in container %s", x.container)
	}
	if err := x.process.Start(after); err != nil {
		return 0, refused(err, "exec in container %s", x.container)
	}
	close(started)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel()
	helpers.Go(func() { x.control(waiting) })
	status, err := x.wait(ctx, exit)
	if err != nil {
		return 0, err
	}
	delivered = x.drain(ctx)
	if ctx.Err() != nil {
		return 0, fmt.Errorf("exec in container %s: %w", x.container, ctx.Err())
	}
	return int(status.ExitCode()), nil
}

// wait returns how the command has ended. It kills it when ctx ends.
func (x *execution) wait(ctx context.Context, exit <-chan client.ExitStatus) (client.ExitStatus, error) {
	var s client.ExitStatus
	select {
	case s = <-exit:
	case <-ctx.Done():
		if err := x.kill(context.WithoutCancel(ctx)); err != nil {
			return s, errors.Join(ctx.Err(), err)
		}
		s = <-exit
	}
	switch err := s.Error(); {
	case err == nil:
		return s, nil
	case classOf(err) == errdefs.NotFound: // its container was removed, which kills it
		return *client.NewExitStatus(uint32(killed), time.Time{}, nil), nil
	default:
		return s, failed(err, "wait for a command in container %s", x.container)
	}
}

func (x *execution) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	if err := x.process.Kill(ctx, syscall.SIGKILL); err != nil && classOf(err) != errdefs.NotFound {
		return failed(err, "kill a command in container %s", x.container)
	}
	return nil
}

// control passes sizes of the terminal and signals on.
func (x *execution) control(ctx context.Context) {
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case size, ok := <-x.streams.Resize:
			if !ok {
				x.streams.Resize = nil
				continue
			}
			err = x.process.Resize(ctx, uint32(size.Cols), uint32(size.Rows))
		case s, ok := <-x.streams.Signals:
			if !ok {
				x.streams.Signals = nil
				continue
			}
			err = x.process.Kill(ctx, syscall.Signal(s))
		}
		if err != nil && ctx.Err() == nil {
			x.r.cfg.Log.Warn("signal or size of a terminal was not passed on", "container", x.container, "err", err)
		}
	}
}

// drain waits until all output is delivered, and then returns true, or until only processes that the command has left could write more.
func (x *execution) drain(ctx context.Context) bool {
	delivered := make(chan struct{})
	go func() { // ends when remove closes the pipes
		x.process.IO().Wait()
		close(delivered)
	}()
	tick := time.NewTicker(idle)
	defer tick.Stop()
	for last := x.moved.Load(); ; {
		select {
		case <-delivered:
			return true
		case <-ctx.Done():
			return false
		case <-tick.C:
			now := x.moved.Load()
			if now == last && x.busy.Load() == 0 {
				return false
			}
			last = now
		}
	}
}

// remove makes the shim forget the command, which closes its ends of the pipes, and removes the pipes.
func (x *execution) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	_, err := x.process.Delete(ctx)
	if err != nil {
		x.process.IO().Cancel()
		x.process.IO().Close()
	}
	if err == nil || classOf(err) == errdefs.NotFound {
		return nil
	}
	return failed(err, "remove a command of container %s", x.container)
}

// stdin returns what the command reads. Its end is the end of what the command reads.
func (x *execution) stdin(ctx context.Context, started <-chan struct{}) io.Reader {
	if x.streams.Stdin == nil {
		return nil
	}
	return readerFunc(func(p []byte) (int, error) {
		n, err := x.streams.Stdin.Read(p)
		if err != nil {
			go x.closeStdin(ctx, started)
		}
		return n, err
	})
}

// closeStdin closes the end of the pipe that the shim holds.
func (x *execution) closeStdin(ctx context.Context, started <-chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	select {
	case <-started:
	case <-ctx.Done():
		return
	}
	if err := x.process.CloseIO(ctx, client.WithStdinCloser); err != nil && classOf(err) != errdefs.NotFound {
		x.r.cfg.Log.Warn("end of input was not passed on", "container", x.container, "err", err)
	}
}

// output returns what the output of the command is written to. What the caller does not take is dropped, so that the command does not wait
// for a caller that is gone.
func (x *execution) output(w io.Writer) io.Writer {
	var gone bool
	return writerFunc(func(p []byte) (int, error) {
		x.moved.Add(1)
		if w == nil || gone {
			return len(p), nil
		}
		x.busy.Add(1)
		defer x.busy.Add(-1)
		if _, err := w.Write(p); err != nil {
			gone = true
		}
		return len(p), nil
	})
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func (r *Runtime) begin(exec string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.execs[exec] = true
}

func (r *Runtime) end(exec string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.execs, exec)
}

// has reports whether an exec is one of this process.
func (r *Runtime) has(exec string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.execs[exec]
}

func itoa(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
