// Package engine owns the VMs of one machine: their life cycle, their records and the events about them.
//
// Operations on one VM run one after the other; different VMs run in parallel. The engine writes each operation to
// the journal before it begins and settles it afterwards. So the next Run finishes or undoes whatever kill -9
// interrupts. Guests do not notice a restart of the daemon. The engine knows no hypervisor, image format, network or
// API. They come as values of the contracts and are wired elsewhere.
package engine

import (
	"maps"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/vm"
)

// Engine owns all VMs. Its methods are safe for concurrent use. Records that it returns belong to the caller.
//
// Operations wait until Run has recovered what an earlier process left (see Recovered). They return Unavailable once
// Run has been told to end.
type Engine struct {
	*node
	containerVerbs
	volumeVerbs
	sizeVerbs
	nicVerbs
	strays *strays
}

// containerVerbs are the methods of Engine for single containers of running VMs.
type containerVerbs struct{ *node }

// volumeVerbs are the methods of Engine for the volumes of VMs.
type volumeVerbs struct{ *node }

// sizeVerbs are the methods of Engine for the size of VMs.
type sizeVerbs struct{ *node }

// nicVerbs are the methods of Engine for the interfaces of VMs.
type nicVerbs struct{ *node }

// strays are the remains that recovery found of VMs that the journal does not know.
type strays struct {
	*node
	mu   sync.Mutex
	byID map[vm.ID][]vm.NIC
}

func (s *strays) add(id vm.ID, nics ...vm.NIC) {
	s.mu.Lock()
	defer s.mu.Unlock()
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
