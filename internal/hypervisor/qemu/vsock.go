package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// vhostVSOCK is the device of Linux that connects the virtio socket of a guest with AF_VSOCK of the host.
const vhostVSOCK = "/dev/vhost-vsock"

var _ hypervisor.SocketTeller = (*instance)(nil)

// vsock gives the guest a virtio socket. Its context id is the number of the user that the process runs as, which no other instance has: it is held as long
// as the instance, also over a restart of the daemon.
func (c *command) vsock(cid uint32) {
	fd := c.fd(file{kind: fileVSOCK, path: vhostVSOCK})
	c.device(props{"driver": "vhost-vsock-pci", "id": "vsock0", "guest-cid": cid, "vhostfd": strconv.Itoa(fd)}.at(slotBasic, 7))
}

// CID implements hypervisor.SocketTeller.
func (i *instance) CID() uint32 {
	if !i.h.VSOCK {
		return 0
	}
	return i.h.UID
}

// hasVSOCK returns Unsupported if the plan needs a virtio socket and the host has none. at is vhostVSOCK.
func hasVSOCK(at string, p hypervisor.Plan) error {
	if !p.VSOCK {
		return nil
	}
	_, err := os.Stat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.Unsupportedf("VM %s has a virtio socket (VSOCK), and this node has no %s; load the module with `modprobe vhost_vsock`", p.Name, at)
	}
	return err
}

// openVSOCK opens the device. Each VM needs a descriptor of its own.
func openVSOCK(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the device of virtio sockets: %w", err)
	}
	return f, nil
}
