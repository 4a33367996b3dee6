package qemu

import (
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// smbios returns the values of QEMU's option -smbios. Only the guest sees the UUID there. The driver finds the process by its option
// -uuid, which stays the same.
func smbios(b *vm.SMBIOS) (tables []string) {
	if b == nil {
		return nil
	}
	c := b.Chassis
	for _, t := range []struct {
		kind   string
		fields [][2]string
	}{
		{"type=1", [][2]string{{"uuid", b.UUID}, {"serial", b.Serial}}},
		{"type=3", [][2]string{{"manufacturer", c.Manufacturer}, {"version", c.Version}, {"serial", c.Serial}, {"asset", c.Asset}, {"sku", c.SKU}}},
	} {
		table := t.kind
		for _, f := range t.fields {
			if f[1] != "" {
				table += "," + f[0] + "=" + strings.ReplaceAll(f[1], ",", ",,") // QEMU's way to write a comma
			}
		}
		if table != t.kind {
			tables = append(tables, table)
		}
	}
	return tables
}
