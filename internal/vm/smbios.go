package vm

import (
	"regexp"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SMBIOS is what the firmware tells a guest about its machine (DMTF DSP0134, types 1 and 3). Empty fields are the hypervisor's.
type SMBIOS struct {
	UUID    string  `json:"uuid,omitempty"`   // of the system; without it the guest sees a UUID made from the id of its VM
	Serial  string  `json:"serial,omitempty"` // of the system
	Chassis Chassis `json:"chassis,omitzero"`
}

// Chassis is what a guest sees as the case of its machine.
type Chassis struct {
	Manufacturer string `json:"manufacturer,omitempty"`
	Version      string `json:"version,omitempty"`
	Serial       string `json:"serial,omitempty"`
	Asset        string `json:"asset,omitempty"`
	SKU          string `json:"sku,omitempty"`
}

var (
	uuidRE   = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	smbiosRE = regexp.MustCompile(`^[ -~]{0,64}$`) // older programs read no more bytes of a string
)

// Validate returns an InvalidArgument error if a guest cannot be told this.
func (b *SMBIOS) Validate() error {
	if b == nil {
		return nil
	}
	if b.UUID != "" && !uuidRE.MatchString(b.UUID) {
		return errdefs.Invalidf("SMBIOS: %q is not a UUID in lower case", b.UUID)
	}
	c := b.Chassis
	for _, f := range []struct{ name, value string }{
		{"serial", b.Serial},
		{"chassis manufacturer", c.Manufacturer},
		{"chassis version", c.Version},
		{"chassis serial", c.Serial},
		{"chassis asset", c.Asset},
		{"chassis SKU", c.SKU},
	} {
		if !smbiosRE.MatchString(f.value) {
			return errdefs.Invalidf("SMBIOS: %s %q must have at most 64 printable ASCII characters", f.name, f.value)
		}
	}
	return nil
}

// Anew returns what a copy of the VM has of b: everything but the UUID, which belongs to one VM.
func (b *SMBIOS) Anew() *SMBIOS {
	if b == nil {
		return nil
	}
	c := *b
	c.UUID = ""
	if c == (SMBIOS{}) {
		return nil
	}
	return &c
}
