package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// FlattenDisk implements hypervisor.DiskFlattener.
func (i *instance) FlattenDisk(ctx context.Context, serial string, base *vm.Disk) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.flatten(ctx, c, serial, base))
	}
	if err != nil {
		return fmt.Errorf("flatten disk %s of VM %s: %w", serial, i.h.ID, err)
	}
	return nil
}

func (i *instance) flatten(ctx context.Context, c *qmp.Client, serial string, base *vm.Disk) error {
	d := disks{pid: i.h.PID, c: c}
	tops, err := d.current(ctx)
	if err != nil {
		return err
	}
	top, ok := tops[serial]
	if !ok || serial == "" {
		return errdefs.Invalidf("the VM has no such disk")
	}
	job := "flatten-" + top
	args := props{"job-id": job, "device": top}
	if base != nil {
		files, err := d.open(ctx)
		if err != nil {
			return err
		}
		id, err := inodeOf(base.Path)
		if err != nil {
			return errdefs.Preconditionf("look at layer %s: %w", base.Path, err)
		}
		node, ok := files[id]
		if !ok {
			return errdefs.Invalidf("%s is not one of its layers", base.Path)
		}
		// QEMU knows the layer only as a descriptor, so this sets the path that goes into the header.
		args["base-node"], args["backing-file"] = node, base.Path
	}
	e := i.listen()
	defer i.deafen(e)
	if err := c.Execute(ctx, "block-stream", args, nil); err != nil {
		return err
	}
	if err := streamed(ctx, c, e, job); err != nil {
		return err
	}
	return i.flush(ctx, c)
}

// flush makes QEMU write its buffered disk data. Until then only the old chain is valid if QEMU dies. QEMU has no separate
// command for this, but it flushes whenever it stops the guest, so the guest is stopped that long.
func (i *instance) flush(ctx context.Context, c *qmp.Client) error {
	ctx = context.WithoutCancel(ctx) // a guest that was stopped for this must resume, even if the caller gives up
	now, err := status(ctx, c)
	if err != nil {
		return err
	}
	err = c.Execute(ctx, "stop", nil, nil)
	if now == "running" {
		err = errors.Join(err, cont(ctx, c))
	}
	return err
}

// streamed waits for the end of a job. If ctx ends first, it cancels the job.
func streamed(ctx context.Context, c *qmp.Client, e *ear, job string) error {
	for {
		ev, err := e.next(ctx, c)
		if ctx.Err() != nil {
			// The data copied so far does no harm: it equals the data in the layers below.
			off, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
			defer cancel()
			if err := c.Execute(off, "block-job-cancel", props{"device": job}, nil); err != nil && !refused(err) {
				return err
			}
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		var data struct {
			Device string `json:"device"`
			Error  string `json:"error"`
		}
		if json.Unmarshal(ev.Data, &data) != nil || data.Device != job {
			continue
		}
		switch ev.Name {
		case "BLOCK_JOB_COMPLETED":
			if data.Error != "" {
				return fmt.Errorf("QEMU could not copy the layers: %s", data.Error)
			}
			return nil
		case "BLOCK_JOB_CANCELLED":
			return errdefs.Conflictf("the merge was cancelled")
		}
	}
}
