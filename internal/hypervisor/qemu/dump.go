package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
)

var _ hypervisor.MemoryDumper = (*instance)(nil)

// dumping is the state of a guest that stands still for a dump.
const dumping = "save-vm"

// dumpBuffer is how much of a dump is written at a time.
const dumpBuffer = 1 << 20

// DumpMemory implements hypervisor.MemoryDumper. QEMU writes to a pipe. It pauses the guest itself, and resumes it also if nobody reads the pipe
// any more: a daemon that is killed leaves a guest that runs.
func (i *instance) DumpMemory(ctx context.Context, w io.Writer) error {
	if err := i.dump(ctx, w); err != nil {
		return fmt.Errorf("dump the memory of VM %s: %w", i.h.ID, i.OrEnded(err))
	}
	return nil
}

func (i *instance) dump(ctx context.Context, w io.Writer) error {
	c, err := i.connected(ctx)
	if err != nil {
		return err
	}
	e := i.listen()
	defer i.deafen(e)
	r, theirs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	defer r.Close()
	_, _ = unix.FcntlInt(r.Fd(), unix.F_SETPIPE_SZ, pipeSize) // if this fails, dumps are only slower
	const name = "dump"
	err = c.ExecuteFile(ctx, "getfd", props{"fdname": name}, nil, theirs)
	_ = theirs.Close() // QEMU has its own copy
	if err == nil {
		err = c.Execute(ctx, "dump-guest-memory", props{"paging": false, "protocol": "fd:" + name, "detach": true}, nil)
		if err != nil {
			cleanUp(ctx, c, "closefd", props{"fdname": name})
		}
	}
	if err != nil {
		return err
	}
	copied := make(chan error, 1)
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, dumpBuffer))
		if err != nil {
			_ = r.Close() // QEMU gives up
		}
		copied <- err
	}()
	why, err := dumped(ctx, c, e)
	if ctx.Err() != nil {
		_ = r.Close()
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
		defer cancel()
		_, _ = dumped(limited, c, e) // then the guest runs again
	}
	if err != nil { // without a connection nobody says whether QEMU has given up
		_ = r.Close()
	}
	failed := <-copied
	if err == nil || ctx.Err() != nil {
		err = errors.Join(err, settleDump(ctx, c))
	}
	if err == nil && failed != nil {
		return failed
	}
	if err == nil && why != "" {
		return errdefs.Unavailablef("QEMU ended the dump: %s", why)
	}
	return err
}

// settleDump waits until the guest is as before a dump that is over: QEMU resumes it after it has said so.
func settleDump(ctx context.Context, c *qmp.Client) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
	defer cancel()
	_, err := backoff.Retry(ctx, func() (settled bool, err error) {
		now, err := status(ctx, c)
		if err != nil {
			return false, backoff.Permanent(err)
		}
		if now == dumping {
			return false, errdefs.Unavailablef("the guest has not gone on after the dump")
		}
		return true, nil
	}, backoff.WithBackOff(backoff.NewConstantBackOff(finalizing)), backoff.WithMaxElapsedTime(0))
	return err
}

// dumped waits for the end of a dump, and returns why it failed; "": it is complete.
func dumped(ctx context.Context, c *qmp.Client, e *ear) (why string, err error) {
	for {
		ev, err := e.next(ctx, c)
		if err != nil {
			return "", err
		}
		if ev.Name != "DUMP_COMPLETED" {
			continue
		}
		var data struct {
			Result struct {
				Status string `json:"status"`
			} `json:"result"`
			Error string `json:"error"`
		}
		if err := json.Unmarshal(ev.Data, &data); err != nil {
			return "", fmt.Errorf("read the event %s: %w", ev.Name, err)
		}
		if data.Result.Status != "completed" {
			return "status " + data.Result.Status + " " + data.Error, nil
		}
		return "", nil
	}
}
