package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// UpdateVolume replaces the content of a volume of files, in the running guest too.
func (e *Engine) UpdateVolume(context.Context, string, string, []vm.VolumeFile) error {
	return errdefs.Unsupportedf("volumes cannot be updated yet")
}
