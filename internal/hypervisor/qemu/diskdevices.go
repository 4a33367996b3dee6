package qemu

import (
	"fmt"
	"strconv"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// diskNode is QEMU's node name for the top of Plan.Disks[i].
func diskNode(i int) string { return fmt.Sprintf("disk%d", i) }

// diskQueues returns how many queues a virtio disk of p has; 0: one for each CPU with which QEMU starts. The saved state of a guest that has got
// CPUs fits only disks with the queues that it had before, so they follow from its maximum.
func diskQueues(p hypervisor.Plan) int {
	const most = 16 // each takes memory of the guest
	if p.Growth.Sockets == 0 {
		return 0
	}
	return min(p.Growth.Sockets*p.Topology.Cores*p.Topology.Threads, most)
}

// disk adds the i-th disk. used counts the disks on each bus before it.
func (c *command) disk(i int, d vm.Disk, as vm.DiskDevice, bootable bool, queues int, used map[vm.DiskBus]int) {
	node, n := diskNode(i), used[as.Bus]
	used[as.Bus]++
	d.ReadOnly = d.ReadOnly || as.ReadOnly || as.CDROM
	c.layer(node, d)
	dev := props{"drive": node}
	if d.Serial != "" {
		dev["serial"] = d.Serial
	}
	if d.Shared {
		dev["share-rw"] = true // otherwise QEMU locks it
	}
	if as.Blocks != (vm.Blocks{}) {
		dev["logical_block_size"], dev["physical_block_size"] = as.Blocks.Logical, as.Blocks.Physical
	}
	if bootable && i == 0 {
		dev["bootindex"] = 0
	}
	at := func(p props) props { return p.at(slotDisks+i/8, i%8) }
	kind := map[bool]string{false: "-hd", true: "-cd"}[as.CDROM]
	switch as.Bus {
	case vm.DiskSATA:
		dev["driver"], dev["id"], dev["bus"] = "ide"+kind, "sata-"+node, fmt.Sprintf("ide.%d", n)
	case vm.DiskSCSI:
		if n == 0 { // in the place that a virtio disk would have
			c.device(at(props{"driver": "virtio-scsi-pci", "id": fixedSCSI, "num_queues": 1}))
		}
		dev["driver"], dev["id"], dev["bus"] = "scsi"+kind, "scsi-"+node, fixedSCSI+".0"
		dev["channel"], dev["scsi-id"], dev["lun"] = 0, 0, n
	case vm.DiskUSB:
		if n == 0 {
			c.device(at(props{"driver": "qemu-xhci", "id": usb, "p2": vm.BusRoom(vm.DiskUSB), "p3": vm.BusRoom(vm.DiskUSB)}))
		}
		c.device(props{"driver": "usb-bot", "id": "usb-bot" + strconv.Itoa(n), "bus": usb + ".0", "port": strconv.Itoa(n + 1)})
		dev["driver"], dev["id"], dev["bus"] = "scsi"+kind, "usb-"+node, fmt.Sprintf("usb-bot%d.0", n)
		dev["lun"] = 0
	case "", vm.DiskVirtio:
		dev["driver"], dev["id"] = "virtio-blk-pci", "virtio-"+node
		if queues > 0 {
			dev["num-queues"] = queues
		}
		at(dev)
	}
	if as.Serial != "" {
		dev["id"], dev["serial"] = fmt.Sprint(dev["id"], ".", d.Serial), as.Serial // see serialOf
	}
	c.device(dev)
}

// drive gives the guest a drive for CD-ROMs in the last port of SATA, so that disks keep theirs whether it is there or not.
func (c *command) drive(d hypervisor.Drive) {
	dev := props{"driver": "ide-cd", "id": driveID, "bus": fmt.Sprintf("ide.%d", vm.BusRoom(vm.DiskSATA)-1), "serial": "cocoon-drivers"}
	if d.ISO != "" {
		c.layer(driveID, vm.Disk{Path: d.ISO, Format: vm.DiskRaw, ReadOnly: true})
		dev["drive"] = driveID
	}
	c.device(dev)
}
