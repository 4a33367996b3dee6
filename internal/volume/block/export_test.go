package block

import (
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Add is what New does with a device that is named for the first time.
func (s *Store) Add(owner vm.Owner, spec volume.Spec, path string) (volume.Volume, error) {
	return s.add(owner, spec, path, false)
}
