package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Disks that are plugged while the guest runs are units of one SCSI controller: an image may have more layers than the machine
// has ports. The controller is in the first port after those of the NICs with which the guest booted. It is plugged with the first such disk and unplugged
// with the last one. So the plan of a saved guest says whether it has one.

const (
	controller = "scsi0"     // id of the device
	plugPrefix = "scsi-plug" // of the ids of the disks
)

func portName(n int) string       { return fmt.Sprintf("port%d", n) }
func plugNode(n int) string       { return fmt.Sprintf("plug%d", n) }
func plugName(n int) string       { return fmt.Sprint(plugPrefix, n) }
func peripheral(id string) string { return "/machine/peripheral/" + id }

// split separates the disks that are there when the guest boots from those that are plugged later.
func split(disks []vm.Disk) (fixed, plugged []vm.Disk) {
	for _, d := range disks {
		if d.Port == 0 {
			fixed = append(fixed, d)
		} else {
			plugged = append(plugged, d)
		}
	}
	return fixed, plugged
}

// plugged adds the disks that were plugged before the guest was saved.
func (c *command) plugged(width int, disks []vm.Disk) {
	if len(disks) == 0 {
		return
	}
	c.device(controllerDevice(width))
	for _, d := range disks {
		c.layer(plugNode(d.Port), d)
		c.device(plugDevice(d))
	}
}

func controllerDevice(width int) props {
	return props{"driver": "virtio-scsi-pci", "id": controller, "bus": portName(width), "num_queues": 1}
}

func plugDevice(d vm.Disk) props {
	return props{
		"driver": "scsi-hd", "id": plugName(d.Port), "bus": controller + ".0", "channel": 0, "scsi-id": 0, "lun": d.Port,
		"drive": plugNode(d.Port), "serial": d.Serial,
	}
}

// PlugDisk implements hypervisor.DiskPlugger.
func (i *instance) PlugDisk(ctx context.Context, d vm.Disk) error {
	if d.Port == 0 {
		return errdefs.Invalidf("plug disk %s into VM %s: it has no port", d.Serial, i.h.ID)
	}
	if err := checkDisk(string(i.h.ID), d, 0); err != nil {
		return err
	}
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.plug(ctx, c, d))
	}
	if err != nil {
		return fmt.Errorf("plug disk %s into VM %s: %w", d.Serial, i.h.ID, err)
	}
	return nil
}

// UnplugDisk implements hypervisor.DiskPlugger.
func (i *instance) UnplugDisk(ctx context.Context, serial string) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.unplugDisk(ctx, c, serial))
	}
	if err != nil {
		return fmt.Errorf("unplug disk %s of VM %s: %w", serial, i.h.ID, err)
	}
	return nil
}

func (i *instance) plug(ctx context.Context, c *qmp.Client, d vm.Disk) error {
	there, err := devices(ctx, c)
	if err != nil {
		return err
	}
	serials, err := serialsOf(ctx, c, there)
	if err != nil {
		return err
	}
	switch id := serials[d.Serial]; {
	case id == plugName(d.Port):
		return limit(ctx, c, id, i.h.DiskRate)
	case id != "":
		return errdefs.Conflictf("the VM has another disk with this serial")
	case slices.Contains(there, plugName(d.Port)):
		return errdefs.Conflictf("another disk is at port %d", d.Port)
	}
	if !slices.Contains(there, controller) {
		width, err := i.width()
		if err != nil {
			return err
		}
		if !slices.Contains(there, portName(width)) {
			return errdefs.Exhaustedf("its %d network interfaces leave no port for disks that are plugged while it runs; create the VM again with fewer interfaces", width)
		}
		if err := c.Execute(ctx, "device_add", controllerDevice(width), nil); err != nil {
			return err
		}
	}
	if err := dropNodes(ctx, c, d.Port); err != nil { // of an earlier attempt
		return err
	}
	if err := addNodes(ctx, c, d); err != nil {
		return err
	}
	if err := c.Execute(ctx, "device_add", plugDevice(d), nil); err != nil {
		return err
	}
	return limit(ctx, c, plugName(d.Port), i.h.DiskRate)
}

func (i *instance) unplugDisk(ctx context.Context, c *qmp.Client, serial string) error {
	there, err := devices(ctx, c)
	if err != nil {
		return err
	}
	serials, err := serialsOf(ctx, c, there)
	if err != nil {
		return err
	}
	if id, ok := serials[serial]; ok {
		port, err := strconv.Atoi(strings.TrimPrefix(id, plugPrefix))
		if err != nil {
			return errdefs.Invalidf("it was there when the guest booted; only disks that were plugged later can be removed")
		}
		if err := i.unplug(ctx, c, id); err != nil {
			return err
		}
		if err := dropNodes(ctx, c, port); err != nil {
			return err
		}
		there = slices.DeleteFunc(there, func(s string) bool { return s == id })
	}
	if !slices.Contains(there, controller) || slices.ContainsFunc(there, func(s string) bool { return strings.HasPrefix(s, plugPrefix) }) {
		return nil
	}
	return i.unplug(ctx, c, controller)
}

// devices returns the ids of the VM's devices.
func devices(ctx context.Context, c *qmp.Client) ([]string, error) {
	var list []struct {
		Name string `json:"name"`
	}
	if err := c.Execute(ctx, "qom-list", props{"path": "/machine/peripheral"}, &list); err != nil {
		return nil, err
	}
	var ids []string
	for _, d := range list {
		ids = append(ids, d.Name)
	}
	return ids, nil
}

// serialsOf returns the disks among the devices, by serial.
func serialsOf(ctx context.Context, c *qmp.Client, ids []string) (map[string]string, error) {
	disks := map[string]string{}
	for _, id := range ids {
		if !isDisk(id) {
			continue
		}
		serial, err := serialOf(ctx, c, id)
		if err != nil {
			return nil, err
		}
		disks[serial] = id
	}
	return disks, nil
}

// serialOf returns the serial of a disk in the plan. The id of the device has it if the guest sees another one.
func serialOf(ctx context.Context, c *qmp.Client, id string) (serial string, err error) {
	if _, serial, ok := strings.Cut(id, "."); ok {
		return serial, nil
	}
	err = c.Execute(ctx, "qom-get", props{"path": peripheral(id), "property": "serial"}, &serial)
	return serial, err
}

// isDisk reports whether a device is a disk of the plan or a plugged one.
func isDisk(id string) bool {
	_, place, ok := strings.Cut(id, "-")
	return ok && (strings.HasPrefix(place, "disk") || strings.HasPrefix(id, plugPrefix))
}

// width returns how many places for NICs the guest had when it booted. A process of an earlier release was launched with as many NICs.
func (i *instance) width() (n int, err error) {
	if i.h.Width > 0 {
		return i.h.Width, nil
	}
	args, err := proc.Args(i.h.PID)
	if err != nil {
		return 0, err
	}
	for _, arg := range args {
		if arg == "-netdev" {
			n++
		}
	}
	return n, nil
}

// node is a block node of QEMU.
type node struct {
	Name string `json:"node-name"`
	File string `json:"file"`
}

// dropNodes removes the nodes of the disk at a port, the top first, and their descriptors.
func dropNodes(ctx context.Context, c *qmp.Client, port int) error {
	var all []node
	if err := c.Execute(ctx, "query-named-block-nodes", props{"flat": true}, &all); err != nil {
		return err
	}
	there := map[string]node{}
	for _, n := range all {
		there[n.Name] = n
	}
	for name := plugNode(port); ; name += "b" {
		n, top := there[name]
		low, file := there[name+"-file"]
		if !top && !file {
			return nil
		}
		if top {
			if err := c.Execute(ctx, "blockdev-del", props{"node-name": n.Name}, nil); err != nil {
				return err
			}
		}
		if !file {
			continue
		}
		if err := c.Execute(ctx, "blockdev-del", props{"node-name": low.Name}, nil); err != nil {
			return err
		}
		set, err := strconv.Atoi(strings.TrimPrefix(low.File, "/dev/fdset/"))
		if err != nil {
			continue
		}
		if err := c.Execute(ctx, "remove-fd", props{"fdset-id": set}, nil); err != nil && !refused(err) {
			return err
		}
	}
}

// addNodes opens a disk in QEMU. On error nothing of it stays.
func addNodes(ctx context.Context, c *qmp.Client, d vm.Disk) error {
	open := func(f file) (string, error) {
		data, err := f.open()
		if err != nil {
			return "", err
		}
		defer data.Close()
		var set struct {
			ID int `json:"fdset-id"`
		}
		err = c.ExecuteFile(ctx, "add-fd", nil, &set, data)
		return fmt.Sprintf("/dev/fdset/%d", set.ID), err
	}
	err := stack(plugNode(d.Port), d, open, func(p props) error { return c.Execute(ctx, "blockdev-add", p, nil) })
	if err != nil {
		return errors.Join(err, dropNodes(context.WithoutCancel(ctx), c, d.Port))
	}
	return nil
}

// unplug asks the guest to release a device and waits until it has.
func (i *instance) unplug(ctx context.Context, c *qmp.Client, id string) error {
	e := i.listen()
	defer i.deafen(e)
	if err := c.Execute(ctx, "device_del", props{"id": id}, nil); err != nil {
		return err
	}
	for {
		ev, err := e.next(ctx, c)
		if ctx.Err() != nil {
			return errdefs.Unavailablef("the guest does not release its device %s: %w", id, ctx.Err())
		}
		if err != nil {
			return err
		}
		var data struct {
			Device string `json:"device"`
		}
		if json.Unmarshal(ev.Data, &data) != nil || data.Device != id {
			continue
		}
		switch ev.Name {
		case "DEVICE_DELETED":
			return nil
		case "DEVICE_UNPLUG_GUEST_ERROR":
			return errdefs.Unavailablef("the guest refuses to release its device %s", id)
		}
	}
}
