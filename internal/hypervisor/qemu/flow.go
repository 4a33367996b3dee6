package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor/qemu/stream"
)

// flow is the reading end of the migration stream.
type flow struct {
	r       *os.File
	done    chan struct{} // closed when the stream has ended; the fields below are valid from then on
	machine string
	written stream.Written
	err     error
}

// pipeSize is how many bytes QEMU can write before we read them.
const pipeSize = 1 << 20

// newFlow returns the end of a pipe to which QEMU writes. The data goes into the files; memory becomes a delta to base if it is
// similar enough. base may be nil. If that fails, the returned ctx ends with the error as its cause.
func newFlow(ctx context.Context, memory, base, state *os.File) (context.Context, *flow, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return ctx, nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	_, _ = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, pipeSize) // if this fails, saves are only slower
	for _, f := range []*os.File{memory, state} {
		if err := errors.Join(f.Truncate(0), rewind(f)); err != nil {
			_, _ = r.Close(), w.Close()
			return ctx, nil, nil, err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	f := &flow{r: r, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		m := stream.NewFile(memory, base)
		if f.machine, f.err = stream.Split(r, "mem", m, state); f.err == nil {
			f.written, f.err = m.Finish()
		}
		if f.err != nil {
			_ = r.Close()
		}
		if f.err != nil && !errors.Is(f.err, io.ErrUnexpectedEOF) { // otherwise QEMU gave up and reports the reason itself
			cancel(f.err)
		}
	}()
	return ctx, f, w, nil
}

func rewind(f *os.File) error {
	_, err := f.Seek(0, 0)
	return err
}

// wait waits for the end of the stream.
func (f *flow) wait(ctx context.Context) error {
	select {
	case <-f.done:
		_ = f.r.Close()
		return f.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// end aborts the stream.
func (f *flow) end() {
	_ = f.r.Close()
	<-f.done
}
