package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Restore makes the VM of ref go back to a snapshot that was taken of it.
func (e *Engine) Restore(ctx context.Context, ref, snap string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("not there yet")
}

// Hibernate saves a running VM under name ("": hibernate-<id>) and ends its process once all is durable.
func (e *Engine) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("not there yet")
}

// Wake makes a hibernated VM go on. Waking one that runs is no error.
func (e *Engine) Wake(ctx context.Context, ref string) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("not there yet")
}

func (e *Engine) wake(ctx context.Context, m *machine) (vm.Record, error) {
	return vm.Record{}, errdefs.Unsupportedf("not there yet")
}
