package cocoond

import (
	"context"
	"sync"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// keptNetwork is a network that can be torn down and is set up again when a VM needs it: a reset leaves nothing on the
// host, but the daemon keeps running.
type keptNetwork struct {
	network.Network

	mu   sync.Mutex
	up   bool
	why  error         // why it is not up although Setup was called
	turn chan struct{} // closed and replaced whenever up changes
}

func keep(n network.Network) *keptNetwork {
	return &keptNetwork{Network: n, turn: make(chan struct{})}
}

// OwnLink implements network.OwnLink.
func (k *keptNetwork) OwnLink() bool {
	own, ok := k.Network.(network.OwnLink)
	return ok && own.OwnLink()
}

// set records a change. Preconditions: mu is held.
func (k *keptNetwork) set(up bool) {
	if k.up != up {
		k.up = up
		close(k.turn)
		k.turn = make(chan struct{})
	}
}

func (k *keptNetwork) state() (up bool, turn <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.up, k.turn
}

// Setup sets the network up, if it is not up.
func (k *keptNetwork) Setup(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.up {
		return nil
	}
	if k.why = k.Network.Setup(ctx); k.why != nil {
		return k.why
	}
	k.set(true)
	return nil
}

// Attach implements network.Network.
func (k *keptNetwork) Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (vm.NIC, error) {
	if err := k.Setup(ctx); err != nil {
		return vm.NIC{}, err
	}
	return k.Network.Attach(ctx, id, name, index, spec)
}

// Teardown implements network.Network.
func (k *keptNetwork) Teardown(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.set(false)
	k.why = nil
	return k.Network.Teardown(ctx)
}

// Run serves while the network is up, until ctx ends.
func (k *keptNetwork) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		up, turn := k.state()
		if !up {
			select {
			case <-turn:
			case <-ctx.Done():
			}
			continue
		}
		if err := k.serve(ctx, turn); err != nil {
			return err
		}
	}
	return nil
}

// serve runs the network until turn is closed. Errors caused by the teardown of the network are ignored.
func (k *keptNetwork) serve(ctx context.Context, turn <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	defer func() { <-done }()
	go func() {
		defer close(done)
		select {
		case <-turn:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := k.Network.Run(ctx)
	select {
	case <-turn:
		err = nil
	default:
	}
	cancel()
	return err
}
