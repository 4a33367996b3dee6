package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// PlugNIC implements hypervisor.NICPlugger.
func (i *instance) PlugNIC(ctx context.Context, n vm.NIC) error {
	hw, err := unicast(n.MAC)
	if err != nil {
		return err
	}
	if n.Place < 1 {
		return errdefs.Invalidf("plug interface into VM %s: it has no place", i.h.ID)
	}
	n.MAC = hw.String()
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.plugNIC(ctx, c, n))
	}
	if err != nil {
		return fmt.Errorf("plug interface %d into VM %s: %w", n.Place, i.h.ID, err)
	}
	return nil
}

// UnplugNIC implements hypervisor.NICPlugger.
func (i *instance) UnplugNIC(ctx context.Context, place int) error {
	if place < 1 {
		return errdefs.Invalidf("unplug interface %d of VM %s: it stays", place, i.h.ID)
	}
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.unplugNIC(ctx, c, place))
	}
	if err != nil {
		return fmt.Errorf("unplug interface %d of VM %s: %w", place, i.h.ID, err)
	}
	return nil
}

func (i *instance) plugNIC(ctx context.Context, c *qmp.Client, n vm.NIC) error {
	width, err := i.width()
	if err != nil {
		return err
	}
	there, err := devices(ctx, c)
	if err != nil {
		return err
	}
	if slices.Contains(there, nicName(n.Place)) {
		var mac string
		if err := c.Execute(ctx, "qom-get", props{"path": peripheral(nicName(n.Place)), "property": "mac"}, &mac); err != nil {
			return err
		}
		if mac != n.MAC {
			return errdefs.Conflictf("the interface %s is in that place", mac)
		}
		return setLink(ctx, c, n.Place, !n.LinkDown)
	}
	if !slices.Contains(there, portName(nicPort(n.Place, width))) {
		return errdefs.Exhaustedf("the VM has no port for one more interface; restart it, and it has new ones")
	}
	if err := dropNet(ctx, c, n.Place); err != nil { // of an earlier attempt
		return err
	}
	if err := addNet(ctx, c, n); err != nil {
		return err
	}
	if n.LinkDown {
		if err := setLink(ctx, c, n.Place, false); err != nil {
			return errors.Join(err, dropNet(context.WithoutCancel(ctx), c, n.Place))
		}
	}
	if err := c.Execute(ctx, "device_add", nicDevice(n.Place, width, n.MAC, n.MTU), nil); err != nil {
		return errors.Join(err, dropNet(context.WithoutCancel(ctx), c, n.Place))
	}
	if n.LinkDown { // the tap's side already blocks packets; this makes the guest see it too
		return setLink(ctx, c, n.Place, false)
	}
	return nil
}

func (i *instance) unplugNIC(ctx context.Context, c *qmp.Client, place int) error {
	there, err := devices(ctx, c)
	if err != nil {
		return err
	}
	if slices.Contains(there, nicName(place)) {
		if err := i.unplug(ctx, c, nicName(place)); err != nil {
			return err
		}
	}
	return dropNet(ctx, c, place)
}

// addNet gives QEMU the tap of a NIC. QEMU closes the descriptor if it refuses it.
func addNet(ctx context.Context, c *qmp.Client, n vm.NIC) error {
	taps, err := jail.OpenTaps(ctx, []vm.NIC{n})
	if err != nil {
		return err
	}
	defer jail.CloseAll(taps)
	id := netName(n.Place)
	if err := c.ExecuteFile(ctx, "getfd", props{"fdname": id}, nil, taps[0]); err != nil {
		return err
	}
	if err := c.Execute(ctx, "netdev_add", props{"type": "tap", "id": id, "fd": id, "vhost": false}, nil); err != nil {
		if closed := c.Execute(context.WithoutCancel(ctx), "closefd", props{"fdname": id}, nil); closed != nil && !refused(closed) {
			return errors.Join(err, closed)
		}
		return err
	}
	return nil
}

// dropNet removes the tap of a NIC from QEMU. It is no error if QEMU does not have it.
func dropNet(ctx context.Context, c *qmp.Client, place int) error {
	if err := c.Execute(ctx, "netdev_del", props{"id": netName(place)}, nil); err != nil && !refused(err) {
		return err
	}
	return nil
}
