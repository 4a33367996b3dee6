package kubevirt

import (
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
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
	m.Graphics, m.Logins = graphics(&vmi.Spec), logins(&vmi.Spec)
	m.Hardware = contract.Hardware{
		Topology: guestTopology(&vmi.Spec), CPU: guestCPU(d), Clock: clock(d), UEFI: uefi(d), Huge: hugePages(d) != "", TPM: tpm(d.Devices.TPM), Panic: panicDevice(&d.Devices), Disks: devices(&vmi.Spec), NICs: nicModels(&vmi.Spec), MACs: macs(&vmi.Spec), Links: links(&vmi.Spec),
	}
	m.Hardware.Kernel, m.Hardware.HostDisks = kernel(&vmi.Spec), hostDisks(&vmi.Spec)
	m.Hardware.VSOCK = d.Devices.AutoattachVSOCK != nil && *d.Devices.AutoattachVSOCK
	m.Hardware.Keep = keptBy(vmi, m.Hardware)
	if n := maxSockets(&vmi.Spec); n > 0 {
		m.Hardware.MaxSockets, m.Hardware.CPUShare = n, cpuShare
	}
	m.Hardware.MaxMemory = maxMemory(&vmi.Spec)
	if w := d.Devices.Watchdog; w != nil {
		m.Hardware.Watchdog = string(watchdog(w))
	}
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

// uefi returns the settings of the firmware. Secure Boot is on by default, as in KubeVirt.
func uefi(d *v1.DomainSpec) (out contract.UEFI) {
	if d.Firmware == nil || d.Firmware.Bootloader == nil || d.Firmware.Bootloader.EFI == nil {
		return out
	}
	e := d.Firmware.Bootloader.EFI
	return contract.UEFI{Persistent: e.Persistent != nil && *e.Persistent, SecureBoot: secure(e)}
}

func secure(e *v1.EFI) bool { return e.SecureBoot == nil || *e.SecureBoot }

// hasSMM reports whether a machine says that it has SMM. All have it, but KubeVirt's API requires that a machine with Secure Boot says so.
func hasSMM(d *v1.DomainSpec) bool { return d.Features != nil && on(d.Features.SMM) }

// hugePages is the size of the huge pages of which the memory of a guest consists; "": there are none.
func hugePages(d *v1.DomainSpec) string {
	if d.Memory == nil || d.Memory.Hugepages == nil {
		return ""
	}
	return d.Memory.Hugepages.PageSize
}

// pageSize returns the huge pages that KubeVirt's API calls text, and whether there are such.
func pageSize(text string) (vm.HugePages, bool) {
	q, err := resource.ParseQuantity(text)
	p := vm.HugePages(q.Value())
	return p, err == nil && slices.Contains(vm.AllHugePages, p)
}

// tpm returns the TPM of a guest, as in KubeVirt one that is empty when the instance starts, unless it is persistent.
func tpm(t *v1.TPMDevice) string {
	switch {
	case t == nil || t.Enabled != nil && !*t.Enabled:
		return ""
	case t.Persistent != nil && *t.Persistent:
		return string(vm.TPMPersistent)
	}
	return string(vm.TPMEphemeral)
}

// keptBy returns the key under which a node keeps what is persistent of a guest's firmware for the next instance: the UID of the
// VirtualMachine. "" is for an instance that has none, or keeps nothing.
func keptBy(vmi *v1.VirtualMachineInstance, h contract.Hardware) string {
	owner := metav1.GetControllerOf(vmi)
	if owner == nil || owner.Kind != v1.VirtualMachineGroupVersionKind.Kind || !h.UEFI.Persistent && h.TPM != string(vm.TPMPersistent) {
		return ""
	}
	return string(owner.UID)
}

// guestTopology returns how the guest sees its CPUs; the zero value if the instance does not say.
func guestTopology(s *v1.VirtualMachineInstanceSpec) (t contract.Topology) {
	if c := s.Domain.CPU; c != nil && c.Sockets|c.Cores|c.Threads != 0 && cpus(s) <= maxCPUs {
		t.Sockets, t.Cores, t.Threads = max(int(c.Sockets), 1), max(int(c.Cores), 1), max(int(c.Threads), 1)
	}
	return t
}

// watchdog returns what the end of a watchdog does: as it says, or reset, which is KubeVirt's default.
func watchdog(w *v1.Watchdog) v1.WatchdogAction {
	if w.I6300ESB == nil || w.I6300ESB.Action == "" {
		return v1.WatchdogActionReset
	}
	return w.I6300ESB.Action
}

// devices returns the devices of the disks that are not on virtio, by the names that the node has for the disks.
func devices(s *v1.VirtualMachineInstanceSpec) map[string]contract.DiskDevice {
	out := map[string]contract.DiskDevice{}
	for _, d := range s.Domain.Devices.Disks {
		dev := device(d)
		at := slices.IndexFunc(s.Volumes, func(v v1.Volume) bool { return v.Name == d.Name })
		if dev == (contract.DiskDevice{}) || at < 0 {
			continue
		}
		name := d.Name
		if seed, _ := cloudInit(s.Volumes[at]); seed != nil {
			name = contract.DiskOfSeed
		} else if s.Volumes[at].ContainerDisk != nil {
			name = contract.DiskOfImage
		}
		out[name] = dev
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// device returns the device of a disk. A CD-ROM without a bus is on SATA, as in KubeVirt.
func device(d v1.Disk) (out contract.DiskDevice) {
	switch {
	case d.CDRom != nil:
		out.Bus, out.CDROM = string(d.CDRom.Bus), true
		if out.Bus == "" {
			out.Bus = string(v1.DiskBusSATA)
		}
	case d.Disk != nil:
		out.Bus, out.ReadOnly = string(d.Disk.Bus), d.Disk.ReadOnly
	}
	if out.Bus == string(v1.DiskBusVirtio) {
		out.Bus = ""
	}
	out.Serial, out.Shared = d.Serial, shareable(d)
	if d.BlockSize != nil && d.BlockSize.Custom != nil {
		out.Blocks = contract.Blocks{Logical: size(d.BlockSize.Custom.Logical), Physical: size(d.BlockSize.Custom.Physical)}
	}
	return out
}

// size returns n as the size of a block; 0 if no block is that large.
func size(n uint) int {
	if n > math.MaxInt32 {
		return 0
	}
	return int(n)
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
		c.kernelBoot(at)
		if b := f.Bootloader; b != nil && b.EFI != nil {
			at := at.Child("bootloader", "efi")
			if b.BIOS != nil {
				c.errs = append(c.errs, field.Forbidden(at, "a VM has one boot loader; remove bios or efi"))
			}
			if secure(b.EFI) && !hasSMM(&s.Domain) {
				c.errs = append(c.errs, field.Required(domain.Child("features", "smm", "enabled"), "Secure Boot, which is the default of efi, needs SMM; set it to true, or secureBoot to false"))
			}
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
