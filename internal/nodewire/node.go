package nodewire

import (
	"maps"
	"slices"
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// NodeInfo is the description of a node. The JSON is public API (`cocoon node info -o json`).
type NodeInfo struct {
	Version   string           `json:"version"`
	Hostname  string           `json:"hostname"`
	StateDir  string           `json:"state_dir"`
	RunDir    string           `json:"run_dir"`
	PID       int              `json:"pid"`
	StartedAt time.Time        `json:"started_at"` // of the daemon
	CPUs      int              `json:"cpus"`
	Memory    int64            `json:"memory"` // bytes
	Drivers   []Driver         `json:"drivers"`
	Networks  []string         `json:"networks"`
	VMs       map[string]int64 `json:"vms"` // number in each state

	NetworkDetails []Network `json:"network_details"` // as Networks, the default one first

	Strays int `json:"strays"` // VMs that exist but are not on record

	VolumePools []volume.Pool `json:"volume_pools,omitempty"`
}

// Network is one network of a node.
type Network struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"` // bridge or cni
	Default bool   `json:"default"`
	Up      bool   `json:"up"`
	Error   string `json:"error,omitempty"`  // why it is not up
	Bridge  string `json:"bridge,omitempty"` // link name; this and the rest: kind bridge only
	Subnet  string `json:"subnet,omitempty"` // CIDR
	Gateway string `json:"gateway,omitempty"`
	Leased  int    `json:"leased,omitempty"` // number of addresses
	Free    int    `json:"free,omitempty"`
	Subnet6 string `json:"subnet6,omitempty"` // CIDR; "" without IPv6

	Polices   bool   `json:"polices"`             // it enforces network policies
	Unpoliced string `json:"unpoliced,omitempty"` // why it does not; "" also from a daemon of an earlier release
}

// Driver is one hypervisor driver of a node and what it can do there.
type Driver struct {
	Name     string   `json:"name"`
	Default  bool     `json:"default"`
	Version  string   `json:"version,omitempty"`
	Accel    string   `json:"accel,omitempty"` // the accelerator that auto selects on this host
	Why      string   `json:"why,omitempty"`
	Isolated bool     `json:"isolated"` // each VM has its own cgroup
	Notes    []string `json:"notes,omitempty"`
	Firmware []string `json:"firmware,omitempty"`
	Error    string   `json:"error,omitempty"` // why it cannot be used at all

	Abilities []string `json:"abilities,omitempty"` // what its guests can have, and what can be done with them, here (docs/reference.md)
}

// Check is one finding of the doctor. The JSON is public API (`cocoon doctor -o json`).
type Check struct {
	Name    string `json:"name"`
	Status  string `json:"status"`           // ok, warn or fail
	Feature string `json:"feature"`          // what it is needed for
	Detail  string `json:"detail"`           // what was found
	Remedy  string `json:"remedy,omitempty"` // the command that fixes it
	Fixable bool   `json:"fixable"`          // `cocoon doctor --fix` can fix it
	Fixed   bool   `json:"fixed"`            // it was just fixed
}

// EncodeNodeInfo returns i as a message.
func EncodeNodeInfo(i NodeInfo) *nodev1.NodeInfo {
	return &nodev1.NodeInfo{
		Version: i.Version, Hostname: i.Hostname, StateDir: i.StateDir, RunDir: i.RunDir, Pid: int64(i.PID),
		StartedAtNs: EncodeTime(i.StartedAt), Cpus: int64(i.CPUs), Memory: i.Memory,
		Drivers: each(i.Drivers, encodeDriver), Networks: slices.Clone(i.Networks), Vms: maps.Clone(i.VMs),
		NetworkDetails: each(i.NetworkDetails, encodeNetwork), Strays: int64(i.Strays), VolumePools: each(i.VolumePools, encodePool),
	}
}

func encodeNetwork(n Network) *nodev1.Network {
	return &nodev1.Network{
		Name: n.Name, Kind: n.Kind, Default: n.Default, Up: n.Up, Error: n.Error,
		Bridge: n.Bridge, Subnet: n.Subnet, Gateway: n.Gateway, Leased: int64(n.Leased), Free: int64(n.Free), Subnet6: n.Subnet6,
		Polices: n.Polices, Unpoliced: n.Unpoliced,
	}
}

func decodeNetwork(m *nodev1.Network) Network {
	return Network{
		Name: m.GetName(), Kind: m.GetKind(), Default: m.GetDefault(), Up: m.GetUp(), Error: m.GetError(),
		Bridge: m.GetBridge(), Subnet: m.GetSubnet(), Gateway: m.GetGateway(), Leased: int(m.GetLeased()), Free: int(m.GetFree()), Subnet6: m.GetSubnet6(),
		Polices: m.GetPolices(), Unpoliced: m.GetUnpoliced(),
	}
}

// DecodeNodeInfo returns the info in m.
func DecodeNodeInfo(m *nodev1.NodeInfo) NodeInfo {
	return NodeInfo{
		Version: m.GetVersion(), Hostname: m.GetHostname(), StateDir: m.GetStateDir(), RunDir: m.GetRunDir(), PID: int(m.GetPid()),
		StartedAt: DecodeTime(m.GetStartedAtNs()), CPUs: int(m.GetCpus()), Memory: m.GetMemory(),
		Drivers: each(m.GetDrivers(), decodeDriver), Networks: cloneSlice(m.GetNetworks()), VMs: cloneMap(m.GetVms()),
		NetworkDetails: each(m.GetNetworkDetails(), decodeNetwork), Strays: int(m.GetStrays()), VolumePools: each(m.GetVolumePools(), decodePool),
	}
}

func encodePool(p volume.Pool) *nodev1.VolumePool {
	return &nodev1.VolumePool{Kind: p.Kind, Name: p.Name, Size: p.Size, Used: p.Used, MetadataSize: p.MetadataSize, MetadataUsed: p.MetadataUsed, Free: p.Free, Fault: p.Fault}
}

func decodePool(m *nodev1.VolumePool) volume.Pool {
	return volume.Pool{
		Kind: m.GetKind(), Name: m.GetName(), Size: m.GetSize(), Used: m.GetUsed(), MetadataSize: m.GetMetadataSize(), MetadataUsed: m.GetMetadataUsed(),
		Free: m.GetFree(), Fault: m.GetFault(),
	}
}

func encodeDriver(d Driver) *nodev1.Driver {
	return &nodev1.Driver{
		Name: d.Name, Default: d.Default, Version: d.Version, Accel: d.Accel, Why: d.Why, Isolated: d.Isolated,
		Notes: slices.Clone(d.Notes), Firmware: slices.Clone(d.Firmware), Error: d.Error, Abilities: slices.Clone(d.Abilities),
	}
}

func decodeDriver(m *nodev1.Driver) Driver {
	return Driver{
		Name: m.GetName(), Default: m.GetDefault(), Version: m.GetVersion(), Accel: m.GetAccel(), Why: m.GetWhy(), Isolated: m.GetIsolated(),
		Notes: cloneSlice(m.GetNotes()), Firmware: cloneSlice(m.GetFirmware()), Error: m.GetError(), Abilities: cloneSlice(m.GetAbilities()),
	}
}

// EncodeStrays returns all as a message.
func EncodeStrays(all []vm.Stray) *nodev1.StraysResponse {
	return &nodev1.StraysResponse{Strays: each(all, func(s vm.Stray) *nodev1.Stray {
		return &nodev1.Stray{
			Id: string(s.ID), Name: s.Name, State: string(s.State), Dirs: slices.Clone(s.Dirs), Taps: slices.Clone(s.Taps),
			Pids: each(s.PIDs, func(pid int) int64 { return int64(pid) }), Reason: s.Reason,
		}
	})}
}

// DecodeStrays returns the strays in m.
func DecodeStrays(m *nodev1.StraysResponse) []vm.Stray {
	return each(m.GetStrays(), func(s *nodev1.Stray) vm.Stray {
		return vm.Stray{
			ID: vm.ID(s.GetId()), Name: s.GetName(), State: vm.State(s.GetState()), Dirs: cloneSlice(s.GetDirs()), Taps: cloneSlice(s.GetTaps()),
			PIDs: each(s.GetPids(), func(pid int64) int { return int(pid) }), Reason: s.GetReason(),
		}
	})
}

// EncodeKept returns all as a message.
func EncodeKept(all []vm.KeptFirmware) *nodev1.KeptFirmwareResponse {
	return &nodev1.KeptFirmwareResponse{Kept: each(all, EncodeKeptState)}
}

// DecodeKept returns what m lists.
func DecodeKept(m *nodev1.KeptFirmwareResponse) []vm.KeptFirmware {
	return each(m.GetKept(), DecodeKeptState)
}

// EncodeKeptState returns k as a message.
func EncodeKeptState(k vm.KeptFirmware) *nodev1.KeptState {
	return &nodev1.KeptState{Namespace: k.Owner.Namespace, Vm: k.VM, Key: k.Key, SinceNs: EncodeTime(k.Since)}
}

// DecodeKeptState returns what m says.
func DecodeKeptState(m *nodev1.KeptState) vm.KeptFirmware {
	return vm.KeptFirmware{Owner: vm.Owner{Namespace: m.GetNamespace()}, VM: m.GetVm(), Key: m.GetKey(), Since: DecodeTime(m.GetSinceNs())}
}

// EncodeChecks returns the checks as a message.
func EncodeChecks(checks []Check) *nodev1.DoctorResponse {
	return &nodev1.DoctorResponse{Checks: each(checks, func(c Check) *nodev1.Check {
		return &nodev1.Check{
			Name: c.Name, Status: c.Status, Feature: c.Feature, Detail: c.Detail, Remedy: c.Remedy, Fixable: c.Fixable, Fixed: c.Fixed,
		}
	})}
}

// DecodeChecks returns the checks in m.
func DecodeChecks(m *nodev1.DoctorResponse) []Check {
	return each(m.GetChecks(), func(c *nodev1.Check) Check {
		return Check{
			Name: c.GetName(), Status: c.GetStatus(), Feature: c.GetFeature(), Detail: c.GetDetail(), Remedy: c.GetRemedy(),
			Fixable: c.GetFixable(), Fixed: c.GetFixed(),
		}
	})
}
