package cli

import (
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// vmJSON is a VM as `-o json` prints it. Names and meanings are public API (docs/compat.md); keys may be added.
type vmJSON struct {
	ID             string        `json:"id"`
	Hypervisor     string        `json:"hypervisor"`
	State          vm.State      `json:"state"`
	Config         configJSON    `json:"config"`
	PID            int           `json:"pid"`
	NetworkConfigs []nicJSON     `json:"network_configs"`
	StorageConfigs []storageJSON `json:"storage_configs"`
	FirstBooted    bool          `json:"first_booted"`
	SnapshotIDs    []string      `json:"snapshot_ids"`
	CreatedAt      time.Time     `json:"created_at"`
	UpdatedAt      time.Time     `json:"updated_at"`
	StartedAt      *time.Time    `json:"started_at"`
	StoppedAt      *time.Time    `json:"stopped_at"`

	Snapshot string `json:"snapshot,omitempty"` // id of the one it was cloned from or, hibernated, that it is in
	Cloned   bool   `json:"cloned,omitempty"`   // its process goes on from another VM's memory
	Resuming bool   `json:"resuming,omitempty"` // the guest has not been told yet who it is

	AgentReady bool              `json:"agent_ready"`
	ExitCode   *int              `json:"exit_code"`
	Reason     string            `json:"reason,omitempty"`
	Message    string            `json:"message,omitempty"`
	Restarts   int               `json:"restarts"`
	Labels     map[string]string `json:"labels,omitempty"`
	Revision   int64             `json:"revision"`
}

type configJSON struct {
	Name        string       `json:"name"`
	CPU         int          `json:"cpu"`
	Memory      int64        `json:"memory"`  // bytes
	Storage     int64        `json:"storage"` // bytes
	Image       string       `json:"image"`
	ImageDigest string       `json:"image_digest"`
	ImageType   vm.ImageType `json:"image_type"`
	Network     string       `json:"network"`
	Hostname    string       `json:"hostname,omitempty"`
	Accel       vm.Accel     `json:"accel,omitempty"`
	Firmware    vm.Firmware  `json:"firmware,omitempty"`
	StopGrace   float64      `json:"stop_grace_seconds"`
}

type nicJSON struct {
	Tap       string       `json:"tap"`
	MAC       string       `json:"mac"`
	Name      string       `json:"network_name"`
	NetNSPath string       `json:"netns_path,omitempty"`
	DHCP      bool         `json:"dhcp"`
	Network   *addressJSON `json:"network,omitempty"` // absent while the address is not known
}

type addressJSON struct {
	IP      string   `json:"ip"`
	Gateway string   `json:"gateway"`
	Prefix  int      `json:"prefix"`
	DNS     []string `json:"dns,omitempty"`
}

type storageJSON struct {
	Path     string        `json:"path"`
	ReadOnly bool          `json:"ro"`
	Serial   string        `json:"serial"`
	Role     vm.DiskRole   `json:"role"`
	Format   vm.DiskFormat `json:"format"`
}

type eventJSON struct {
	Event    vm.EventType `json:"event"`
	VM       vmJSON       `json:"vm"`
	Revision int64        `json:"revision"`
}

func toVMJSON(r vm.Record) vmJSON {
	out := vmJSON{
		ID: string(r.ID), Hypervisor: r.Driver, State: r.State,
		Config: configJSON{
			Name: r.Spec.Name, CPU: r.Spec.CPUs, Memory: r.Spec.Memory, Storage: r.Spec.Storage,
			Image: r.Spec.Image, ImageDigest: r.ImageDigest, ImageType: r.ImageType,
			Hostname: r.Spec.Hostname, Accel: r.Spec.Accel, Firmware: r.Spec.Firmware, StopGrace: r.Spec.StopGrace.Seconds(),
		},
		PID: r.PID, NetworkConfigs: []nicJSON{}, StorageConfigs: []storageJSON{}, FirstBooted: r.FirstBooted, SnapshotIDs: append([]string{}, r.SnapshotIDs...),
		Snapshot: r.Snapshot, Cloned: r.Cloned, Resuming: resuming(r),
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, StartedAt: optional(r.StartedAt), StoppedAt: optional(r.StoppedAt),
		AgentReady: r.AgentReady, ExitCode: r.ExitCode, Reason: r.Reason, Message: r.Message,
		Restarts: r.Restarts, Labels: r.Spec.Labels, Revision: r.Revision,
	}
	for _, n := range r.NICs {
		nic := nicJSON{Tap: n.Tap, MAC: n.MAC, Name: n.Network, NetNSPath: n.NetNS, DHCP: n.DHCP}
		if n.IP != "" {
			nic.Network = &addressJSON{IP: n.IP, Gateway: n.Gateway, Prefix: n.Prefix, DNS: n.DNS}
		}
		out.NetworkConfigs = append(out.NetworkConfigs, nic)
	}
	if len(r.NICs) > 0 {
		out.Config.Network = r.NICs[0].Network
	} else if len(r.Spec.NICs) > 0 {
		out.Config.Network = r.Spec.NICs[0].Network
	}
	for _, d := range r.Disks {
		out.StorageConfigs = append(out.StorageConfigs, storageJSON{Path: d.Path, ReadOnly: d.ReadOnly, Serial: d.Serial, Role: d.Role, Format: d.Format})
	}
	return out
}

func optional(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
