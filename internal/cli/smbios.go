package cli

import (
	"maps"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// smbiosFields returns the fields of b by the keys of --smbios.
func smbiosFields(b *vm.SMBIOS) map[string]*string {
	c := &b.Chassis
	return map[string]*string{
		"uuid": &b.UUID, "serial": &b.Serial,
		"chassis-manufacturer": &c.Manufacturer, "chassis-version": &c.Version, "chassis-serial": &c.Serial, "chassis-asset": &c.Asset, "chassis-sku": &c.SKU,
	}
}

func smbiosKeys() []string { return slices.Sorted(maps.Keys(smbiosFields(new(vm.SMBIOS)))) }

// parseSMBIOS returns what the flags ask for; nil for nothing.
func parseSMBIOS(flags map[string]string) (*vm.SMBIOS, error) {
	if len(flags) == 0 {
		return nil, nil
	}
	b := new(vm.SMBIOS)
	fields := smbiosFields(b)
	for key, value := range flags {
		f, ok := fields[key]
		if !ok {
			return nil, errdefs.Invalidf("--smbios has no key %s; use %s", key, strings.Join(smbiosKeys(), ", "))
		}
		*f = value
	}
	b.UUID = strings.ToLower(b.UUID)
	return b, nil
}
