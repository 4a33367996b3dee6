package nodejson

import (
	"cmp"
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Snapshot is a saved VM.
type Snapshot struct {
	ID           string       `json:"id"`
	Name         string       `json:"name"`
	Description  string       `json:"description"`
	CPU          int          `json:"cpu"`
	Memory       int64        `json:"memory"`  // bytes
	Storage      int64        `json:"storage"` // bytes
	Image        string       `json:"image"`
	ImageDigest  string       `json:"image_digest"`
	ImageType    vm.ImageType `json:"image_type"`
	ImageBlobIDs IDs          `json:"image_blob_ids"`
	Network      string       `json:"network"`
	Windows      bool         `json:"windows"`
	Hypervisor   string       `json:"hypervisor"` // snapshot.Snapshot.Backend
	NICs         int          `json:"nics"`
	CreatedAt    time.Time    `json:"created_at"`

	Driver   string            `json:"driver,omitempty"` // snapshot.Snapshot.Hypervisor; earlier releases have it in Hypervisor
	Live     bool              `json:"live"`             // with memory: a clone resumes from it; otherwise it boots
	Size     int64             `json:"size"`             // bytes on disk
	Source   Source            `json:"source"`
	Machine  vm.Machine        `json:"machine"` // machine that can resume its memory
	PauseMS  float64           `json:"pause_ms"`
	Method   string            `json:"method,omitempty"`
	Quiesced bool              `json:"quiesced"`
	Digest   string            `json:"digest,omitempty"` // of the manifest in a registry
	UsedAt   *time.Time        `json:"used_at"`
	Labels   map[string]string `json:"labels,omitempty"`

	Owner     vm.Owner         `json:"owner,omitzero"`      // absent: the operator of the node
	Published []string         `json:"published,omitempty"` // namespaces that may clone from it, "*" for all
	Volumes   []SnapshotVolume `json:"volumes,omitempty"`
	Arriving  bool             `json:"arriving,omitempty"` // its memory is not all here yet; if it never comes, there is no snapshot
}

// SnapshotVolume is a volume of the VM at the instant of a snapshot.
type SnapshotVolume struct {
	Volume   string `json:"volume"`             // name that the VM has for it
	Snapshot vm.ID  `json:"volume_snapshot_id"` // see `cocoon volume snapshot list`
}

// Source is the VM that a snapshot was taken of.
type Source struct {
	ID   vm.ID  `json:"vm_id"`
	Name string `json:"vm_name"`
	Node string `json:"node,omitempty"`
}

// FromSnapshot returns s in its JSON form.
func FromSnapshot(s snapshot.Snapshot) Snapshot {
	var volumes []SnapshotVolume
	for _, v := range s.Volumes {
		volumes = append(volumes, SnapshotVolume{v.Volume, v.Snapshot})
	}
	return Snapshot{
		ID: s.ID, Name: s.Name, Description: s.Description, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage,
		Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType, ImageBlobIDs: newIDs(s.ImageBlobIDs),
		Network: s.Network, Windows: s.Windows, Hypervisor: s.Backend(), Driver: s.Hypervisor, NICs: s.NICs, CreatedAt: s.CreatedAt,
		Live: s.Live, Size: s.Size, Source: Source{s.Source.VMID, s.Source.VMName, s.Source.Node}, Machine: s.Machine,
		PauseMS: Milliseconds(s.Pause), Method: s.Method, Quiesced: s.Quiesced, Digest: s.Digest, UsedAt: optional(s.UsedAt), Labels: s.Labels,
		Owner: s.Owner, Published: s.Published, Volumes: volumes, Arriving: s.Arriving,
	}
}

// Milliseconds returns d in milliseconds, to a thousandth.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Value is the snapshot as Cocoon's own type, with the fields that JSON carries.
func (s Snapshot) Value() snapshot.Snapshot {
	asked := ""
	if s.Driver != "" {
		asked = s.Hypervisor
	}
	return snapshot.Snapshot{
		ID: s.ID, Name: s.Name, Description: s.Description, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage,
		Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType, ImageBlobIDs: s.ImageBlobIDs.list(),
		Network: s.Network, Windows: s.Windows, Hypervisor: cmp.Or(s.Driver, s.Hypervisor), Record: vm.Record{Spec: vm.Spec{Driver: asked}}, NICs: s.NICs, CreatedAt: s.CreatedAt,
		Live: s.Live, Size: s.Size, Source: snapshot.Source{VMID: s.Source.ID, VMName: s.Source.Name, Node: s.Source.Node}, Machine: s.Machine,
		Pause: time.Duration(s.PauseMS * float64(time.Millisecond)), Method: s.Method, Quiesced: s.Quiesced, Digest: s.Digest,
		UsedAt: given(s.UsedAt), Labels: s.Labels, Owner: s.Owner, Published: s.Published, Arriving: s.Arriving,
	}
}
