package cli

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestSMBIOSFlag(t *testing.T) {
	given := map[string]string{"uuid": "5D307CA9-B3EF-428C-8861-06E72D69F223", "serial": "a, b", "chassis-sku": "7", "chassis-asset": "8"}
	want := vm.SMBIOS{UUID: "5d307ca9-b3ef-428c-8861-06e72d69f223", Serial: "a, b", Chassis: vm.Chassis{SKU: "7", Asset: "8"}}
	if got, err := parseSMBIOS(given); err != nil || got == nil || *got != want {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := parseSMBIOS(nil); got != nil || err != nil {
		t.Errorf("without the flag: %+v, %v", got, err)
	}
	if _, err := parseSMBIOS(map[string]string{"colour": "red"}); !errdefs.IsInvalid(err) {
		t.Errorf("an unknown key: %v", err)
	}
}
