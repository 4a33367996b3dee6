package qemu

import "cocoonstack.io/cocoon/internal/hypervisor"

var _ hypervisor.InstanceTeller = (*Driver)(nil)

// Blank implements hypervisor.InstanceTeller.
func (*Driver) Blank() hypervisor.Instance { return (*instance)(nil) }
