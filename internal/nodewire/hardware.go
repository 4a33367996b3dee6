package nodewire

import (
	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func encodeHardware(h *vm.Hardware) *nodev1.Hardware {
	if h == nil {
		return nil
	}
	m := &nodev1.Hardware{Sockets: int32(h.Topology.Sockets), Cores: int32(h.Topology.Cores), Threads: int32(h.Topology.Threads), Watchdog: string(h.Watchdog), Panic: string(h.Panic), UefiPersistent: h.UEFI.Persistent, SecureBoot: h.UEFI.SecureBoot, Tpm: string(h.TPM), Windows: h.Windows, HugePages: int64(h.HugePages), Keep: h.Keep, MaxSockets: int32(h.Growth.Sockets), MaxMemory: h.Growth.Memory, PluggedMemory: h.Growth.Plugged, Vsock: h.VSOCK}
	m.Cpu, m.Clock = encodeCPU(h.CPU), encodeClock(h.Clock)
	for name, d := range h.Disks {
		if m.Disks == nil {
			m.Disks = map[string]*nodev1.DiskDevice{}
		}
		m.Disks[name] = &nodev1.DiskDevice{
			Bus: string(d.Bus), Cdrom: d.CDROM, ReadOnly: d.ReadOnly, Serial: d.Serial, LogicalBlock: int32(d.Blocks.Logical), PhysicalBlock: int32(d.Blocks.Physical),
		}
	}
	if k := h.Kernel; k != nil {
		m.Kernel = &nodev1.Kernel{Volume: k.Volume, Path: k.Path, Initrd: k.Initrd, Args: k.Args}
	}
	for _, model := range h.NICs {
		m.Nics = append(m.Nics, string(model))
	}
	return m
}

func decodeHardware(m *nodev1.Hardware) *vm.Hardware {
	if m == nil {
		return nil
	}
	h := &vm.Hardware{
		Topology: vm.Topology{Sockets: int(m.GetSockets()), Cores: int(m.GetCores()), Threads: int(m.GetThreads())}, Watchdog: vm.Watchdog(m.GetWatchdog()),
		CPU: decodeCPU(m.GetCpu()), Clock: decodeClock(m.GetClock()), Panic: vm.Panic(m.GetPanic()), TPM: vm.TPM(m.GetTpm()), UEFI: vm.UEFI{Persistent: m.GetUefiPersistent(), SecureBoot: m.GetSecureBoot()}, Windows: m.GetWindows(), HugePages: decodeHugePages(m.GetHugePages()), Keep: m.GetKeep(), VSOCK: m.GetVsock(),
		Growth: vm.Growth{Sockets: int(m.GetMaxSockets()), Memory: m.GetMaxMemory(), Plugged: m.GetPluggedMemory()},
	}
	for name, d := range m.GetDisks() {
		if h.Disks == nil {
			h.Disks = map[string]vm.DiskDevice{}
		}
		h.Disks[name] = vm.DiskDevice{
			Bus: vm.DiskBus(d.GetBus()), CDROM: d.GetCdrom(), ReadOnly: d.GetReadOnly(), Serial: d.GetSerial(),
			Blocks: vm.Blocks{Logical: int(d.GetLogicalBlock()), Physical: int(d.GetPhysicalBlock())},
		}
	}
	if k := m.GetKernel(); k != nil {
		h.Kernel = &vm.Kernel{Volume: k.GetVolume(), Path: k.GetPath(), Initrd: k.GetInitrd(), Args: k.GetArgs()}
	}
	for _, model := range m.GetNics() {
		h.NICs = append(h.NICs, vm.NICModel(model))
	}
	return h
}

// decodeHugePages also reads what programs of earlier releases send: true, for pages of 2 MiB.
func decodeHugePages(bytes int64) vm.HugePages {
	if bytes == 1 {
		return vm.HugePages2M
	}
	return vm.HugePages(bytes)
}

func encodeCPU(c vm.CPU) *nodev1.CPU {
	m := &nodev1.CPU{
		Model: c.Model, HideKvm: c.HideKVM, Hyperv: cloneSlice(c.HyperV.Features), HypervSpinlocks: int64(c.HyperV.Spinlocks), HypervVendorId: c.HyperV.VendorID,
	}
	for _, f := range c.Features {
		m.Features = append(m.Features, &nodev1.CPUFeature{Name: f.Name, Policy: string(f.Policy)})
	}
	return m
}

func decodeCPU(m *nodev1.CPU) vm.CPU {
	c := vm.CPU{
		Model: m.GetModel(), HideKVM: m.GetHideKvm(),
		HyperV: vm.HyperV{Features: cloneSlice(m.GetHyperv()), Spinlocks: int(m.GetHypervSpinlocks()), VendorID: m.GetHypervVendorId()},
	}
	for _, f := range m.GetFeatures() {
		c.Features = append(c.Features, vm.CPUFeature{Name: f.GetName(), Policy: vm.FeaturePolicy(f.GetPolicy())})
	}
	return c
}

func encodeClock(c vm.Clock) *nodev1.Clock {
	return &nodev1.Clock{Timezone: c.Timezone, Offset: int32(c.Offset), Local: c.Local, CatchUp: c.CatchUp, Guest: c.Guest, NoHpet: c.NoHPET}
}

func decodeClock(m *nodev1.Clock) vm.Clock {
	return vm.Clock{Timezone: m.GetTimezone(), Offset: int(m.GetOffset()), Local: m.GetLocal(), CatchUp: m.GetCatchUp(), Guest: m.GetGuest(), NoHPET: m.GetNoHpet()}
}
