package kubevirt

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
)

// threadsPerCore is how many threads a core has in topologies that are spread over threads.
const threadsPerCore = 2

// topology returns the sockets, cores and threads of n CPUs as the preference, which may be nil, has them. why says which n it cannot have,
// as in KubeVirt.
func topology(n uint32, p *v1beta1.VirtualMachinePreferenceSpec) (sockets, cores, threads uint32, why string) {
	preferred := v1beta1.Sockets
	if p != nil && p.CPU != nil && p.CPU.PreferredCPUTopology != nil {
		preferred = *p.CPU.PreferredCPUTopology
	}
	switch preferred {
	case v1beta1.Cores, v1beta1.DeprecatedPreferCores:
		return 1, n, 1, ""
	case v1beta1.Threads, v1beta1.DeprecatedPreferThreads:
		return 1, 1, n, ""
	case v1beta1.Spread, v1beta1.DeprecatedPreferSpread:
	default:
		return n, 1, 1, ""
	}
	ratio, across := spread(p)
	switch across {
	case v1beta1.SpreadAcrossSocketsCores:
		sockets, cores, threads = n/ratio, ratio, 1
	case v1beta1.SpreadAcrossCoresThreads:
		sockets, cores, threads = 1, n/ratio, ratio
	case v1beta1.SpreadAcrossSocketsCoresThreads:
		sockets, cores, threads = n/threadsPerCore/ratio, ratio, threadsPerCore
	}
	if n > 1 && uint64(sockets)*uint64(cores)*uint64(threads) != uint64(n) {
		return n, 1, 1, fmt.Sprintf("cannot be spread across %s with the ratio %d, as the preference has it", across, ratio)
	}
	if n <= 1 {
		sockets, cores, threads = 1, 1, 1
	}
	return sockets, cores, threads, ""
}

func spread(p *v1beta1.VirtualMachinePreferenceSpec) (ratio uint32, across v1beta1.SpreadAcross) {
	ratio, across = p.PreferSpreadSocketToCoreRatio, v1beta1.SpreadAcrossSocketsCores
	if o := p.CPU.SpreadOptions; o != nil {
		if o.Across != nil {
			across = *o.Across
		}
		if o.Ratio != nil {
			ratio = *o.Ratio
		}
	}
	if ratio == 0 {
		ratio = 2
	}
	return ratio, across
}

// ignore warns of a preference whose value Cocoon does not have. The machine keeps its default.
func (u *unfolding) ignore(at *field.Path, why string) {
	u.warnings = append(u.warnings, ineffective(at, why))
}

// prefer sets what the machine leaves open to the preferred value, if it is the only one that a VM can have.
func (u *unfolding) prefer(at *field.Path, preferred *bool, only bool, into **bool, why string) {
	switch {
	case preferred == nil:
	case *preferred != only:
		u.ignore(at, why)
	case *into == nil:
		value := only
		*into = &value
	}
}

func (u *unfolding) preference(p *v1beta1.VirtualMachinePreferenceSpec) {
	at := part(atPreference, u.base.Preference.Name)
	errs, warnings := preferenceRules.judge(p, at)
	u.errs, u.warnings = append(u.errs, errs...), append(u.warnings, warnings...)
	if p.Devices != nil {
		u.devices(p.Devices, at.Child("devices"))
	}
	u.platform(p, at)
	if p.PreferredSubdomain != nil && u.spec.Subdomain == "" {
		u.spec.Subdomain = *p.PreferredSubdomain
	}
	if g := p.PreferredTerminationGracePeriodSeconds; g != nil && u.spec.TerminationGracePeriodSeconds == nil {
		seconds := *g
		u.spec.TerminationGracePeriodSeconds = &seconds
	}
	for _, key := range slices.Sorted(maps.Keys(p.Annotations)) {
		if _, ok := u.meta.Annotations[key]; !ok {
			metav1.SetMetaDataAnnotation(u.meta, key, p.Annotations[key])
		}
	}
	if r := p.Requirements; r != nil && (u.base.Instancetype == nil || !u.base.Instancetype.unknown) {
		u.requirements(r)
	}
}

func (u *unfolding) devices(p *v1beta1.DevicePreferences, at *field.Path) {
	d := &u.spec.Domain.Devices
	u.graphics(p, at)
	u.prefer(at.Child("preferredAutoattachPodInterface"), p.PreferredAutoattachPodInterface, true, &d.AutoattachPodInterface, "a VM has the network of pods")
	u.prefer(at.Child("preferredAutoattachSerialConsole"), p.PreferredAutoattachSerialConsole, true, &d.AutoattachSerialConsole, "a VM has a serial console")
	u.prefer(at.Child("preferredAutoattachInputDevice"), p.PreferredAutoattachInputDevice, false, &d.AutoattachInputDevice, noInputs)
	if p.PreferredDisableHotplug != nil {
		d.DisableHotplug = *p.PreferredDisableHotplug
	}
	if m := p.PreferredPanicDeviceModel; m != nil && *m != v1.Isa && *m != v1.Pvpanic {
		u.ignore(at.Child("preferredPanicDeviceModel"), "panic devices are isa and pvpanic")
	} else if m != nil {
		for i := range d.PanicDevices {
			fill(&d.PanicDevices[i].Model, m)
		}
	}
	if p.PreferredTPM != nil && d.TPM == nil {
		d.TPM = p.PreferredTPM.DeepCopy()
	}
	if p.PreferredRng != nil && d.Rng == nil {
		d.Rng = p.PreferredRng.DeepCopy()
	}
	for i := range d.Disks {
		disk := &d.Disks[i]
		if bus := p.PreferredDiskBus; bus != "" && disk.CDRom == nil && disk.LUN == nil {
			if disk.Disk == nil {
				disk.Disk = &v1.DiskTarget{}
			}
			if disk.Disk.Bus == "" {
				disk.Disk.Bus = bus
			}
		}
		if bus := p.PreferredCdromBus; bus != "" && disk.CDRom != nil && disk.CDRom.Bus == "" {
			disk.CDRom.Bus = bus
		}
	}
	if model := p.PreferredInterfaceModel; !slices.Contains(models, model) {
		u.ignore(at.Child("preferredInterfaceModel"), "interfaces are virtio, e1000, e1000e or rtl8139")
	} else if model != "" {
		for i := range d.Interfaces {
			if d.Interfaces[i].Model == "" {
				d.Interfaces[i].Model = model
			}
		}
	}
}

// graphics applies what a preference says of the screen.
func (u *unfolding) graphics(p *v1beta1.DevicePreferences, at *field.Path) {
	d := &u.spec.Domain.Devices
	if auto := p.PreferredAutoattachGraphicsDevice; auto != nil && d.AutoattachGraphicsDevice == nil {
		value := *auto
		d.AutoattachGraphicsDevice = &value
	}
	switch kind := p.PreferredVideoType; {
	case kind == nil:
	case *kind != videoType:
		u.ignore(at.Child("preferredVideoType"), "screens are "+videoType)
	case d.Video == nil && graphics(u.spec):
		d.Video = &v1.VideoDevice{Type: videoType}
	}
}

// platform applies what a preference says of the machine itself.
func (u *unfolding) platform(p *v1beta1.VirtualMachinePreferenceSpec, at *field.Path) {
	d := &u.spec.Domain
	if m := p.Machine; m != nil && m.PreferredMachineType != "" {
		if !supportedMachine(m.PreferredMachineType) {
			u.ignore(at.Child("machine", "preferredMachineType"), "machines are q35")
		} else if d.Machine == nil || d.Machine.Type == "" {
			d.Machine = &v1.Machine{Type: m.PreferredMachineType}
		}
	}
	if a := p.PreferredArchitecture; a != nil && *a != "" {
		if *a != architecture {
			u.ignore(at.Child("preferredArchitecture"), "machines are "+architecture)
		} else if u.spec.Architecture == "" {
			u.spec.Architecture = *a
		}
	}
	if f := p.Features; f != nil && f.PreferredAcpi != nil && f.PreferredAcpi.Enabled != nil { // without a value it says nothing new
		if d.Features == nil {
			d.Features = &v1.Features{}
		}
		u.prefer(at.Child("features", "preferredAcpi", "enabled"), f.PreferredAcpi.Enabled, true, &d.Features.ACPI.Enabled, "a VM has ACPI, by which it is asked to shut down")
		if *d.Features == (v1.Features{}) {
			d.Features = nil
		}
	}
	u.preferCPU(p, at)
	if p.Firmware != nil {
		u.firmware(p.Firmware, at.Child("firmware"))
	}
}

// firmware applies the preferred boot loader to a machine that has none. A VM without SMM boots by UEFI without
// Secure Boot: most images can.
func (u *unfolding) firmware(p *v1beta1.FirmwarePreferences, at *field.Path) {
	is := func(b *bool) bool { return b != nil && *b }
	d := &u.spec.Domain
	loader := v1.Bootloader{}
	if d.Firmware != nil && d.Firmware.Bootloader != nil {
		loader = *d.Firmware.Bootloader.DeepCopy()
	}
	given := loader.BIOS != nil || loader.EFI != nil
	if is(p.PreferredUseBios) && !given {
		loader.BIOS = &v1.BIOS{}
	}
	if p.PreferredUseBiosSerial != nil && loader.BIOS != nil && loader.BIOS.UseSerial == nil {
		serial := *p.PreferredUseBiosSerial
		loader.BIOS.UseSerial = &serial
	}
	preferred := p.PreferredEfi.DeepCopy()
	if preferred == nil && is(p.DeprecatedPreferredUseEfi) {
		use := is(p.DeprecatedPreferredUseSecureBoot)
		preferred = &v1.EFI{SecureBoot: &use}
	}
	if preferred != nil && loader.BIOS == nil && loader.EFI == nil {
		if secure(preferred) && !hasSMM(d) {
			no := false
			preferred.SecureBoot = &no
			u.ignore(at.Child("preferredEfi", "secureBoot"), "Secure Boot, which is the default of preferredEfi, needs features.smm of the machine or the preference")
		}
		loader.EFI = preferred
	}
	if loader.BIOS == nil && loader.EFI == nil {
		return
	}
	if d.Firmware == nil {
		d.Firmware = &v1.Firmware{}
	}
	d.Firmware.Bootloader = &loader
}

// requirements refuses a machine that is too small for the preference.
func (u *unfolding) requirements(r *v1beta1.PreferenceRequirements) {
	short := func(of, has, needs string) {
		at := atDomain.Child(of)
		if u.base.Instancetype != nil {
			at = atInstancetype
		}
		u.errs = append(u.errs, field.Invalid(at, has, fmt.Sprintf("the preference %s requires %s", u.base.Preference.Name, needs)))
	}
	if c := r.CPU; c != nil {
		if n := cpus(u.spec); n < int64(c.Guest) {
			short("cpu", fmt.Sprint(n), fmt.Sprintf("at least %d CPUs", c.Guest))
		}
	}
	if m := r.Memory; m != nil {
		if size, _ := memory(u.spec); size < m.Guest.Value() {
			has := "0"
			if g := u.spec.Domain.Memory; g != nil && g.Guest != nil {
				has = g.Guest.String()
			}
			short("memory", has, "at least "+m.Guest.String()+" of memory")
		}
	}
	if a := r.Architecture; a != nil && *a != architecture {
		u.errs = append(u.errs, field.Invalid(atTemplate.Child("spec", "architecture"), architecture, fmt.Sprintf("the preference %s requires %s", u.base.Preference.Name, *a)))
	}
}

// architecture is the architecture of all machines.
const architecture = "amd64"

// supportedMachine reports whether a machine can have the type.
func supportedMachine(name string) bool { return name == "q35" || strings.HasPrefix(name, "pc-q35-") }
