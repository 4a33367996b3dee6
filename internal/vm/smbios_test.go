package vm

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestSMBIOS(t *testing.T) {
	const uuid = "5d307ca9-b3ef-428c-8861-06e72d69f223"
	for name, b := range map[string]*SMBIOS{
		"nothing":    nil,
		"uuid":       {UUID: uuid},
		"characters": {Serial: `a,b=c "d"~ ` + strings.Repeat("x", 50)},
		"chassis":    {Chassis: Chassis{Manufacturer: "Cocoon", Version: "1", Serial: "2", Asset: "3", SKU: "4"}},
	} {
		if err := b.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, b := range map[string]*SMBIOS{
		"no UUID":       {UUID: "5d307ca9"},
		"upper case":    {UUID: strings.ToUpper(uuid)},
		"long serial":   {Serial: strings.Repeat("x", 65)},
		"line":          {Chassis: Chassis{Asset: "a\nb"}},
		"not ASCII":     {Chassis: Chassis{SKU: "ü"}},
		"zero":          {Chassis: Chassis{Serial: "a\x00"}},
		"more lines":    {Chassis: Chassis{Version: "a\n"}},
		"manufacturer ": {Chassis: Chassis{Manufacturer: "\t"}},
	} {
		if err := b.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := (&SMBIOS{UUID: uuid}).Anew(); got != nil {
		t.Errorf("a copy of a VM that has a UUID alone has %+v", got)
	}
	if got := (&SMBIOS{UUID: uuid, Serial: "1"}).Anew(); *got != (SMBIOS{Serial: "1"}) {
		t.Errorf("a copy has %+v", got)
	}
}
