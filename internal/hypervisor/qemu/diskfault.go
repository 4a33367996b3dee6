package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
)

// faults holds the last disk fault of the guest. If a write finds no space, QEMU stops the guest and keeps the write for a
// retry. It reports any other error to the guest, as a real disk would. These are QEMU's defaults (werror=enospc,
// rerror=report).
type faults struct {
	mu      sync.Mutex
	last    *hypervisor.DiskFault
	changed chan struct{} // closed and replaced when last changes
}

// DiskFault implements hypervisor.DiskWatcher.
func (i *instance) DiskFault(ctx context.Context) (*hypervisor.DiskFault, <-chan struct{}, error) {
	if _, err := i.connected(ctx); err != nil {
		return nil, nil, fmt.Errorf("disks of VM %s: %w", i.h.ID, err)
	}
	last, changed := i.faults.look()
	return last, changed, nil
}

func (f *faults) look() (*hypervisor.DiskFault, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.last, f.changed
}

func (f *faults) set(now *hypervisor.DiskFault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == now || f.last != nil && now != nil && *f.last == *now {
		return
	}
	f.last = now
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

// hear updates the fault from an event. It runs on the QMP reader's goroutine.
func (f *faults) hear(e qmp.Event) {
	switch e.Name {
	case resumed:
		if last, _ := f.look(); last != nil && last.Stands {
			f.set(nil)
		}
	case "BLOCK_IO_ERROR":
		var data struct {
			Action  string `json:"action"`
			NoSpace bool   `json:"nospace"`
			Reason  string `json:"reason"`
		}
		if json.Unmarshal(e.Data, &data) == nil && data.Action != "ignore" {
			f.set(&hypervisor.DiskFault{Stands: data.Action == "stop", Full: data.NoSpace, Cause: data.Reason})
		}
	}
}

// learnFault checks whether a disk fault has stopped the guest while no driver was connected.
func (i *instance) learnFault(ctx context.Context, c *qmp.Client) error {
	now, err := status(ctx, c)
	if err != nil {
		return err
	}
	last, _ := i.faults.look()
	switch {
	case now != "io-error" && last != nil && last.Stands:
		i.faults.set(nil)
	case now == "io-error" && (last == nil || !last.Stands):
		var disks []struct {
			Status string `json:"io-status"`
		}
		if err := c.Execute(ctx, "query-block", nil, &disks); err != nil {
			return err
		}
		fault := hypervisor.DiskFault{Stands: true}
		for _, d := range disks {
			fault.Full = fault.Full || d.Status == "nospace"
		}
		i.faults.set(&fault)
	}
	return nil
}
