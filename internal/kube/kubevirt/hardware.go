package kubevirt

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// hardware returns what vmi says about its machine.
func hardware(vmi *v1.VirtualMachineInstance) (m contract.Machine) {
	d := &vmi.Spec.Domain
	if f := d.Firmware; f != nil {
		m.SMBIOS.Serial = f.Serial
		if f.Bootloader != nil && f.Bootloader.EFI != nil {
			m.Firmware = contract.FirmwareUEFI
		}
	}
	if c := d.Chassis; c != nil {
		m.SMBIOS.Chassis = contract.Chassis{Manufacturer: c.Manufacturer, Version: c.Version, Serial: c.Serial, Asset: c.Asset, SKU: c.Sku}
	}
	m.Graphics = graphics(&vmi.Spec)
	for _, v := range vmi.Spec.Volumes {
		if _, label, name := files(v); name != "" {
			if m.FileDisks == nil {
				m.FileDisks = map[string]string{}
			}
			m.FileDisks[v.Name] = label
		}
	}
	return m
}

// videoType is the type of every screen.
const videoType = "vga"

// graphics reports whether the VM has a screen. As in KubeVirt, it has one unless the machine says that it does not.
func graphics(s *v1.VirtualMachineInstanceSpec) bool {
	auto := s.Domain.Devices.AutoattachGraphicsDevice
	return auto == nil || *auto
}

// systemUUID returns the UUID that the guest sees: the given one, else that of the VirtualMachine, else that of the instance. So it stays
// over a restart, and no two machines share it.
func systemUUID(vmi *v1.VirtualMachineInstance) string {
	id := vmi.UID
	if owner := metav1.GetControllerOf(vmi); owner != nil && owner.Kind == v1.VirtualMachineGroupVersionKind.Kind { // others may have several instances
		id = owner.UID
	}
	if f := vmi.Spec.Domain.Firmware; f != nil && f.UUID != "" {
		id = f.UUID
	}
	if valid := lower(id); (&vm.SMBIOS{UUID: valid}).Validate() == nil {
		return valid
	}
	return ""
}

func lower(id types.UID) string { return strings.ToLower(string(id)) }

// firmware checks the values of what hardware reads.
func (c *check) firmware() {
	s, domain := c.spec, c.at.Child("domain")
	valid := func(at *field.Path, value string, b vm.SMBIOS) {
		if err := b.Validate(); err != nil {
			c.invalid(at, value, err.Error())
		}
	}
	if f := s.Domain.Firmware; f != nil {
		at := domain.Child("firmware")
		valid(at.Child("uuid"), string(f.UUID), vm.SMBIOS{UUID: lower(f.UUID)})
		valid(at.Child("serial"), f.Serial, vm.SMBIOS{Serial: f.Serial})
		if b := f.Bootloader; b != nil && b.EFI != nil {
			at := at.Child("bootloader", "efi")
			if b.BIOS != nil {
				c.errs = append(c.errs, field.Forbidden(at, "a VM has one boot loader; remove bios or efi"))
			}
			if b.EFI.SecureBoot == nil || *b.EFI.SecureBoot {
				c.errs = append(c.errs, field.Forbidden(at.Child("secureBoot"), "a VM boots without Secure Boot, which is the default of efi; set it to false"))
			}
			c.flag(at.Child("persistent"), b.EFI.Persistent, true, "the variables of the firmware start anew with each instance, as its disk does")
		}
	}
	if k := s.Domain.Chassis; k != nil {
		at := domain.Child("chassis")
		valid(at.Child("manufacturer"), k.Manufacturer, vm.SMBIOS{Chassis: vm.Chassis{Manufacturer: k.Manufacturer}})
		valid(at.Child("version"), k.Version, vm.SMBIOS{Chassis: vm.Chassis{Version: k.Version}})
		valid(at.Child("serial"), k.Serial, vm.SMBIOS{Chassis: vm.Chassis{Serial: k.Serial}})
		valid(at.Child("asset"), k.Asset, vm.SMBIOS{Chassis: vm.Chassis{Asset: k.Asset}})
		valid(at.Child("sku"), k.Sku, vm.SMBIOS{Chassis: vm.Chassis{SKU: k.Sku}})
	}
}
