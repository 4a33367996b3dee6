package engine

import (
	"maps"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/vm"
)

// strays are the remains that recovery found of VMs that the journal does not know.
type strays struct {
	*node
	mu   sync.Mutex
	byID map[vm.ID][]vm.NIC
}

func (s *strays) add(id vm.ID, nics ...vm.NIC) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID = map[vm.ID][]vm.NIC{}
	}
	s.byID[id] = append(s.byID[id], nics...)
}

func (s *strays) get(id vm.ID) ([]vm.NIC, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	nics, ok := s.byID[id]
	return nics, ok
}

func (s *strays) drop(id vm.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, id)
}

func (s *strays) ids() []vm.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.byID))
}
