package vm

import (
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// NICModel is the device by which a guest sees a network interface. "" is NICVirtio.
type NICModel string

// The models of network interfaces. Those that are not virtio are for guests without a driver for it: they are slower, and a guest that
// resumes as a clone cannot be given another hardware address.
const (
	NICVirtio  NICModel = "virtio"
	NICE1000   NICModel = "e1000"
	NICE1000E  NICModel = "e1000e"
	NICRTL8139 NICModel = "rtl8139"
)

var nicModels = []NICModel{"", NICVirtio, NICE1000, NICE1000E, NICRTL8139}

// Validate returns an InvalidArgument error if no interface is an m.
func (m NICModel) Validate() error {
	if !slices.Contains(nicModels, m) {
		return errdefs.Invalidf("invalid model %q of a network interface; use virtio, e1000, e1000e or rtl8139", m)
	}
	return nil
}

// Virtio reports whether m is virtio.
func (m NICModel) Virtio() bool { return m == "" || m == NICVirtio }
