package cloudhypervisor

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// PlugNIC implements hypervisor.NICPlugger.
func (i *instance) PlugNIC(ctx context.Context, n vm.NIC) error {
	if err := vm.ValidateMAC(n.MAC); err != nil {
		return err
	}
	switch {
	case n.Place < 1:
		return errdefs.Invalidf("plug interface into VM %s: it has no place", i.h.ID)
	case n.LinkDown:
		return errdefs.Unsupportedf("VM %s: Cloud Hypervisor has no network interfaces without a carrier; run the VM with the driver qemu", i.h.ID)
	}
	if err := i.change(ctx, func(now devices, w *watcher) error { return i.plugNIC(ctx, now, w, n) }); err != nil {
		return fmt.Errorf("plug interface %d into VM %s: %w", n.Place, i.h.ID, err)
	}
	return nil
}

// UnplugNIC implements hypervisor.NICPlugger.
func (i *instance) UnplugNIC(ctx context.Context, place int) error {
	if place < 1 {
		return errdefs.Invalidf("unplug interface %d of VM %s: it stays", place, i.h.ID)
	}
	err := i.change(ctx, func(now devices, w *watcher) error {
		_, err := i.remove(ctx, now, w, nicID(place))
		return err
	})
	if err != nil {
		return fmt.Errorf("unplug interface %d of VM %s: %w", place, i.h.ID, err)
	}
	return nil
}

func (i *instance) plugNIC(ctx context.Context, now devices, w *watcher, n vm.NIC) error {
	id := nicID(n.Place)
	if at := slices.IndexFunc(now.Config.NICs, func(c netConfig) bool { return c.ID == id }); at >= 0 {
		if have := now.Config.NICs[at].MAC; !sameMAC(have, n.MAC) {
			return errdefs.Conflictf("the interface %s is in that place", have)
		}
		return nil
	}
	if now.leaves(id) {
		var err error
		if now, err = i.gone(ctx, w, id); err != nil {
			return err
		}
	}
	if now.nics() >= maxNICs {
		return errdefs.Exhaustedf("the VM has %d network interfaces, and Cloud Hypervisor can have no more of ours; detach one, or run the VM with the driver qemu", maxNICs)
	}
	taps, err := jail.OpenTaps(ctx, []vm.NIC{n})
	if err != nil {
		return err
	}
	defer jail.CloseAll(taps)
	if err := i.call(ctx, "PUT", "vm.add-net", netOf(n.Place, n.MAC), nil, taps...); err != nil {
		return err
	}
	return i.taken(w, now, id)
}

// nics returns how many interfaces there are, with those that are leaving.
func (d devices) nics() int {
	n := len(d.Config.NICs)
	for id := range d.Tree {
		if strings.HasPrefix(id, "net") && d.leaves(id) {
			n++
		}
	}
	return n
}

// sameMAC compares addresses, however they are written.
func sameMAC(a, b string) bool {
	x, err := net.ParseMAC(a)
	y, err2 := net.ParseMAC(b)
	return err == nil && err2 == nil && slices.Equal(x, y)
}
