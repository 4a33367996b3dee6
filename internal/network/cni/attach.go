package cni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// pluginTime limits the time of all plugins for one request together; a DHCP plugin waits for an answer.
const pluginTime = time.Minute

// Remember implements network.Network. The plugins keep their own records of addresses.
func (n *Network) Remember(context.Context, []network.Held) error { return nil }

// Attach implements network.Network. The plugins choose the address. It stays with the VM until Release, and a new VM with an
// old name gets another one.
func (n *Network) Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (nic vm.NIC, err error) {
	r := record{ID: id, VM: name, Index: index, Ports: spec.Ports, Pod: spec.Pod, Bandwidth: spec.Bandwidth}
	err = n.single(ctx, n.tap(r), func(up bool) (err error) {
		if !up {
			return n.notUp()
		}
		if r.MAC, err = parseMAC(spec.MAC); err != nil {
			return err
		}
		if spec.Masquerade.Asked() {
			return errdefs.Preconditionf("its guest cannot be masqueraded, because the plugins of the network decide about its address; ask for the address of the interface itself, or for another network")
		}
		nic, err = n.attach(ctx, r)
		return err
	})
	if err != nil {
		return vm.NIC{}, fmt.Errorf("attach vm %s to network %s: %w", name, n.cfg.Name, err)
	}
	return nic, nil
}

func parseMAC(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 || hw[0]&1 != 0 {
		return "", errdefs.Invalidf("%q is not a unicast MAC address", s)
	}
	return hw.String(), nil
}

func (n *Network) attach(ctx context.Context, r record) (vm.NIC, error) {
	old, err := n.load(n.tap(r))
	if err != nil {
		return vm.NIC{}, err
	}
	if old != nil {
		whole, err := n.intact(*old)
		if err != nil {
			return vm.NIC{}, err
		}
		if old.Added && whole {
			n.check(ctx, *old) // with the VM name that ADD was given
			return old.NIC, n.join(*old)
		}
		// A crash or a host restart interrupted this attachment: remove the rest, with the plugins' help.
		if err := n.remove(ctx, *old); err != nil {
			return vm.NIC{}, err
		}
	}
	return n.add(ctx, r)
}

// add creates the attachment: first the record, then the namespace, what the plugins do, and the tap.
func (n *Network) add(ctx context.Context, r record) (_ vm.NIC, err error) {
	var back undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, back.Run(ctx))
		}
	}()
	if err := n.macFree(r); err != nil {
		return vm.NIC{}, err
	}
	list, err := n.conflist()
	if err != nil {
		return vm.NIC{}, err
	}
	if len(r.Ports) > 0 && !mapsPorts(list) {
		return vm.NIC{}, errdefs.Preconditionf("no plugin of the conflist can forward ports of the host; add one with the capability portMappings, such as portmap, or request no ports")
	}
	back.Push(func(ctx context.Context) error { return n.remove(ctx, r) })
	if err := n.saving(r, func() error { return n.space(r).Make() }); err != nil {
		return vm.NIC{}, err
	}
	if err := n.plug(ctx, list, &r); err != nil {
		return vm.NIC{}, err
	}
	r.Added = true
	if err := n.saving(r, func() error { return n.join(r) }); err != nil {
		return vm.NIC{}, err
	}
	back.Release()
	return r.NIC, nil
}

// saving saves r, which waits for the disk, while do runs.
func (n *Network) saving(r record, do func() error) error {
	saved := make(chan error, 1)
	go func() { saved <- n.save(r) }()
	err := do()
	return errors.Join(<-saved, err)
}

// macFree refuses a requested MAC that another interface of the network has.
func (n *Network) macFree(r record) error {
	if r.MAC == "" {
		return nil
	}
	all, err := n.records()
	if err != nil {
		return err
	}
	for _, o := range all {
		if o.MAC == r.MAC || o.NIC.MAC == r.MAC {
			return errdefs.Existsf("MAC %s belongs to VM %s; choose another or none", r.MAC, o.VM)
		}
	}
	return nil
}

// remove undoes an attachment, complete or partial: tap, plugins, the namespace if nothing else is in it, record.
func (n *Network) remove(ctx context.Context, r record) error {
	if _, err := n.part(r); err != nil {
		return err
	}
	if err := n.unplug(ctx, r); err != nil {
		return err
	}
	if err := n.vacate(r); err != nil {
		return err
	}
	return n.forget(r)
}

// Detach implements network.Network. The attachment and its address stay; only the tap is removed.
func (n *Network) Detach(ctx context.Context, nic vm.NIC) error {
	err := n.withRecord(ctx, nic, func(r record) error {
		_, err := n.part(r)
		return err
	})
	if err != nil {
		return fmt.Errorf("detach tap %s from network %s: %w", nic.Tap, n.cfg.Name, err)
	}
	return nil
}

// Release implements network.Network.
func (n *Network) Release(ctx context.Context, nic vm.NIC) error {
	if err := n.withRecord(ctx, nic, func(r record) error { return n.remove(ctx, r) }); err != nil {
		return fmt.Errorf("release %s of network %s: %w", nic.MAC, n.cfg.Name, err)
	}
	return nil
}

func (n *Network) withRecord(ctx context.Context, nic vm.NIC, fn func(record) error) error {
	return n.single(ctx, nic.Tap, func(bool) error {
		r, err := n.load(nic.Tap)
		if err != nil || r == nil {
			return err
		}
		return fn(*r)
	})
}

// Sweep implements network.Network: it removes attachments of known VMs whose tap is not in keep.
func (n *Network) Sweep(ctx context.Context, keep []string, known func(vm.ID) bool) (removed []string, strays []network.Stray, err error) {
	kept := map[string]bool{}
	for _, k := range keep {
		kept[k] = true
	}
	removed, err = n.sweep(ctx, func(r record) bool {
		if kept[n.tap(r)] || known(r.ID) {
			return kept[n.tap(r)]
		}
		nic := r.NIC // an interrupted attachment has no NIC yet
		nic.Network, nic.Tap = n.cfg.Name, n.tap(r)
		strays = append(strays, network.Stray{ID: r.ID, NIC: nic})
		return true
	})
	if err != nil {
		return removed, strays, fmt.Errorf("sweep network %s: %w", n.cfg.Name, err)
	}
	return removed, strays, nil
}

// Teardown implements network.Network. What the plugins created for all interfaces, such as a bridge, belongs to them and
// stays.
func (n *Network) Teardown(ctx context.Context) error {
	_, err := n.sweep(ctx, func(record) bool { return false })
	unlock := n.mu.Whole()
	n.up = false
	unlock()
	if err != nil {
		return fmt.Errorf("tear down network %s: %w", n.cfg.Name, err)
	}
	return nil
}

// sweep removes all attachments except those to keep, and returns the taps that existed.
func (n *Network) sweep(ctx context.Context, keep func(record) bool) (removed []string, err error) {
	defer n.mu.Whole()()
	all, err := n.records()
	if err != nil {
		return nil, err
	}
	var errs []error
	var valid []record
	for _, r := range all {
		if keep(r) {
			valid = append(valid, r)
			continue
		}
		there, err := n.part(r)
		if err == nil {
			err = n.remove(ctx, r)
		}
		if there && err == nil {
			removed = append(removed, n.tap(r))
		}
		errs = append(errs, err)
	}
	if n.up && n.cfg.Exclusive {
		errs = append(errs, n.collect(ctx, valid))
	}
	return removed, errors.Join(errs...)
}
