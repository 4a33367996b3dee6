package qemu

import (
	"context"
	"fmt"
	"net"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// setLink sets the carrier of NIC n. It does so at the tap's side, which also sets that of the NIC and keeps its state when the
// NIC is replaced.
func setLink(ctx context.Context, c *qmp.Client, n int, up bool) error {
	return c.Execute(ctx, "set_link", props{"name": netName(n), "up": up}, nil)
}

func netName(n int) string { return fmt.Sprintf("net%d", n) }
func nicName(n int) string { return fmt.Sprintf("nic%d", n) }

// SetLink implements hypervisor.Linker.
func (i *instance) SetLink(ctx context.Context, nic int, up bool) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.orEnded(setLink(ctx, c, nic, up))
	}
	if refused(err) {
		err = errdefs.NotFoundf("it has no interface %d: %w", nic, err)
	}
	if err != nil {
		return fmt.Errorf("set link of VM %s: %w", i.h.ID, err)
	}
	return nil
}

// SwapNIC implements hypervisor.NICSwapper.
func (i *instance) SwapNIC(ctx context.Context, nic int, mac string) error {
	hw, err := net.ParseMAC(mac)
	if err != nil || len(hw) != 6 || hw[0]&1 != 0 {
		return errdefs.Invalidf("invalid MAC address %q of an interface", mac)
	}
	c, err := i.connected(ctx)
	if err == nil {
		err = i.orEnded(i.swapNIC(ctx, c, nic, hw))
	}
	if err != nil {
		return fmt.Errorf("replace interface %d of VM %s: %w", nic, i.h.ID, err)
	}
	return nil
}

func (i *instance) swapNIC(ctx context.Context, c *qmp.Client, nic int, mac net.HardwareAddr) error {
	var mtu int
	known := c.Execute(ctx, "qom-get", props{"path": "/machine/peripheral/" + nicName(nic), "property": "host_mtu"}, &mtu)
	if known != nil && !refused(known) {
		return known
	}
	if err := setLink(ctx, c, nic, false); refused(err) {
		return errdefs.NotFoundf("there is no such interface: %w", err)
	} else if err != nil {
		return err
	}
	if known == nil { // otherwise an earlier attempt has already removed it
		if err := i.unplug(ctx, c, nicName(nic)); err != nil {
			return err
		}
	}
	if err := c.Execute(ctx, "device_add", nicDevice(nic, mac.String(), mtu), nil); err != nil {
		return err
	}
	return setLink(ctx, c, nic, false) // the tap's side already blocks packets; this makes the guest see it too
}

// ports adds the root ports: one for each NIC, so that it can be unplugged, and some free ones for later hot-plug.
func (c *command) ports(n int) {
	for i := range min(n, maxPorts) {
		c.device(props{"driver": "pcie-root-port", "id": portName(i), "chassis": i + 1}.at(slotPorts+i/8, i%8))
	}
}

// modelOf returns the model of NIC i of p.
func modelOf(p hypervisor.Plan, i int) vm.NICModel {
	if i < len(p.Models) {
		return p.Models[i]
	}
	return vm.NICVirtio
}

func (c *command) nic(i int, n vm.NIC, model vm.NICModel) {
	c.add("-netdev", fmt.Sprintf("tap,id=%s,fd=%d,vhost=off", netName(i), c.fd(file{kind: fileTap, path: n.Tap, nic: i})))
	dev := nicDevice(i, n.MAC, n.MTU)
	if !model.Virtio() { // it cannot tell its guest an MTU; the seed or DHCP does
		dev["driver"] = string(model)
		delete(dev, "host_mtu")
	}
	c.device(dev)
}

func nicDevice(i int, mac string, mtu int) props {
	dev := props{
		"driver": "virtio-net-pci", "netdev": netName(i), "id": nicName(i),
		"mac": mac, "bus": portName(i), "romfile": "",
	}
	if mtu > 0 {
		dev["host_mtu"] = mtu
	}
	return dev
}
