package qga

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// maxStdin is the maximum stdin of a command, in bytes: it is sent to the guest within one message.
const maxStdin = 1 << 20

// The protocol does not report the end of a command, so the host polls: at first often, for short commands, then
// rarely.
const (
	pollFirst = 20 * time.Millisecond
	pollMost  = time.Second
)

// afterKill is how long to wait for the end of a killed command, so that the agent can forget it.
const afterKill = 5 * time.Second

// execArgs are the arguments of guest-exec.
type execArgs struct {
	Path    string   `json:"path"`
	Arg     []string `json:"arg,omitempty"`
	Env     []string `json:"env,omitempty"`
	Input   []byte   `json:"input-data,omitempty"` // base64 on the wire
	Capture bool     `json:"capture-output"`
}

// execStatus is the answer of guest-exec-status.
type execStatus struct {
	Exited       bool   `json:"exited"`
	ExitCode     int    `json:"exitcode"`
	Signal       int    `json:"signal"`
	Out          []byte `json:"out-data"`
	Err          []byte `json:"err-data"`
	OutTruncated bool   `json:"out-truncated"`
	ErrTruncated bool   `json:"err-truncated"`
}

// code is the exit code in the convention of shells.
func (x execStatus) code() int {
	if x.Signal > 0 && x.Signal < 128 {
		return 128 + x.Signal
	}
	return x.ExitCode & 0xff
}

// environment is what a command has if it is given variables, because these replace everything that it would inherit.
var environment = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}

// Exec implements guest.Agent. The command runs with the agent's user, which is root. Its stdin is read to the end
// first, and its output arrives when it has ended.
// Errors beyond the contract's: Unsupported for a terminal or a user, ResourceExhausted for too much input or output.
func (s *session) Exec(ctx context.Context, e guest.Exec, st guest.Streams) (int, error) {
	const what = "run a command through qemu-guest-agent"
	args, err := s.prepare(ctx, e, st.Stdin)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	x, err := s.run(ctx, args, st.Signals)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	if err := deliver(st.Stdout, x.Out); err != nil {
		return -1, fmt.Errorf("%s: write its output: %w", what, err)
	}
	if err := deliver(st.Stderr, x.Err); err != nil {
		return -1, fmt.Errorf("%s: write its output: %w", what, err)
	}
	if x.OutTruncated || x.ErrTruncated {
		return -1, errdefs.Exhaustedf("%s: its output was cut after %d bytes; write the output to a file instead", what, len(x.Out)+len(x.Err))
	}
	return x.code(), nil
}

func deliver(w io.Writer, b []byte) error {
	if w == nil || len(b) == 0 {
		return nil
	}
	_, err := w.Write(b)
	return err
}

// prepare rejects what the protocol cannot do, and converts the rest to the protocol.
func (s *session) prepare(ctx context.Context, e guest.Exec, stdin io.Reader) (execArgs, error) {
	switch {
	case len(e.Command) == 0:
		return execArgs{}, errdefs.Invalidf("no command given")
	case e.TTY:
		return execArgs{}, errdefs.Unsupportedf("it supports no terminal; run the command without one, or use the console or ssh")
	case e.User != "":
		return execArgs{}, errdefs.Unsupportedf("it cannot run a command as another user; use a command that changes to user %q, for example runuser", e.User)
	}
	args := execArgs{Path: e.Command[0], Arg: e.Command[1:], Capture: true}
	if e.WorkDir != "" {
		x, err := s.run(ctx, execArgs{Path: "test", Arg: []string{"-d", e.WorkDir}}, nil)
		if err != nil {
			return execArgs{}, err
		}
		if x.code() != 0 {
			return execArgs{}, errdefs.Invalidf("folder %s is not in the guest", e.WorkDir)
		}
		args.Path, args.Arg = "/bin/sh", append([]string{"-c", `cd -- "$0" && exec "$@"`, e.WorkDir}, e.Command...)
	}
	if len(e.Env) > 0 {
		args.Env = append(args.Env, environment...)
		for _, v := range e.Env {
			args.Env = append(args.Env, v.Name+"="+v.Value)
		}
	}
	if stdin != nil {
		in, err := readAll(ctx, stdin)
		if err != nil {
			return execArgs{}, err
		}
		args.Input = in
	}
	return args, nil
}

// readAll reads r to its end. A Read that is in progress when ctx ends keeps one goroutine until r returns.
func readAll(ctx context.Context, r io.Reader) ([]byte, error) {
	type result struct {
		b   []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		b, err := io.ReadAll(io.LimitReader(r, maxStdin+1))
		done <- result{b, err}
	}()
	select {
	case got := <-done:
		if got.err == nil && len(got.b) > maxStdin {
			return nil, errdefs.Exhaustedf("it accepts at most %d bytes of input; copy larger input with ssh", maxStdin)
		}
		return got.b, got.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// run runs a command to its end. When ctx ends first, the command is killed.
func (s *session) run(ctx context.Context, args execArgs, signals <-chan int) (execStatus, error) {
	var started struct {
		PID int64 `json:"pid"`
	}
	err := s.call(ctx, "guest-exec", args, &started, answerLimit)
	if refused := new(refusal); errors.As(err, &refused) {
		// The path is the only thing that can be wrong with these arguments.
		return execStatus{}, errdefs.NotFoundf("%s: %w", args.Path, err)
	}
	if err != nil {
		return execStatus{}, err
	}
	x, err := s.follow(ctx, started.PID, signals)
	if err != nil && ctx.Err() != nil {
		s.abandon(ctx, started.PID)
	}
	return x, err
}

// follow polls pid until it has ended.
func (s *session) follow(ctx context.Context, pid int64, signals <-chan int) (execStatus, error) {
	pauses := backoff.ExponentialBackOff{InitialInterval: pollFirst, RandomizationFactor: 0.1, Multiplier: 1.5, MaxInterval: pollMost}
	wait := time.NewTimer(pauses.NextBackOff())
	defer wait.Stop()
	for {
		select {
		case <-ctx.Done():
			return execStatus{}, context.Cause(ctx)
		case <-s.port.gone:
			return execStatus{}, errdefs.Unavailablef("the link to qemu-guest-agent was lost")
		case n, ok := <-signals:
			if !ok {
				signals = nil
			} else if err := s.kill(ctx, pid, n); err != nil {
				return execStatus{}, err
			}
			continue
		case <-wait.C:
		}
		var x execStatus
		if err := s.call(ctx, "guest-exec-status", map[string]int64{"pid": pid}, &x, outputLimit); err != nil {
			return x, err
		}
		if x.Exited {
			return x, nil
		}
		wait.Reset(pauses.NextBackOff())
	}
}

// kill sends a signal to the process that the agent runs as pid.
func (s *session) kill(ctx context.Context, pid int64, signal int) error {
	args := execArgs{Path: "kill", Arg: []string{"-" + strconv.Itoa(signal), strconv.FormatInt(pid, 10)}}
	_, err := s.run(ctx, args, nil)
	return err
}

// abandon kills pid and makes the agent forget it. Preconditions: ctx has ended.
func (s *session) abandon(ctx context.Context, pid int64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterKill)
	defer cancel()
	const sigkill = 9
	if s.kill(ctx, pid, sigkill) == nil {
		_, _ = s.follow(ctx, pid, nil) // its result does not matter any more
	}
}

// capture runs an internal command and returns its output.
func (s *session) capture(ctx context.Context, path string, arg ...string) ([]byte, error) {
	x, err := s.run(ctx, execArgs{Path: path, Arg: arg, Capture: true}, nil)
	if err != nil {
		return nil, err
	}
	if x.code() != 0 {
		return nil, errdefs.Unsupportedf("%s ended with code %d in the guest", path, x.code())
	}
	return bytes.Clone(x.Out), nil
}
