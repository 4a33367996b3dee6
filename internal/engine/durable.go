package engine

import (
	"context"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// durable returns when what is on record survives a power cut. It comes before the answer of an operation, and before
// anything is destroyed that only an older record leads to.
func (e *Engine) durable(ctx context.Context) error {
	return e.journal.Sync(context.WithoutCancel(ctx))
}

// synced is with, and what it changes survives a power cut when it returns. Who undoes it after an error does as if the
// journal had failed after the change.
func (e *Engine) synced(with put) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) {
		r, err := with(ctx, r)
		if err == nil {
			err = e.durable(ctx)
		}
		return r, err
	}
}

// syncing begins to make the disks of id that are in its own folder durable, with their names. wait returns when they
// are; it comes before the record that leads to them. Layers below the top are not written to any more, and durable.
func (e *Engine) syncing(id vm.ID, disks []vm.Disk) (wait func() error) {
	dir := e.stateDir(id)
	paths := []string{dir, filepath.Dir(dir)}
	for _, d := range disks {
		if d.ReadOnly || !strings.HasPrefix(d.Path, dir+string(filepath.Separator)) {
			continue
		}
		paths = append(paths, d.Path)
		if at := filepath.Dir(d.Path); at != dir {
			paths = append(paths, at)
		}
	}
	done := make(chan error, 1)
	go func() { done <- e.syncs.Sync(paths...) }() // ends by itself; who begins it waits for it
	return func() error { return <-done }
}
