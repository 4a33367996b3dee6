package engine

import (
	"cmp"
	"context"
	"log/slog"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// nics attaches VMs to the networks of this node.
type nics struct {
	network.Networks
	byDefault string // network of a NIC that names none; "": there is none
	log       *slog.Logger
}

// name is the network that n asks for.
func (a nics) name(n vm.NICSpec) string {
	return cmp.Or(n.Network, a.byDefault)
}

func (a nics) network(want vm.NICSpec) (network.Network, error) {
	name := a.name(want)
	if n := a.Get(name); n != nil {
		return n, nil
	}
	var all []string
	for _, n := range a.All() {
		all = append(all, n.Name())
	}
	return nil, errdefs.Invalidf("no network is called %q; available: %s", name, list(all))
}

// choosable refuses hardware addresses that a namespace chooses on a link with other machines.
func (a nics) choosable(owner vm.Owner, all []vm.NICSpec) error {
	for i, want := range all {
		if want.MAC == "" || owner.Operator() {
			continue
		}
		n, err := a.network(want)
		if err != nil {
			return err
		}
		if own, ok := n.(network.OwnLink); !ok || !own.OwnLink() {
			return errdefs.Preconditionf("interface %d asks for the hardware address %s, and other machines may be on network %s, whose frames it could get; leave the address out", i+1, want.MAC, n.Name())
		}
	}
	return nil
}

// attach creates the NICs of r. On failure, back detaches those already created; if fresh, it also releases their
// addresses.
func (a nics) attach(ctx context.Context, r vm.Record, back *undo.Stack, fresh bool) ([]vm.NIC, error) {
	var out []vm.NIC
	for i, want := range r.Spec.NICs {
		n, err := a.network(want)
		if err != nil {
			return nil, err
		}
		nic, err := attachOne(ctx, n, r, r.Spec.Place(i), want)
		if err != nil {
			return nil, err
		}
		back.Push(func(ctx context.Context) error {
			if err := n.Detach(ctx, nic); err != nil || !fresh {
				return err
			}
			return n.Release(ctx, nic)
		})
		out = append(out, nic)
	}
	return out, nil
}

// attachOne creates the interface of r at a place.
func attachOne(ctx context.Context, n network.Network, r vm.Record, place int, want vm.NICSpec) (vm.NIC, error) {
	nic, err := n.Attach(ctx, r.ID, r.Owner.Qualify(r.Spec.Name), place, want)
	if errdefs.IsAlreadyExists(err) && !r.Owner.Operator() { // err may name the VM of another namespace, and AlreadyExists is about names of VMs
		err = errdefs.Preconditionf("the hardware address %s is taken on network %s; choose another or none", want.MAC, n.Name())
	}
	nic.Place, nic.LinkDown = want.Place, want.LinkDown
	return nic, err
}

// detach removes the taps of all; with release it also releases the addresses. It skips a network that this node no
// longer has: such a network sweeps its taps itself if it comes back.
func (a nics) detach(ctx context.Context, all []vm.NIC, release bool) error {
	for _, nic := range all {
		n := a.Get(nic.Network)
		if n == nil {
			a.log.Warn("interface not removed, its network is not configured", "network", nic.Network)
			continue
		}
		if err := n.Detach(ctx, nic); err != nil {
			return err
		}
		if !release {
			continue
		}
		if err := n.Release(ctx, nic); err != nil {
			return err
		}
	}
	return nil
}

// of returns the NICs of r. With thorough, it asks again for NICs that may have been created without being recorded:
// Attach gives the same answer for the same VM.
func (a nics) of(ctx context.Context, r vm.Record, thorough bool) ([]vm.NIC, error) {
	out := r.NICs
	for i := len(out); thorough && i < len(r.Spec.NICs); i++ {
		n := a.Get(a.name(r.Spec.NICs[i]))
		if n == nil {
			continue // no longer configured: it sweeps its taps itself if it comes back
		}
		nic, err := attachOne(ctx, n, r, r.Spec.Place(i), r.Spec.NICs[i])
		if errdefs.Is(err, errdefs.ResourceExhausted) {
			continue // it has no address, so it was never created
		}
		if err != nil {
			return nil, err
		}
		out = append(slices.Clip(out), nic) // the record's own slice stays unchanged
	}
	return out, nil
}

// detachAll detaches all NICs that r may have, recorded or not. It keeps their addresses.
func (a nics) detachAll(ctx context.Context, r vm.Record) error {
	all, err := a.of(ctx, r, true)
	if err != nil {
		return err
	}
	return a.detach(ctx, all, false)
}

// remember tells each network the addresses of all VMs, also of stopped ones, before it assigns any address.
func (a nics) remember(ctx context.Context, records []vm.Record) {
	held := map[string][]network.Held{}
	for _, r := range records {
		for i, nic := range r.NICs {
			held[nic.Network] = append(held[nic.Network], network.Held{ID: r.ID, Name: r.Owner.Qualify(r.Spec.Name), Index: vm.PlaceOf(r.NICs, i), NIC: nic})
		}
	}
	for _, n := range a.All() {
		if err := n.Remember(ctx, held[n.Name()]); err != nil {
			a.log.Warn("leases of vms not restored", "network", n.Name(), "err", err)
		}
	}
}

func macsOf(nics []vm.NIC) (macs []string) {
	for _, n := range nics {
		macs = append(macs, n.MAC)
	}
	return macs
}
