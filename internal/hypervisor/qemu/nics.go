package qemu

import (
	"context"
	"fmt"
	"net"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// setLink sets the carrier of the NIC at a place. It does so at the tap's side, which also sets that of the NIC and keeps its state when the
// NIC is replaced.
func setLink(ctx context.Context, c *qmp.Client, place int, up bool) error {
	return c.Execute(ctx, "set_link", props{"name": netName(place), "up": up}, nil)
}

func netName(place int) string { return fmt.Sprintf("net%d", place) }
func nicName(place int) string { return fmt.Sprintf("nic%d", place) }

// SetLink implements hypervisor.Linker.
func (i *instance) SetLink(ctx context.Context, place int, up bool) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(setLink(ctx, c, place, up))
	}
	if refused(err) {
		err = errdefs.NotFoundf("it has no interface %d: %w", place, err)
	}
	if err != nil {
		return fmt.Errorf("set link of VM %s: %w", i.h.ID, err)
	}
	return nil
}

// SwapNIC implements hypervisor.NICSwapper.
func (i *instance) SwapNIC(ctx context.Context, place int, mac string) error {
	hw, err := unicast(mac)
	if err != nil {
		return err
	}
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.swapNIC(ctx, c, place, hw))
	}
	if err != nil {
		return fmt.Errorf("replace interface %d of VM %s: %w", place, i.h.ID, err)
	}
	return nil
}

func unicast(mac string) (net.HardwareAddr, error) {
	hw, err := net.ParseMAC(mac)
	if err != nil || len(hw) != 6 || hw[0]&1 != 0 {
		return nil, errdefs.Invalidf("invalid MAC address %q of an interface", mac)
	}
	return hw, nil
}

func (i *instance) swapNIC(ctx context.Context, c *qmp.Client, place int, mac net.HardwareAddr) error {
	width, err := i.width()
	if err != nil {
		return err
	}
	var mtu int
	known := c.Execute(ctx, "qom-get", props{"path": peripheral(nicName(place)), "property": "host_mtu"}, &mtu)
	if known != nil && !refused(known) {
		return known
	}
	if err := setLink(ctx, c, place, false); refused(err) {
		return errdefs.NotFoundf("there is no such interface: %w", err)
	} else if err != nil {
		return err
	}
	if known == nil { // otherwise an earlier attempt has already removed it
		if err := i.unplug(ctx, c, nicName(place)); err != nil {
			return err
		}
	}
	if err := c.Execute(ctx, "device_add", nicDevice(place, width, mac.String(), mtu), nil); err != nil {
		return err
	}
	return setLink(ctx, c, place, false) // the tap's side already blocks packets; this makes the guest see it too
}

// linkDown reports whether a NIC of p has no carrier from the beginning.
func linkDown(p hypervisor.Plan) bool {
	return slices.ContainsFunc(p.NICs, func(n vm.NIC) bool { return n.LinkDown })
}

// ports adds the root ports: one for each NIC, so that it can be unplugged, and some free ones for later hot-plug.
func (c *command) ports(n int) {
	for i := range min(n, maxPorts) {
		c.device(props{"driver": "pcie-root-port", "id": portName(i), "chassis": i + 1}.at(slotPorts+i/8, i%8))
	}
}

// width returns how many places for NICs the guest of p had when it booted.
func width(p hypervisor.Plan) int {
	n := p.BootNICs
	for i := 0; i < len(p.NICs) && p.BootNICs == 0; i++ {
		n = max(n, vm.PlaceOf(p.NICs, i)+1)
	}
	return n
}

// nicPort returns the root port of the NIC at a place. The port behind those of the boot is that of the controller of plugged disks.
func nicPort(place, width int) int {
	if place < width {
		return place
	}
	return place + 1
}

// modelOf returns the model of NIC i of p.
func modelOf(p hypervisor.Plan, i int) vm.NICModel {
	if i < len(p.Models) {
		return p.Models[i]
	}
	return vm.NICVirtio
}

func (c *command) nic(p hypervisor.Plan, i int) {
	n, place := p.NICs[i], vm.PlaceOf(p.NICs, i)
	c.add("-netdev", fmt.Sprintf("tap,id=%s,fd=%d,vhost=off", netName(place), c.fd(file{kind: fileTap, path: n.Tap, nic: i})))
	dev := nicDevice(place, width(p), n.MAC, n.MTU)
	if model := modelOf(p, i); !model.Virtio() { // it cannot tell its guest an MTU; the seed or DHCP does
		dev["driver"] = string(model)
		delete(dev, "host_mtu")
	}
	c.device(dev)
}

func nicDevice(place, width int, mac string, mtu int) props {
	dev := props{
		"driver": "virtio-net-pci", "netdev": netName(place), "id": nicName(place),
		"mac": mac, "bus": portName(nicPort(place, width)), "romfile": "",
	}
	if mtu > 0 {
		dev["host_mtu"] = mtu
	}
	return dev
}

// checkNICs refuses NICs that have no place of their own.
func checkNICs(p hypervisor.Plan, spare int) error {
	used := map[int]bool{}
	for i := range p.NICs {
		if err := modelOf(p, i).Validate(); err != nil {
			return fmt.Errorf("VM %s: %w", p.Name, err)
		}
		place := vm.PlaceOf(p.NICs, i)
		switch n := width(p); {
		case place < 0 || used[place]:
			return errdefs.Invalidf("VM %s: interface %d has the invalid place %d", p.Name, i, place)
		case nicPort(place, n) >= min(n+spare, maxPorts):
			return errdefs.Invalidf("VM %s has no port for an interface at the place %d", p.Name, place)
		}
		used[place] = true
	}
	return nil
}
