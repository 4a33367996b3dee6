package fake

import (
	"hash/crc32"

	"cocoonstack.io/cocoon/internal/hypervisor"
)

var _ hypervisor.SocketTeller = (*Instance)(nil)

// CID implements hypervisor.SocketTeller: it is made of the id of the VM.
func (i *Instance) CID() uint32 {
	if !i.v.Plan.VSOCK {
		return 0
	}
	return crc32.ChecksumIEEE([]byte(i.v.Plan.ID))
}
