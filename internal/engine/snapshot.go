package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// SaveSnapshot saves the VM of ref: a running one with its memory, while it goes on; a stopped one with its disks.
func (e *Engine) SaveSnapshot(ctx context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{}, errdefs.Unsupportedf("snapshots are not there yet")
}

// Clone makes a VM that goes on from a snapshot. It returns when its CPUs run; it is ready when it is itself.
func (e *Engine) Clone(ctx context.Context, spec vm.CloneSpec) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("snapshots are not there yet")
}

// Restore makes the VM of ref go back to a snapshot that was taken of it.
func (e *Engine) Restore(ctx context.Context, ref, snap string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("snapshots are not there yet")
}

// Hibernate saves a running VM under name ("": hibernate-<id>) and ends its process once all is durable.
func (e *Engine) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("snapshots are not there yet")
}

// Wake makes a hibernated VM go on. Waking one that runs is no error.
func (e *Engine) Wake(ctx context.Context, ref string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("snapshots are not there yet")
}

// RemoveSnapshot deletes a snapshot unless a hibernated VM is in it.
func (e *Engine) RemoveSnapshot(ctx context.Context, ref string) error {
	return errdefs.Unsupportedf("snapshots are not there yet")
}
