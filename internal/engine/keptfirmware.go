package engine

import (
	"context"
	"errors"

	"cocoonstack.io/cocoon/internal/vm"
)

// KeptFirmware returns what the firmware of removed VMs has kept, of those that the caller may use.
func (e *Engine) KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error) {
	return e.dirs.kept.List(vm.Behalf(ctx))
}

// DropFirmware removes what the firmware of a removed VM has kept. Errors: NotFound, also for that of another owner.
func (e *Engine) DropFirmware(ctx context.Context, k vm.KeptFirmware) error {
	if err := e.dirs.kept.Drop(vm.Behalf(ctx), k); err != nil {
		return err
	}
	e.log.Info("kept state of firmware removed", "vm", k.Owner.Qualify(k.VM))
	return nil
}

func (n *node) dropAllFirmware() error {
	all, err := n.dirs.kept.List(vm.Owner{})
	for _, k := range all {
		err = errors.Join(err, n.dirs.kept.Drop(vm.Owner{}, k))
	}
	return err
}
