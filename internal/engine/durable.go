package engine

import (
	"context"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// durable returns when what is on record survives a power cut. It runs before an operation returns, and before
// anything is destroyed that only an older record refers to.
func (e *Engine) durable(ctx context.Context) error {
	return e.journal.Sync(context.WithoutCancel(ctx))
}

// synced wraps with, so that its change survives a power cut when it returns. After an error, the caller undoes the
// change as if the journal had failed after it.
func (e *Engine) synced(with put) put {
	return func(ctx context.Context, r vm.Record) (vm.Record, error) {
		r, err := with(ctx, r)
		if err == nil {
			err = e.durable(ctx)
		}
		return r, err
	}
}

// syncing starts to make the disks of id that are in its own folder durable, with their names. wait returns when they
// are; it is called before a record refers to them. Layers below the top are no longer written to, and are durable.
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
	go func() { done <- e.syncs.Sync(paths...) }() // ends by itself; the caller waits for it
	return func() error { return <-done }
}
