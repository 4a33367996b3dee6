package vm

import (
	"cmp"
	"slices"
)

// PortRDP is the TCP port at which Windows accepts remote desktop connections.
const PortRDP = 3389

// windowsHyperV is what of Hyper-V's interface a Windows guest gets: the parts that do not tie it to one host, so that it can be saved.
var windowsHyperV = HyperV{
	Features:  []string{"frequencies", "ipi", "relaxed", "reset", "runtime", "stimer", "synic", "time", "tlbflush", "vapic", "vpindex"},
	Spinlocks: 8191,
}

// IsWindows reports whether the guest of s is Windows.
func (s Spec) IsWindows() bool { return s.Hardware != nil && s.Hardware.Windows }

// AsWindows returns s with a guest that is Windows.
func (s Spec) AsWindows() Spec {
	h := s.Hardware.Clone()
	if h == nil {
		h = &Hardware{}
	}
	h.Windows = true
	s.Hardware = h
	return s
}

// OnVirtio returns s, a guest that is Windows and has the drivers of virtio, with its disks and interfaces on virtio.
func (s Spec) OnVirtio() Spec {
	h := s.Hardware.Clone()
	h.NICs, h.Disks = nil, map[string]DiskDevice{}
	for range s.NICs {
		h.NICs = append(h.NICs, NICVirtio)
	}
	if _, ok := BootVolume(s.Image); !ok {
		h.Disks[DiskOfImage] = DiskDevice{Bus: DiskVirtio}
	}
	for _, v := range s.Volumes {
		if v.Kind == VolumeDisk {
			h.Disks[v.Name] = DiskDevice{Bus: DiskVirtio}
		}
	}
	s.Hardware = h
	return s
}

// forWindows returns s with all that its machine leaves open as Windows boots on it without a driver of its own: UEFI with lasting variables,
// Hyper-V's interface, a clock in local time, disks on SATA, interfaces of model e1000e. It adds no TPM: a VM that has one cannot be saved,
// so it could not hibernate.
func (s Spec) forWindows() Spec {
	s.Firmware = cmp.Or(s.Firmware, FirmwareUEFI)
	h := s.Hardware.Clone()
	h.UEFI.Persistent = s.Firmware == FirmwareUEFI
	if v := &h.CPU.HyperV; !h.CPU.HideKVM && len(v.Features) == 0 && v.Spinlocks == 0 && v.VendorID == "" {
		*v = HyperV{Features: slices.Clone(windowsHyperV.Features), Spinlocks: windowsHyperV.Spinlocks}
	}
	h.Clock.Local = h.Clock.Timezone == "" && h.Clock.Offset == 0
	h.Clock.CatchUp, h.Clock.NoHPET = true, true
	for i := range s.NICs {
		if i == len(h.NICs) {
			h.NICs = append(h.NICs, "")
		}
		h.NICs[i] = cmp.Or(h.NICs[i], NICE1000E)
	}
	s.Hardware = h
	s.windowsDisks()
	return s
}

// windowsDisks chooses devices for the disks of s that have none. SATA takes no disk that is read-only, except CD-ROMs, and not many; the
// others are on USB.
func (s Spec) windowsDisks() {
	h, onSATA := s.Hardware, 0
	for _, d := range h.Disks {
		if d.Bus == DiskSATA {
			onSATA++
		}
	}
	open := func(name string, files, readOnly bool) {
		d := h.Disks[name]
		if d.Bus != "" {
			return
		}
		d.CDROM = d.CDROM || files && d.Blocks == Blocks{}
		fixed := !d.CDROM && (readOnly || d.ReadOnly || d.Blocks.Logical > minBlock)
		if d.Bus = DiskUSB; !fixed && onSATA < h.sataRoom() {
			d.Bus = DiskSATA
			onSATA++
		}
		if h.Disks == nil {
			h.Disks = map[string]DiskDevice{}
		}
		h.Disks[name] = d
	}
	ofVolume := func(v Volume) {
		switch {
		case v.Kind == VolumeDisk:
			open(v.Name, false, v.Disk != nil && v.Disk.ReadOnly)
		case v.Label != "":
			open(v.Name, true, true)
		}
	}
	if boot, ok := BootVolume(s.Image); !ok {
		open(DiskOfImage, false, false)
	} else if i := slices.IndexFunc(s.Volumes, func(v Volume) bool { return v.Name == boot }); i >= 0 {
		ofVolume(s.Volumes[i]) // before SATA is full
	}
	open(DiskOfSeed, true, true)
	for _, v := range s.Volumes {
		ofVolume(v)
	}
}

// sataRoom returns how many disks h can have on SATA: a Windows guest has the drive for the CD-ROM with its drivers there, too.
func (h *Hardware) sataRoom() int {
	if h.Windows {
		return BusRoom(DiskSATA) - 1
	}
	return BusRoom(DiskSATA)
}
