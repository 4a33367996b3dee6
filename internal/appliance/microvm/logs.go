package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/guest"
)

// What is kept of the VMs of one workload that are gone.
const (
	maxLogs  = 5
	maxBytes = 4 << 20 // of each log: its end
)

// logs keeps the logs of VMs that are gone, one file for each: DIR/WORKLOAD/STARTED-ID.log, where STARTED is the time in nanoseconds.
type logs struct {
	dir string
	log *slog.Logger
}

// keep stores the log of an instance. A second call stores it again.
func (l logs) keep(ctx context.Context, e Engine, i reconcile.Instance) error {
	var text tail
	err := e.Logs(ctx, i.ID, guest.LogOptions{Tail: -1}, func(x guest.LogEntry) error {
		text.add(x.Data)
		return nil
	})
	if err != nil || len(text.b) == 0 {
		return err
	}
	dir := filepath.Join(l.dir, i.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	name := fmt.Sprintf("%019d-%s.log", max(i.StartedAt.UnixNano(), 0), i.ID)
	if err := atomicfile.WriteFile(filepath.Join(dir, name), text.b, 0o600); err != nil {
		return err
	}
	old, err := l.files(i.Name)
	for len(old) > maxLogs && err == nil {
		err, old = os.Remove(old[0]), old[1:]
	}
	return err
}

// files returns the logs that are kept of a workload, the oldest first.
func (l logs) files(name string) ([]string, error) {
	all, err := os.ReadDir(filepath.Join(l.dir, name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var paths []string
	for _, f := range all {
		if strings.HasSuffix(f.Name(), ".log") {
			paths = append(paths, filepath.Join(l.dir, name, f.Name()))
		}
	}
	slices.Sort(paths)
	return paths, nil
}

// forget removes the logs of a workload.
func (l logs) forget(name string) error { return os.RemoveAll(filepath.Join(l.dir, name)) }

// tail keeps the last maxBytes that are added.
type tail struct{ b []byte }

func (t *tail) add(p []byte) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*maxBytes {
		t.b = slices.Clone(t.b[len(t.b)-maxBytes:])
	}
}

// Logs implements reconcile.Driver.
func (d *Driver) Logs(ctx context.Context, name string, o reconcile.LogOptions, write func([]byte) error) error {
	i, err := d.Get(ctx, name)
	alive := err == nil
	switch {
	case o.Serial && err != nil:
		return err
	case o.Serial:
		return d.Engine.Logs(ctx, i.ID, guest.LogOptions{Serial: true, Follow: o.Follow, Tail: all(o.Tail)}, data(write))
	}
	wanted := all(o.Tail)
	if wanted > 0 && alive { // what the VM has written itself comes last
		here := 0
		err := d.Engine.Logs(ctx, i.ID, guest.LogOptions{Tail: wanted}, func(guest.LogEntry) error { here++; return nil })
		if err != nil {
			return err
		}
		if here >= wanted {
			return d.Engine.Logs(ctx, i.ID, guest.LogOptions{Follow: o.Follow, Tail: wanted}, data(write))
		}
		wanted -= here
	}
	if err := d.logs.read(name, wanted, write); err != nil {
		return err
	}
	if !alive {
		return nil
	}
	return d.Engine.Logs(ctx, i.ID, guest.LogOptions{Follow: o.Follow, Tail: -1}, data(write))
}

// all returns the number of lines for the engine, which takes 0 for none.
func all(tail int) int {
	if tail <= 0 {
		return -1
	}
	return tail
}

func data(write func([]byte) error) func(guest.LogEntry) error {
	return func(e guest.LogEntry) error { return write(e.Data) }
}

// read writes the last lines that are kept of a workload; all, if lines is negative.
func (l logs) read(name string, lines int, write func([]byte) error) error {
	paths, err := l.files(name)
	if err != nil {
		return err
	}
	var text []byte
	for _, p := range slices.Backward(paths) { // at most maxLogs·2·maxBytes
		b, err := os.ReadFile(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was removed meanwhile
		} else if err != nil {
			return err
		}
		text = slices.Concat(b, text)
		if lines >= 0 && bytes.Count(text, []byte("\n")) > lines {
			break
		}
	}
	if lines >= 0 {
		text = lastLines(text, lines)
	}
	for r := bytes.NewReader(text); ; {
		part := make([]byte, 64<<10)
		n, err := r.Read(part)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err := write(part[:n]); err != nil {
			return err
		}
	}
}

// lastLines returns the end of text with n lines.
func lastLines(text []byte, n int) []byte {
	end := len(bytes.TrimSuffix(text, []byte("\n")))
	for range n {
		at := bytes.LastIndexByte(text[:max(end, 0)], '\n')
		if at < 0 {
			return text
		}
		end = at
	}
	if n == 0 {
		return nil
	}
	return text[end+1:]
}
