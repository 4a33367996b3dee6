// Package nodecli implements the node API with the cocoon binary: each call runs one command, reads the JSON that it
// prints, and reads the error class of a failure from a separate file descriptor.
//
// It is for hosts where the API's socket cannot be reached but the binary can. It does not parse text meant for people,
// passes secrets only through pipes, and knows nothing of pods. A client may be used by many goroutines.
package nodecli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/vm"
)

// DefaultBinary is the default path of the binary.
const DefaultBinary = "/usr/local/bin/cocoon"

const (
	maxOutput = 256 << 20        // bytes of one answer
	maxError  = 64 << 10         // bytes of a failure
	parting   = 10 * time.Second // between the interrupt of a command and its kill
)

// Client runs one binary.
type Client struct {
	binary string
	socket string
}

// New returns a client of the binary, which uses the given socket; "" is the binary's default.
// Errors: FailedPrecondition when the binary cannot be run.
func New(binary, socket string) (*Client, error) {
	path, err := exec.LookPath(binary)
	if err != nil {
		return nil, errdefs.Preconditionf("the cocoon binary cannot be run: %w", err)
	}
	return &Client{binary: path, socket: socket}, nil
}

// Close is for symmetry with clients that hold a connection.
func (*Client) Close() error { return nil }

// Target is the path of the binary, for messages.
func (c *Client) Target() string { return c.binary }

// call is one run of the binary.
type call struct {
	args   []string
	env    []string  // NAME=VALUE, in addition to our own
	stdin  io.Reader // nil: none
	pipes  [][]byte  // passed as descriptors 4 and up: secrets
	stdout io.Writer
	stderr io.Writer // nil: discarded
	extra  *os.File  // one more descriptor, the first after pipes
}

// what names the command of x, for messages.
func (x call) what() string { return strings.Join(x.args[:min(2, len(x.args))], " ") }

// pass adds a flag with the path of a pipe that holds data.
func (x *call) pass(flag string, data []byte) {
	x.args = append(x.args, flag+"="+pipe(len(x.pipes)))
	x.pipes = append(x.pipes, data)
}

// passAuth adds the flag with the credentials, if there are any.
func (x *call) passAuth(auth []image.RegistryAuth) error {
	if len(auth) == 0 {
		return nil
	}
	config, err := dockerConfig(auth)
	if err == nil {
		x.pass("--auth-file", config)
	}
	return err
}

// pipe is the path by which the binary opens the n-th of call.pipes.
func pipe(n int) string { return fmt.Sprintf("/dev/fd/%d", 4+n) }

// run executes x and returns its exit code. The error is the failure that the binary reported, or that of running it.
func (c *Client) run(ctx context.Context, x call) (int, error) {
	cmd := exec.CommandContext(ctx, c.binary, append([]string{"--error-fd=3"}, x.args...)...)
	// The registry's token is passed only to commands that need it.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, "EPOCH_TOKEN=") || strings.HasPrefix(e, nodejson.BehalfName+"=") || c.socket != "" && strings.HasPrefix(e, "COCOON_SOCKET=")
	}), x.env...)
	if c.socket != "" {
		cmd.Env = append(cmd.Env, "COCOON_SOCKET="+c.socket)
	}
	if who := vm.Behalf(ctx); !who.Operator() {
		cmd.Env = append(cmd.Env, nodejson.BehalfEnv(who))
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = parting
	cmd.Stdin, cmd.Stdout, cmd.Stderr = x.stdin, x.stdout, x.stderr
	var files []*os.File // our copies of the child's descriptors
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	failure, w, err := os.Pipe()
	if err != nil {
		return -1, fmt.Errorf("run %s: %w", c.binary, err)
	}
	defer failure.Close()
	files = append(files, w)
	cmd.ExtraFiles = []*os.File{w}
	var writers []*os.File
	for range x.pipes {
		r, w, err := os.Pipe()
		if err != nil {
			return -1, fmt.Errorf("run %s: %w", c.binary, err)
		}
		files, writers = append(files, r, w), append(writers, w)
		cmd.ExtraFiles = append(cmd.ExtraFiles, r)
	}
	if x.extra != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, x.extra)
	}
	if err := cmd.Start(); err != nil {
		return -1, errdefs.Unavailablef("run %s: %w", c.binary, err)
	}
	for i, secret := range x.pipes { // smaller than a pipe's buffer, or read at once: the binary reads them first
		go func(w *os.File) {
			_, _ = w.Write(secret)
			w.Close()
		}(writers[i])
	}
	files[0].Close() // so that the read below ends with the child
	said := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(io.LimitReader(failure, maxError))
		said <- b
	}()
	err = cmd.Wait()
	failure.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // a pipe has deadlines; a grandchild may hold its end
	return c.outcome(ctx, x, err, <-said)
}

// outcome converts the result of a command, which ended with err and reported said.
func (c *Client) outcome(ctx context.Context, x call, err error, said []byte) (int, error) {
	what := x.what()
	if len(bytes.TrimSpace(said)) > 0 {
		var e nodejson.Error
		if json.Unmarshal(said, &e) != nil {
			return -1, errdefs.New(errdefs.Internal, "%s %s reported a failure that cannot be read", c.binary, what)
		}
		if ctx.Err() != nil {
			return -1, ctx.Err()
		}
		class, ok := errdefs.ClassNamed(e.Class)
		if !ok {
			class = errdefs.Internal
		}
		return -1, errdefs.New(class, "%s", e.Message)
	}
	if err == nil {
		return 0, nil
	}
	if ctx.Err() != nil {
		return -1, ctx.Err()
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return -1, errdefs.Unavailablef("run %s %s: %w", c.binary, what, err)
}

// classes are the meanings of the documented exit codes, for a binary that reports only these.
var classes = map[int]errdefs.Class{
	2: errdefs.InvalidArgument, 3: errdefs.NotFound, 4: errdefs.AlreadyExists, 5: errdefs.FailedPrecondition, 6: errdefs.Unavailable,
	7: errdefs.ResourceExhausted, 8: errdefs.Unsupported, 9: errdefs.DataLoss, 124: errdefs.DeadlineExceeded, 130: errdefs.Canceled,
}

// do runs x; every exit code except 0 is a failure.
func (c *Client) do(ctx context.Context, x call) error {
	code, err := c.run(ctx, x)
	return c.ended(x, code, err)
}

// ended makes an error of every exit code of x except 0.
func (c *Client) ended(x call, code int, err error) error {
	if err == nil && code != 0 {
		return errdefs.New(classes[code], "%s %s ended with exit code %d", c.binary, x.what(), code)
	}
	return err
}

// none is what a binary prints instead of an empty list.
const none = "No VMs found."

// ask runs x and decodes its output.
func ask[T any](ctx context.Context, c *Client, x call) (T, error) {
	var out T
	buf := &bounded{limit: maxOutput}
	x.stdout = buf
	if err := c.do(ctx, x); err != nil {
		return out, err
	}
	text := bytes.TrimSpace(buf.text)
	if string(text) == none {
		return out, nil
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return out, errdefs.New(errdefs.Internal, "%s %s printed no JSON: %w", c.binary, x.what(), err)
	}
	return out, nil
}

func (c *Client) record(ctx context.Context, x call) (vm.Record, error) {
	v, err := ask[nodejson.VM](ctx, c, x)
	if err != nil {
		return vm.Record{}, err
	}
	return v.Record(), nil
}

// bounded is a buffer that rejects data beyond limit.
type bounded struct {
	text  []byte
	limit int
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(b.text)+len(p) > b.limit {
		return 0, errdefs.Exhaustedf("the answer has more than %d bytes", b.limit)
	}
	b.text = append(b.text, p...)
	return len(p), nil
}
