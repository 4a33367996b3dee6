package nodecli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/vm"
)

// Launch creates a VM and starts it. It does not wait for the guest.
func (c *Client) Launch(ctx context.Context, s vm.Spec) (vm.Record, error) {
	text, err := json.Marshal(nodejson.FromSpec(s))
	if err != nil {
		return vm.Record{}, fmt.Errorf("encode VM %s: %w", s.Name, err)
	}
	return c.record(ctx, call{args: []string{"vm", "run", "--output=json", "--wait=false", "--spec=-"}, stdin: bytes.NewReader(text)})
}

// Start starts a VM that does not run.
func (c *Client) Start(ctx context.Context, ref string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "start", "--output=json", "--", ref}})
}

// Stop asks the guest to shut down and kills it after grace: negative means the spec's grace, 0 kills at once.
func (c *Client) Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	args := append([]string{"vm", "stop", "--output=json"}, graceFlags(grace)...)
	return c.record(ctx, call{args: append(args, "--", ref)})
}

// Reboot starts the guest of a running VM again, with hard at once.
func (c *Client) Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error) {
	args := []string{"vm", "reboot", "--output=json"}
	if hard {
		args = append(args, "--hard")
	}
	return c.record(ctx, call{args: append(args, "--", ref)})
}

// Resize makes a running VM as large as to says. It takes nothing away.
func (c *Client) Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "resize", "--output=json", "--cpu", strconv.Itoa(to.CPUs), "--memory", strconv.FormatInt(to.Memory, 10), "--", ref}})
}

// AttachVolume gives a VM a volume of the volume store, which the guest mounts at path unless that is "".
func (c *Client) AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	volume := use.Ref
	if path != "" {
		volume += ":" + path
	}
	if use.ReadOnly {
		volume += ":ro"
	}
	return c.record(ctx, call{args: []string{"vm", "attach-volume", "--output=json", "--", ref, volume}})
}

// DetachVolume takes a volume from a VM.
func (c *Client) DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "detach-volume", "--output=json", "--", ref, volume}})
}

// DumpMemory writes the memory of a running VM to a volume, as the file with that name.
func (c *Client) DumpMemory(ctx context.Context, ref, volume, file string) error {
	return c.do(ctx, call{args: []string{"vm", "dump-memory", "--file=" + file, "--", ref, volume}})
}

// AttachNIC gives a VM one more interface.
func (c *Client) AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error) {
	args := []string{"vm", "attach-nic", "--output=json"}
	if want.MAC != "" {
		args = append(args, "--mac="+want.MAC)
	}
	if want.LinkDown {
		args = append(args, "--link-down")
	}
	return c.record(ctx, call{args: append(args, "--", ref, want.Network)})
}

// DetachNIC takes an interface that is not the first from a VM: that on a network, or with a hardware address.
func (c *Client) DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "detach-nic", "--output=json", "--", ref, nic}})
}

// SetLink sets the link of an interface of a VM down, or up: that on a network, or with a hardware address.
func (c *Client) SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error) {
	to := "up"
	if down {
		to = "down"
	}
	return c.record(ctx, call{args: []string{"vm", "set-link", "--output=json", "--", ref, nic, to}})
}

// Pause stops the CPUs of a running VM's guest until Unpause.
func (c *Client) Pause(ctx context.Context, ref string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "pause", "--output=json", "--", ref}})
}

// Unpause resumes the guest of a paused VM.
func (c *Client) Unpause(ctx context.Context, ref string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "unpause", "--output=json", "--", ref}})
}

func graceFlags(grace time.Duration) []string {
	switch {
	case grace == 0:
		return []string{"--now"}
	case grace > 0:
		return []string{"--grace=" + grace.String()}
	}
	return nil
}

// Remove deletes a VM; a running one needs force.
func (c *Client) Remove(ctx context.Context, ref string, force bool) error {
	args := []string{"vm", "rm"}
	if force {
		args = append(args, "--force")
	}
	return c.do(ctx, call{args: append(args, "--", ref)})
}

// Inspect returns one VM.
func (c *Client) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "inspect", "--", ref}})
}

// List returns every VM.
func (c *Client) List(ctx context.Context) ([]vm.Record, error) {
	list, err := ask[[]nodejson.VM](ctx, c, call{args: []string{"vm", "list", "--output=json"}})
	if err != nil {
		return nil, err
	}
	all := make([]vm.Record, len(list))
	for i, v := range list {
		all[i] = v.Record()
	}
	return all, nil
}

// maxLine is the longest line of a stream, in bytes.
const maxLine = 4 << 20

// lines runs x and passes each line that it prints to fn. An error of fn ends x.
func (c *Client) lines(ctx context.Context, x call, fn func([]byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	x.stdout = w
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := bufio.NewScanner(r)
		s.Buffer(nil, maxLine)
		for s.Scan() {
			if err := fn(s.Bytes()); err != nil {
				cancel(err)
				break
			}
		}
		if err := s.Err(); err != nil {
			cancel(errdefs.New(errdefs.Internal, "read what %s prints: %w", c.binary, err))
		}
		_, _ = io.Copy(io.Discard, r) // the command must not block on a full pipe
	}()
	err := c.do(ctx, x)
	w.Close()
	<-done
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// Watch reports changes after the revision until ctx ends or fn fails; with a negative revision it first reports what
// exists as ADDED. FailedPrecondition: the history does not reach back so far.
func (c *Client) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	args := []string{"vm", "status", "--event", "--format=json"}
	if after >= 0 {
		args = append(args, "--after="+strconv.FormatInt(after, 10))
	}
	err := c.lines(ctx, call{args: args}, func(line []byte) error {
		if line = bytes.TrimSpace(line); len(line) == 0 || string(line) == none {
			return nil
		}
		var e nodejson.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return errdefs.New(errdefs.Internal, "%s printed an event that is no JSON: %w", c.binary, err)
		}
		rec := e.VM.Record()
		return fn(vm.Event{Type: e.Event, Revision: max(e.Revision, rec.Revision), Record: rec})
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		return errdefs.Unavailablef("%s ended the watch", c.binary)
	}
	return err
}

// Logs passes the entries of a VM's log to fn.
func (c *Client) Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	args := []string{"vm", "logs", "--output=json"}
	for flag, on := range map[string]bool{"--follow": o.Follow, "--previous": o.Previous, "--serial": o.Serial} {
		if on {
			args = append(args, flag)
		}
	}
	if o.Container != "" {
		args = append(args, "--container="+o.Container)
	}
	if o.Tail >= 0 {
		args = append(args, "--tail="+strconv.Itoa(o.Tail))
	}
	if !o.Since.IsZero() {
		args = append(args, "--since="+o.Since.Format(time.RFC3339Nano))
	}
	return c.lines(ctx, call{args: append(args, "--", ref)}, func(line []byte) error {
		var e guest.LogEntry
		if err := json.Unmarshal(line, &e); err != nil {
			return errdefs.New(errdefs.Internal, "%s printed a log entry that is no JSON: %w", c.binary, err)
		}
		return fn(e)
	})
}

// Exec runs a command in a guest and returns its exit code.
func (c *Client) Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error) {
	args, env := []string{"vm", "exec", "--control-fd=4"}, []string(nil)
	for _, v := range e.Env { // values may be secret, and all users can read arguments
		args, env = append(args, "--env="+v.Name), append(env, v.Name+"="+v.Value)
	}
	if s.Stdin != nil {
		args = append(args, "--interactive")
	}
	if e.TTY {
		args = append(args, "--tty")
	}
	if e.WorkDir != "" {
		args = append(args, "--workdir="+e.WorkDir)
	}
	if e.Container != "" {
		args = append(args, "--container="+e.Container)
	}
	if e.User != "" {
		args = append(args, "--user="+e.User)
	}
	first := guest.WinSize{}
	if e.TTY {
		first = guest.WinSize{Rows: e.Rows, Cols: e.Cols}
	}
	return c.talk(ctx, call{args: append(append(args, "--", ref), e.Command...), env: env}, first, s)
}

// Attach connects to the standard streams of a guest's process; see guest.Attacher.
func (c *Client) Attach(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error {
	args := []string{"vm", "attach", "--control-fd=4"}
	if s.Stdin != nil {
		args = append(args, "--interactive")
	}
	if a.Container != "" {
		args = append(args, "--container="+a.Container)
	}
	x := call{args: append(args, "--", ref)}
	code, err := c.talk(ctx, x, guest.WinSize{Rows: a.Rows, Cols: a.Cols}, s)
	return c.ended(x, code, err)
}

// Forward connects to a TCP port in the guest; see guest.Forwarder, but it may read s.Stdin before the connection is
// open.
func (c *Client) Forward(ctx context.Context, ref string, port int, s guest.Streams) error {
	x := call{args: []string{"vm", "forward", "--", ref, strconv.Itoa(port)}}
	code, err := c.talk(ctx, x, guest.WinSize{}, s)
	return c.ended(x, code, err)
}

// talk runs x with the streams, which may outlive it.
func (c *Client) talk(ctx context.Context, x call, first guest.WinSize, s guest.Streams) (int, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return -1, fmt.Errorf("run %s: %w", c.binary, err)
	}
	defer r.Close()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer w.Close()
		send := json.NewEncoder(w)
		if first.Rows > 0 && first.Cols > 0 {
			_ = send.Encode(nodejson.Control{Rows: first.Rows, Cols: first.Cols})
		}
		relay(ctx, send, s)
	})
	// Standard input is our own pipe: exec would wait for a reader that nobody closes.
	in, closeInput := input(s.Stdin)
	defer closeInput()
	x.stdin, x.stdout, x.stderr, x.extra = in, s.Stdout, s.Stderr, r
	code, err := c.run(ctx, x)
	cancel()
	wg.Wait()
	return code, err
}

// relay sends terminal sizes and signals until ctx ends.
func relay(ctx context.Context, send *json.Encoder, s guest.Streams) {
	resize, signals := s.Resize, s.Signals
	for {
		var m nodejson.Control
		var ok bool
		select {
		case <-ctx.Done():
			return
		case size, open := <-resize:
			if ok = open; !open {
				resize = nil
			}
			m.Rows, m.Cols = size.Rows, size.Cols
		case n, open := <-signals:
			if ok = open; !open {
				signals = nil
			}
			m.Signal = n
		}
		if ok && send.Encode(m) != nil {
			return
		}
	}
}

// input makes a file of r, so that a command that has ended does not wait for the end of r.
func input(r io.Reader) (io.Reader, func()) {
	if r == nil {
		return nil, func() {}
	}
	if f, ok := r.(*os.File); ok {
		return f, func() {}
	}
	pr, pw, err := os.Pipe()
	if err != nil {
		return r, func() {}
	}
	go func() {
		_, _ = io.Copy(pw, r)
		pw.Close()
	}()
	return pr, func() { pr.Close() }
}

// Stats returns a guest's use of resources.
func (c *Client) Stats(ctx context.Context, ref string) (guest.Stats, error) {
	all, err := ask[[]nodejson.Stats](ctx, c, call{args: []string{"vm", "stats", "--output=json", "--", ref}})
	if err != nil {
		return guest.Stats{}, err
	}
	if len(all) != 1 {
		return guest.Stats{}, errdefs.New(errdefs.Internal, "%s listed %d VMs instead of one", c.binary, len(all))
	}
	return all[0].Stats(), nil
}

// KillContainer ends a run of one container; see guest.ContainerKeeper. A negative grace means the spec's grace, 0
// kills at once.
func (c *Client) KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error {
	args := append([]string{"vm", "restart", "--container=" + container, "--run=" + strconv.Itoa(run)}, graceFlags(grace)...)
	return c.do(ctx, call{args: append(args, "--", ref)})
}

// ReleaseContainer lets the containers start that wait for this one.
func (c *Client) ReleaseContainer(ctx context.Context, ref, container string) error {
	return c.do(ctx, call{args: []string{"vm", "release", "--", ref, container}})
}

// UpdateVolume replaces the files of a volume, also in the running guest.
func (c *Client) UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	if files == nil {
		files = []vm.VolumeFile{}
	}
	text, err := json.Marshal(files)
	if err != nil {
		return fmt.Errorf("encode volume %s: %w", volume, err)
	}
	return c.do(ctx, call{args: []string{"vm", "volume", "--", ref, volume}, stdin: bytes.NewReader(text)})
}

// AddContainer starts one more container in a running VM; see guest.Containers.
func (c *Client) AddContainer(ctx context.Context, ref string, add vm.Container) (vm.Record, error) {
	text, err := json.Marshal(add)
	if err != nil {
		return vm.Record{}, fmt.Errorf("encode container %s: %w", add.Name, err)
	}
	if err := c.do(ctx, call{args: []string{"vm", "add-container", "--", ref}, stdin: bytes.NewReader(text)}); err != nil {
		return vm.Record{}, err
	}
	return c.Inspect(ctx, ref)
}

// StartContainer starts a container that was added to a running VM and waits for it; see guest.Containers.
func (c *Client) StartContainer(ctx context.Context, ref, container string) (vm.Record, error) {
	if err := c.do(ctx, call{args: []string{"vm", "start-container", "--", ref, container}}); err != nil {
		return vm.Record{}, err
	}
	return c.Inspect(ctx, ref)
}

// RemoveContainer removes a container that was added to a VM; see guest.Containers.
func (c *Client) RemoveContainer(ctx context.Context, ref, container string) error {
	return c.do(ctx, call{args: []string{"vm", "remove-container", "--", ref, container}})
}

// ResizeContainers changes what containers of a running VM may use; see guest.Containers.
func (c *Client) ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	text, err := json.Marshal(want)
	if err != nil {
		return vm.Record{}, fmt.Errorf("encode resources of containers: %w", err)
	}
	if err := c.do(ctx, call{args: []string{"vm", "resize-containers", "--", ref}, stdin: bytes.NewReader(text)}); err != nil {
		return vm.Record{}, err
	}
	return c.Inspect(ctx, ref)
}
