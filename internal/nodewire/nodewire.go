// Package nodewire converts between Cocoon's values and the messages of the node API, for both ends of the socket.
//
// The functions are pure and total: Encode converts a value to a message, Decode a message to a value, and a missing
// message is the zero value. The package neither validates nor connects; errors cross the wire in grpcerr.
package nodewire

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

// EncodeSpec returns s as a message.
func EncodeSpec(s vm.Spec) *nodev1.Spec {
	return &nodev1.Spec{
		Name:        s.Name,
		Labels:      maps.Clone(s.Labels),
		Offered:     slices.Clone(s.Offered),
		Image:       s.Image,
		Cpus:        int64(s.CPUs),
		Memory:      s.Memory,
		Storage:     s.Storage,
		Driver:      s.Driver,
		Accel:       string(s.Accel),
		Firmware:    string(s.Firmware),
		Hostname:    s.Hostname,
		Process:     EncodeProcess(s.Process),
		Nics:        each(s.NICs, EncodeNICSpec),
		BootNics:    int64(s.BootNICs),
		Sandbox:     s.Sandbox,
		Paused:      s.Paused,
		StopGraceNs: int64(s.StopGrace),
		CloudInit:   encodeCloudInit(s.CloudInit),
		Volumes:     each(s.Volumes, encodeVolume),
		Mounts:      each(s.Mounts, encodeMount),
		Containers:  each(s.Containers, EncodeContainer),
		Restart:     string(s.Restart),
		Sysctls:     each(s.Sysctls, encodeSysctl),
		Domain:      s.Domain,
		Hosts:       each(s.Hosts, encodeHost),
		Dns:         encodeDNS(s.DNS),
		Smbios:      encodeSMBIOS(s.SMBIOS),
		Graphics:    s.Graphics,
		Hardware:    encodeHardware(s.Hardware),
		DiskRate:    encodeDiskRate(s.DiskRate),

		CgroupParent: s.CgroupParent,
	}
}

// DecodeSpec returns the spec in m.
func DecodeSpec(m *nodev1.Spec) vm.Spec {
	return vm.Spec{
		Name:      m.GetName(),
		Labels:    cloneMap(m.GetLabels()),
		Offered:   cloneSlice(m.GetOffered()),
		Image:     m.GetImage(),
		CPUs:      int(m.GetCpus()),
		Memory:    m.GetMemory(),
		Storage:   m.GetStorage(),
		Driver:    m.GetDriver(),
		Accel:     vm.Accel(m.GetAccel()),
		Firmware:  vm.Firmware(m.GetFirmware()),
		Hostname:  m.GetHostname(),
		Process:   DecodeProcess(m.GetProcess()),
		NICs:      each(m.GetNics(), DecodeNICSpec),
		BootNICs:  int(m.GetBootNics()),
		Sandbox:   m.GetSandbox(),
		Paused:    m.GetPaused(),
		StopGrace: time.Duration(m.GetStopGraceNs()),
		CloudInit: decodeCloudInit(m.GetCloudInit()),
		Volumes:   each(m.GetVolumes(), decodeVolume),
		Mounts:    each(m.GetMounts(), decodeMount),

		Containers: each(m.GetContainers(), DecodeContainer),
		Restart:    vm.RestartPolicy(m.GetRestart()),
		Sysctls:    each(m.GetSysctls(), decodeSysctl),
		Domain:     m.GetDomain(),
		Hosts:      each(m.GetHosts(), decodeHost),
		DNS:        decodeDNS(m.GetDns()),
		SMBIOS:     decodeSMBIOS(m.GetSmbios()),
		Graphics:   m.GetGraphics(),
		Hardware:   decodeHardware(m.GetHardware()),
		DiskRate:   decodeDiskRate(m.GetDiskRate()),

		CgroupParent: m.GetCgroupParent(),
	}
}

func encodeSMBIOS(b *vm.SMBIOS) *nodev1.SMBIOS {
	if b == nil {
		return nil
	}
	c := b.Chassis
	return &nodev1.SMBIOS{
		Uuid: b.UUID, Serial: b.Serial,
		ChassisManufacturer: c.Manufacturer, ChassisVersion: c.Version, ChassisSerial: c.Serial, ChassisAsset: c.Asset, ChassisSku: c.SKU,
	}
}

func decodeSMBIOS(m *nodev1.SMBIOS) *vm.SMBIOS {
	if m == nil {
		return nil
	}
	return &vm.SMBIOS{UUID: m.GetUuid(), Serial: m.GetSerial(), Chassis: vm.Chassis{
		Manufacturer: m.GetChassisManufacturer(), Version: m.GetChassisVersion(), Serial: m.GetChassisSerial(), Asset: m.GetChassisAsset(), SKU: m.GetChassisSku(),
	}}
}

// EncodeProcess returns p as a message.
func EncodeProcess(p vm.Process) *nodev1.Process {
	return &nodev1.Process{
		Entrypoint: slices.Clone(p.Entrypoint),
		Args:       slices.Clone(p.Args),
		Env:        EncodeEnv(p.Env),
		Workdir:    p.WorkDir,
		User:       p.User,
		Tty:        p.TTY,
		Stdin:      p.Stdin,
		StdinOnce:  p.StdinOnce,

		ReadOnlyRoot: p.ReadOnlyRoot,
		Security:     encodeSecurity(p.Security),
		StopSignal:   p.StopSignal,
		FileKeys:     each(p.FileKeys, encodeFileKey),
	}
}

// DecodeProcess returns the process in m.
func DecodeProcess(m *nodev1.Process) vm.Process {
	return vm.Process{
		Entrypoint: cloneSlice(m.GetEntrypoint()),
		Args:       cloneSlice(m.GetArgs()),
		Env:        DecodeEnv(m.GetEnv()),
		WorkDir:    m.GetWorkdir(),
		User:       m.GetUser(),
		TTY:        m.GetTty(),
		Stdin:      m.GetStdin(),
		StdinOnce:  m.GetStdinOnce(),

		ReadOnlyRoot: m.GetReadOnlyRoot(),
		Security:     decodeSecurity(m.GetSecurity()),
		StopSignal:   m.GetStopSignal(),
		FileKeys:     each(m.GetFileKeys(), decodeFileKey),
	}
}

func encodeFileKey(k vm.FileKey) *nodev1.FileKey {
	return &nodev1.FileKey{Name: k.Name, Volume: k.Volume, Path: k.Path, Key: k.Key, Optional: k.Optional, Absent: k.Absent}
}

func decodeFileKey(m *nodev1.FileKey) vm.FileKey {
	return vm.FileKey{
		Name: m.GetName(), Volume: m.GetVolume(), Path: m.GetPath(), Key: m.GetKey(), Optional: m.GetOptional(), Absent: m.GetAbsent(),
	}
}

func encodeSecurity(s *vm.Security) *nodev1.Security {
	if s == nil {
		return nil
	}
	return &nodev1.Security{
		Capabilities: slices.Clone(s.Capabilities), NoNewPrivileges: s.NoNewPrivileges, NonRoot: s.NonRoot,
		Groups: slices.Clone(s.Groups), StrictGroups: s.StrictGroups, Filtered: s.Filtered,
		Masked: slices.Clone(s.Masked), ReadOnly: slices.Clone(s.ReadOnly), SystemCalls: encodeSystemCalls(s.SystemCalls),
	}
}

func decodeSecurity(m *nodev1.Security) *vm.Security {
	if m == nil {
		return nil
	}
	return &vm.Security{
		Capabilities: cloneSlice(m.GetCapabilities()), NoNewPrivileges: m.GetNoNewPrivileges(), NonRoot: m.GetNonRoot(),
		Groups: cloneSlice(m.GetGroups()), StrictGroups: m.GetStrictGroups(), Filtered: m.GetFiltered(),
		Masked: cloneSlice(m.GetMasked()), ReadOnly: cloneSlice(m.GetReadOnly()), SystemCalls: decodeSystemCalls(m.GetSystemCalls()),
	}
}

func encodeSysctl(s vm.Sysctl) *nodev1.Sysctl { return &nodev1.Sysctl{Name: s.Name, Value: s.Value} }

func decodeSysctl(m *nodev1.Sysctl) vm.Sysctl {
	return vm.Sysctl{Name: m.GetName(), Value: m.GetValue()}
}

func encodeHost(h vm.HostEntry) *nodev1.HostEntry {
	return &nodev1.HostEntry{Ip: h.IP, Names: slices.Clone(h.Names)}
}

func decodeHost(m *nodev1.HostEntry) vm.HostEntry {
	return vm.HostEntry{IP: m.GetIp(), Names: cloneSlice(m.GetNames())}
}

func encodeDNS(d *vm.DNS) *nodev1.DNS {
	if d == nil {
		return nil
	}
	return &nodev1.DNS{Servers: slices.Clone(d.Servers), Own: d.Own, Searches: slices.Clone(d.Searches), Options: slices.Clone(d.Options), Offered: d.Offered}
}

func decodeDNS(m *nodev1.DNS) *vm.DNS {
	if m == nil {
		return nil
	}
	return &vm.DNS{Servers: cloneSlice(m.GetServers()), Own: m.GetOwn(), Searches: cloneSlice(m.GetSearches()), Options: cloneSlice(m.GetOptions()), Offered: m.GetOffered()}
}

// EncodeEnv returns the variables as messages.
func EncodeEnv(env []vm.EnvVar) []*nodev1.EnvVar {
	return each(env, func(e vm.EnvVar) *nodev1.EnvVar { return &nodev1.EnvVar{Name: e.Name, Value: e.Value} })
}

// DecodeEnv returns the variables in m.
func DecodeEnv(m []*nodev1.EnvVar) []vm.EnvVar {
	return each(m, func(e *nodev1.EnvVar) vm.EnvVar { return vm.EnvVar{Name: e.GetName(), Value: e.GetValue()} })
}

// EncodeRecord returns r as a message.
func EncodeRecord(r vm.Record) *nodev1.Record {
	return &nodev1.Record{
		Id:          string(r.ID),
		Owner:       EncodeOwner(r.Owner),
		Spec:        EncodeSpec(r.Spec),
		State:       string(r.State),
		Driver:      r.Driver,
		ImageType:   string(r.ImageType),
		ImageDigest: r.ImageDigest,
		Boot: &nodev1.Boot{
			Kernel: r.Boot.Kernel, Initrd: r.Boot.Initrd, Cmdline: r.Boot.Cmdline, Firmware: string(r.Boot.Firmware),
		},
		Process:     EncodeProcess(r.Process),
		Disks:       each(r.Disks, encodeDisk),
		Nics:        each(r.NICs, encodeNIC),
		Moving:      each(r.Moving, func(place int) int64 { return int64(place) }),
		Handle:      slices.Clone(r.Handle),
		Pid:         int64(r.PID),
		Paused:      string(r.Paused),
		Frozen:      r.Frozen,
		KernelSums:  &nodev1.KernelSums{Kernel: r.KernelSums.Kernel, Initrd: r.KernelSums.Initrd},
		Cid:         r.CID,
		AgentReady:  r.AgentReady,
		ExitCode:    encodeExitCode(r.ExitCode),
		Reason:      r.Reason,
		Message:     strings.ToValidUTF8(r.Message, "\uFFFD"), // may quote a program's output; one invalid byte would fail the whole message
		FirstBooted: r.FirstBooted,
		CreatedAtNs: EncodeTime(r.CreatedAt),
		UpdatedAtNs: EncodeTime(r.UpdatedAt),
		StartedAtNs: EncodeTime(r.StartedAt),
		StoppedAtNs: EncodeTime(r.StoppedAt),
		Restarts:    int64(r.Restarts),
		Revision:    r.Revision,
		Snapshot:    r.Snapshot, SnapshotIds: slices.Clone(r.SnapshotIDs), Resume: encodeResume(r.Resume), Cloned: r.Cloned,
		Containers: each(r.Containers, encodeContainerRecord), Ephemeral: each(r.Ephemeral, encodeEphemeral),
		ImageVolumes: each(r.ImageVolumes, encodeImageVolume), Attached: each(r.Attached, encodeAttached), BootContainer: r.BootContainer,
	}
}

// DecodeRecord returns the record in m.
func DecodeRecord(m *nodev1.Record) vm.Record {
	return vm.Record{
		ID:          vm.ID(m.GetId()),
		Owner:       DecodeOwner(m.GetOwner()),
		Spec:        DecodeSpec(m.GetSpec()),
		State:       vm.State(m.GetState()),
		Driver:      m.GetDriver(),
		ImageType:   vm.ImageType(m.GetImageType()),
		ImageDigest: m.GetImageDigest(),
		Boot: vm.Boot{
			Kernel: m.GetBoot().GetKernel(), Initrd: m.GetBoot().GetInitrd(),
			Cmdline: m.GetBoot().GetCmdline(), Firmware: vm.Firmware(m.GetBoot().GetFirmware()),
		},
		Process:     DecodeProcess(m.GetProcess()),
		Disks:       each(m.GetDisks(), decodeDisk),
		NICs:        each(m.GetNics(), decodeNIC),
		Moving:      each(m.GetMoving(), func(place int64) int { return int(place) }),
		Handle:      cloneSlice(m.GetHandle()),
		PID:         int(m.GetPid()),
		Paused:      vm.Paused(m.GetPaused()),
		Frozen:      m.GetFrozen(),
		KernelSums:  vm.KernelSums{Kernel: m.GetKernelSums().GetKernel(), Initrd: m.GetKernelSums().GetInitrd()},
		CID:         m.GetCid(),
		AgentReady:  m.GetAgentReady(),
		ExitCode:    decodeExitCode(m),
		Reason:      m.GetReason(),
		Message:     m.GetMessage(),
		FirstBooted: m.GetFirstBooted(),
		CreatedAt:   DecodeTime(m.GetCreatedAtNs()),
		UpdatedAt:   DecodeTime(m.GetUpdatedAtNs()),
		StartedAt:   DecodeTime(m.GetStartedAtNs()),
		StoppedAt:   DecodeTime(m.GetStoppedAtNs()),
		Restarts:    int(m.GetRestarts()),
		Revision:    m.GetRevision(),
		Snapshot:    m.GetSnapshot(), SnapshotIDs: cloneSlice(m.GetSnapshotIds()), Resume: decodeResume(m.GetResume()), Cloned: m.GetCloned(),
		Containers: each(m.GetContainers(), decodeContainerRecord), Ephemeral: each(m.GetEphemeral(), decodeEphemeral),
		ImageVolumes: each(m.GetImageVolumes(), decodeImageVolume), Attached: each(m.GetAttached(), decodeAttached), BootContainer: m.GetBootContainer(),
	}
}

// EncodeEvent returns e as a message.
func EncodeEvent(e vm.Event) *nodev1.Event {
	return &nodev1.Event{Type: string(e.Type), Revision: e.Revision, Record: EncodeRecord(e.Record)}
}

// DecodeEvent returns the event in m.
func DecodeEvent(m *nodev1.Event) vm.Event {
	return vm.Event{Type: vm.EventType(m.GetType()), Revision: m.GetRevision(), Record: DecodeRecord(m.GetRecord())}
}

// EncodeNICSpec returns n as a message.
func EncodeNICSpec(n vm.NICSpec) *nodev1.NICSpec {
	return &nodev1.NICSpec{Network: n.Network, Mac: n.MAC, Ports: each(n.Ports, encodePort), Policed: n.Policed, Masquerade: encodeMasquerade(n.Masquerade), Place: int64(n.Place), LinkDown: n.LinkDown, Pod: encodePodName(n.Pod), Bandwidth: encodeBandwidth(n.Bandwidth)}
}

func encodePort(p vm.PortMapping) *nodev1.PortMapping {
	return &nodev1.PortMapping{Protocol: string(p.Protocol), HostIp: p.HostIP, HostPort: uint32(p.HostPort), GuestPort: uint32(p.GuestPort)}
}

// decodePort makes numbers that are no ports 0, which the validation of a spec refuses.
func decodePort(m *nodev1.PortMapping) vm.PortMapping {
	return vm.PortMapping{Protocol: vm.Protocol(m.GetProtocol()), HostIP: m.GetHostIp(), HostPort: port(m.GetHostPort()), GuestPort: port(m.GetGuestPort())}
}

func port(n uint32) uint16 {
	if n > math.MaxUint16 {
		return 0
	}
	return uint16(n)
}

// DecodeNICSpec returns the interface in m.
func DecodeNICSpec(m *nodev1.NICSpec) vm.NICSpec {
	return vm.NICSpec{Network: m.GetNetwork(), MAC: m.GetMac(), Ports: each(m.GetPorts(), decodePort), Policed: m.GetPoliced(), Masquerade: decodeMasquerade(m.GetMasquerade()), Place: int(m.GetPlace()), LinkDown: m.GetLinkDown(), Pod: decodePodName(m.GetPod()), Bandwidth: decodeBandwidth(m.GetBandwidth())}
}

func encodeNIC(n vm.NIC) *nodev1.NIC {
	m := &nodev1.NIC{
		Network: n.Network, Tap: n.Tap, Netns: n.NetNS, Mac: n.MAC, Ip: n.IP, Prefix: int64(n.Prefix),
		Gateway: n.Gateway, Dns: slices.Clone(n.DNS), Mtu: int64(n.MTU), Dhcp: n.DHCP, Ipv6: n.IPv6,
		Addresses: slices.Clone(n.Addresses), Inside: encodeInside(n.Inside), Place: int64(n.Place), LinkDown: n.LinkDown,
	}
	for _, r := range n.Routes {
		m.Routes = append(m.Routes, &nodev1.Route{To: r.To, Via: r.Via})
	}
	return m
}

func decodeNIC(m *nodev1.NIC) vm.NIC {
	n := vm.NIC{
		Network: m.GetNetwork(), Tap: m.GetTap(), NetNS: m.GetNetns(), MAC: m.GetMac(), IP: m.GetIp(), Prefix: int(m.GetPrefix()),
		Gateway: m.GetGateway(), DNS: cloneSlice(m.GetDns()), MTU: int(m.GetMtu()), DHCP: m.GetDhcp(), IPv6: m.GetIpv6(),
		Addresses: cloneSlice(m.GetAddresses()), Inside: decodeInside(m.GetInside()), Place: int(m.GetPlace()), LinkDown: m.GetLinkDown(),
	}
	for _, r := range m.GetRoutes() {
		n.Routes = append(n.Routes, vm.Route{To: r.GetTo(), Via: r.GetVia()})
	}
	return n
}

func encodeDisk(d vm.Disk) *nodev1.Disk {
	m := &nodev1.Disk{Path: d.Path, Format: string(d.Format), ReadOnly: d.ReadOnly, Serial: d.Serial, Role: string(d.Role), Port: int64(d.Port), Device: d.Device, Root: d.Root, Shared: d.Shared}
	if d.Backing != nil {
		m.Backing = encodeDisk(*d.Backing)
	}
	return m
}

func decodeDisk(m *nodev1.Disk) vm.Disk {
	d := vm.Disk{
		Path: m.GetPath(), Format: vm.DiskFormat(m.GetFormat()), ReadOnly: m.GetReadOnly(),
		Serial: m.GetSerial(), Role: vm.DiskRole(m.GetRole()), Port: int(m.GetPort()), Device: m.GetDevice(), Root: m.GetRoot(), Shared: m.GetShared(),
	}
	if m.GetBacking() != nil {
		b := decodeDisk(m.GetBacking())
		d.Backing = &b
	}
	return d
}

func encodeExitCode(code *int) *int64 {
	if code == nil {
		return nil
	}
	return new(int64(*code))
}

func decodeExitCode(m *nodev1.Record) *int {
	if m == nil || m.ExitCode == nil {
		return nil
	}
	return new(int(*m.ExitCode))
}

// EncodeTime returns t as nanoseconds since the Unix epoch, 0 for the zero time.
func EncodeTime(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// DecodeTime is the reverse of EncodeTime, in UTC.
func DecodeTime(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// each maps f over in; an empty list becomes nil, because the wire cannot tell nil from empty.
func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}

func cloneSlice[T any](in []T) []T {
	if len(in) == 0 {
		return nil
	}
	return slices.Clone(in)
}

func cloneMap[V any](in map[string]V) map[string]V {
	if len(in) == 0 {
		return nil
	}
	return maps.Clone(in)
}

func encodeResume(r *vm.Resume) *nodev1.Resume {
	if r == nil {
		return nil
	}
	return &nodev1.Resume{Clone: r.Clone, Macs: slices.Clone(r.MACs), MachineId: r.MachineID, SshHostKeys: r.SSHHostKeys, Storage: r.Storage, Fresh: r.Fresh, Volumes: slices.Clone(r.Volumes)}
}

func decodeResume(m *nodev1.Resume) *vm.Resume {
	if m == nil {
		return nil
	}
	return &vm.Resume{Clone: m.GetClone(), MACs: cloneSlice(m.GetMacs()), MachineID: m.GetMachineId(), SSHHostKeys: m.GetSshHostKeys(), Storage: m.GetStorage(), Fresh: m.GetFresh(), Volumes: cloneSlice(m.GetVolumes())}
}
