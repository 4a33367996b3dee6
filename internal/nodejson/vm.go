// Package nodejson holds the types of the output of `cocoon -o json`: the documented forms of VMs, events and
// snapshots.
//
// Names and meanings of the keys are public API (docs/compat.md); keys may be added. Fields without a key are not
// carried: a VM decoded from JSON has no process and no driver handle.
package nodejson

import (
	"cmp"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// VM is a virtual machine.
type VM struct {
	ID             string     `json:"id"`
	Hypervisor     string     `json:"hypervisor"`
	State          vm.State   `json:"state"`
	Config         Config     `json:"config"`
	PID            int        `json:"pid"`
	Paused         vm.Paused  `json:"paused,omitempty"` // why the guest of a running VM does not run; absent: nobody has paused it
	NetworkConfigs []NIC      `json:"network_configs"`
	StorageConfigs []Storage  `json:"storage_configs"`
	FirstBooted    bool       `json:"first_booted"`
	SnapshotIDs    IDs        `json:"snapshot_ids"`
	CreatedAt      time.Time  `json:"created_at"`
	UpdatedAt      time.Time  `json:"updated_at"`
	StartedAt      *time.Time `json:"started_at"`
	StoppedAt      *time.Time `json:"stopped_at"`

	Snapshot string `json:"snapshot,omitempty"` // id of the snapshot that it was cloned from or, hibernated, is saved in
	Cloned   bool   `json:"cloned,omitempty"`   // its process resumed from another VM's memory
	Resuming bool   `json:"resuming,omitempty"` // the guest has not been told its identity yet

	Resume   *vm.Resume          `json:"resume,omitempty"`   // what the guest must still be told
	Volumes  []vm.Volume         `json:"volumes,omitempty"`  // without their content
	Attached []vm.AttachedVolume `json:"attached,omitempty"` // those that are disks of the volume store

	Containers []Container `json:"containers,omitempty"`
	Ephemeral  []Container `json:"ephemeral,omitempty"` // added while it ran

	BootContainer string `json:"boot_container,omitempty"` // the one of Ephemeral that is its guest

	AgentReady bool              `json:"agent_ready"`
	ExitCode   *int              `json:"exit_code"`
	Reason     string            `json:"reason,omitempty"`
	Message    string            `json:"message,omitempty"`
	Restarts   int               `json:"restarts"`
	Labels     map[string]string `json:"labels,omitempty"`
	Owner      vm.Owner          `json:"owner,omitzero"`    // absent: the operator of the node
	Offered    []string          `json:"offered,omitempty"` // namespaces that may adopt it
	Revision   int64             `json:"revision"`
}

// Config is the requested configuration.
type Config struct {
	Name        string       `json:"name"`
	CPU         int          `json:"cpu"`
	Memory      int64        `json:"memory"`  // bytes
	Storage     int64        `json:"storage"` // bytes
	DiskRate    vm.DiskRate  `json:"disk_rate,omitzero"`
	Image       string       `json:"image"`
	ImageDigest string       `json:"image_digest"`
	ImageType   vm.ImageType `json:"image_type"`
	Network     string       `json:"network"`
	Hostname    string       `json:"hostname,omitempty"`
	Accel       vm.Accel     `json:"accel,omitempty"`
	Firmware    vm.Firmware  `json:"firmware,omitempty"`
	SMBIOS      *vm.SMBIOS   `json:"smbios,omitempty"`
	Graphics    bool         `json:"graphics,omitempty"`
	Hardware    *vm.Hardware `json:"hardware,omitempty"`
	Sandbox     bool         `json:"sandbox,omitempty"`       // containers are added to it while it runs
	Cgroup      string       `json:"cgroup_parent,omitempty"` // of the node, in which it is
	Paused      bool         `json:"paused,omitempty"`        // each boot by Cocoon begins paused
	StopGrace   float64      `json:"stop_grace_seconds"`
}

// NIC is an interface of a VM.
type NIC struct {
	Tap       string   `json:"tap"`
	MAC       string   `json:"mac"`
	Name      string   `json:"network_name"`
	NetNSPath string   `json:"netns_path,omitempty"`
	DHCP      bool     `json:"dhcp"`
	Network   *Address `json:"network,omitempty"` // absent if the guest asks DHCP, and while the address is not known
	Address   *Address `json:"address,omitempty"` // absent while it is not known; also of a guest that asks DHCP

	Inside vm.Inside `json:"inside,omitzero"`  // what a masqueraded guest has instead of the address
	Moving bool      `json:"moving,omitempty"` // the running guest is getting it or giving it back
}

// Address is the configuration of an interface in its network.
type Address struct {
	IP      string   `json:"ip"`
	Gateway string   `json:"gateway"`
	Prefix  int      `json:"prefix"`
	DNS     []string `json:"dns,omitempty"`
	IPv6    string   `json:"ipv6,omitempty"`

	Addresses []string   `json:"addresses,omitempty"` // CIDR, in addition to IP
	Routes    []vm.Route `json:"routes,omitempty"`    // in addition to the one to Gateway
}

// Storage is a disk of a VM.
type Storage struct {
	Path     string        `json:"path"`
	ReadOnly bool          `json:"ro"`
	Serial   string        `json:"serial"`
	Role     vm.DiskRole   `json:"role"`
	Format   vm.DiskFormat `json:"format"`
}

// Event is one line of `vm status --event`.
type Event struct {
	Event    vm.EventType `json:"event"`
	VM       VM           `json:"vm"`
	Revision int64        `json:"revision"`
}

// FromRecord returns r in its JSON form.
func FromRecord(r vm.Record) VM {
	out := VM{
		ID: string(r.ID), Hypervisor: r.Driver, State: r.State,
		Config: Config{
			Name: r.Spec.Name, CPU: r.Spec.CPUs, Memory: r.Spec.Memory, Storage: r.Spec.Storage, DiskRate: r.Spec.DiskRate,
			Image: r.Spec.Image, ImageDigest: r.ImageDigest, ImageType: r.ImageType,
			Hostname: r.Spec.Hostname, Accel: r.Spec.Accel, Firmware: r.Spec.Firmware, SMBIOS: r.Spec.SMBIOS, Graphics: r.Spec.Graphics, Hardware: r.Spec.Hardware, Sandbox: r.Spec.Sandbox, Cgroup: r.Spec.CgroupParent, Paused: r.Spec.Paused, StopGrace: r.Spec.StopGrace.Seconds(),
		},
		PID: r.PID, Paused: r.Paused, NetworkConfigs: []NIC{}, StorageConfigs: []Storage{}, FirstBooted: r.FirstBooted, SnapshotIDs: newIDs(r.SnapshotIDs),
		Snapshot: r.Snapshot, Cloned: r.Cloned, Resuming: Resuming(r), Resume: r.Resume, Volumes: r.Spec.Volumes, Attached: r.Attached, Containers: containers(r.Containers), Ephemeral: ephemeral(r.Ephemeral), BootContainer: r.BootContainer,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, StartedAt: optional(r.StartedAt), StoppedAt: optional(r.StoppedAt),
		AgentReady: r.AgentReady, ExitCode: r.ExitCode, Reason: r.Reason, Message: r.Message,
		Restarts: r.Restarts, Labels: r.Spec.Labels, Revision: r.Revision,
		Owner: r.Owner, Offered: r.Spec.Offered,
	}
	for i, n := range r.NICs {
		nic := NIC{Tap: n.Tap, MAC: n.MAC, Name: n.Network, NetNSPath: n.NetNS, DHCP: n.DHCP, Inside: n.Inside, Moving: slices.Contains(r.Moving, vm.PlaceOf(r.NICs, i))}
		if n.IP != "" {
			nic.Address = &Address{IP: n.IP, Gateway: n.Gateway, Prefix: n.Prefix, DNS: n.DNS, IPv6: n.IPv6, Addresses: n.Addresses, Routes: n.Routes}
			if !n.DHCP {
				nic.Network = nic.Address
			}
		}
		out.NetworkConfigs = append(out.NetworkConfigs, nic)
	}
	if len(r.NICs) > 0 {
		out.Config.Network = r.NICs[0].Network
	} else if len(r.Spec.NICs) > 0 {
		out.Config.Network = r.Spec.NICs[0].Network
	}
	for _, d := range r.Disks {
		out.StorageConfigs = append(out.StorageConfigs, Storage{Path: d.Path, ReadOnly: d.ReadOnly, Serial: d.Serial, Role: d.Role, Format: d.Format})
	}
	return out
}

func optional(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// Resuming reports whether the guest resumes from memory and has not been told the changes yet. A guest that boots from
// a clone's disks is told too, but cannot be mistaken for another VM.
func Resuming(r vm.Record) bool { return r.Resume != nil && (r.Cloned || !r.Resume.Clone) }

// Record is the VM as Cocoon's own type, with the fields that JSON carries.
func (v VM) Record() vm.Record {
	r := vm.Record{
		ID: vm.ID(v.ID), Owner: v.Owner, Driver: v.Hypervisor, State: v.State, ImageType: v.Config.ImageType, ImageDigest: v.Config.ImageDigest,
		Spec: vm.Spec{
			Name: v.Config.Name, Labels: v.Labels, Offered: v.Offered, Image: v.Config.Image, CPUs: v.Config.CPU, Memory: v.Config.Memory, Storage: v.Config.Storage, DiskRate: v.Config.DiskRate,
			Hostname: v.Config.Hostname, Accel: v.Config.Accel, Firmware: v.Config.Firmware, SMBIOS: v.Config.SMBIOS, Graphics: v.Config.Graphics, Hardware: v.Config.Hardware,
			Paused: v.Config.Paused, StopGrace: time.Duration(v.Config.StopGrace * float64(time.Second)), Volumes: v.Volumes,
		},
		Attached: v.Attached, PID: v.PID, Paused: v.Paused, FirstBooted: v.FirstBooted, SnapshotIDs: v.SnapshotIDs.list(), Snapshot: v.Snapshot, Cloned: v.Cloned, Resume: v.Resume,
		CreatedAt: v.CreatedAt, UpdatedAt: v.UpdatedAt, StartedAt: given(v.StartedAt), StoppedAt: given(v.StoppedAt),
		Containers: containerRecords(v.Containers), Ephemeral: ephemeralRecords(v.Ephemeral), BootContainer: v.BootContainer,
		AgentReady: v.AgentReady, ExitCode: v.ExitCode, Reason: v.Reason, Message: v.Message, Restarts: v.Restarts, Revision: v.Revision,
	}
	for i, n := range v.NetworkConfigs {
		if n.Moving {
			r.Moving = append(r.Moving, i) // the place itself is not in the JSON
		}
		nic := vm.NIC{Tap: n.Tap, MAC: n.MAC, Network: n.Name, NetNS: n.NetNSPath, DHCP: n.DHCP, Inside: n.Inside}
		if a := cmp.Or(n.Address, n.Network); a != nil { // earlier releases have only network
			nic.IP, nic.Gateway, nic.Prefix, nic.DNS, nic.IPv6 = a.IP, a.Gateway, a.Prefix, a.DNS, a.IPv6
			nic.Addresses, nic.Routes = a.Addresses, a.Routes
		}
		r.NICs = append(r.NICs, nic)
	}
	for _, d := range v.StorageConfigs {
		r.Disks = append(r.Disks, vm.Disk{Path: d.Path, ReadOnly: d.ReadOnly, Serial: d.Serial, Role: d.Role, Format: d.Format})
	}
	return r
}

func given(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// Spec is everything a VM can be asked for, with the content of its volumes, which may be secret. Name is the volume's.
type Spec struct {
	vm.Spec

	Files map[string][]vm.VolumeFile `json:"files,omitempty"`
}

// FromSpec returns s in its JSON form.
func FromSpec(s vm.Spec) Spec {
	out := Spec{Spec: s}
	for _, v := range s.Volumes {
		if len(v.Files) > 0 {
			if out.Files == nil {
				out.Files = map[string][]vm.VolumeFile{}
			}
			out.Files[v.Name] = v.Files
		}
	}
	return out
}

// Value is the spec with its volumes filled.
func (s Spec) Value() vm.Spec {
	out := s.Spec
	out.Volumes = append([]vm.Volume(nil), out.Volumes...)
	for i, v := range out.Volumes {
		out.Volumes[i].Files = s.Files[v.Name]
	}
	return out
}
