package cli

import (
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// snapshotJSON is a snapshot as `-o json` prints it. Names and meanings are public API (docs/compat.md); keys may be added.
type snapshotJSON struct {
	ID           string       `json:"id"`
	Name         string       `json:"name"`
	Description  string       `json:"description"`
	CPU          int          `json:"cpu"`
	Memory       int64        `json:"memory"`  // bytes
	Storage      int64        `json:"storage"` // bytes
	Image        string       `json:"image"`
	ImageDigest  string       `json:"image_digest"`
	ImageType    vm.ImageType `json:"image_type"`
	ImageBlobIDs []string     `json:"image_blob_ids"`
	Network      string       `json:"network"`
	Windows      bool         `json:"windows"`
	Hypervisor   string       `json:"hypervisor"`
	NICs         int          `json:"nics"`
	CreatedAt    time.Time    `json:"created_at"`

	Live     bool              `json:"live"` // with memory: a clone goes on; otherwise it boots
	Size     int64             `json:"size"` // bytes on disk
	Source   sourceJSON        `json:"source"`
	Machine  vm.Machine        `json:"machine"` // that can resume its memory
	PauseMS  float64           `json:"pause_ms"`
	Method   string            `json:"method,omitempty"`
	Quiesced bool              `json:"quiesced"`
	Digest   string            `json:"digest,omitempty"` // of the manifest in a registry
	UsedAt   *time.Time        `json:"used_at"`
	Labels   map[string]string `json:"labels,omitempty"`
}

type sourceJSON struct {
	ID   vm.ID  `json:"vm_id"`
	Name string `json:"vm_name"`
	Node string `json:"node,omitempty"`
}

func toSnapshotJSON(s snapshot.Snapshot) snapshotJSON {
	return snapshotJSON{
		ID: s.ID, Name: s.Name, Description: s.Description, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage,
		Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType, ImageBlobIDs: append([]string{}, s.ImageBlobIDs...),
		Network: s.Network, Windows: s.Windows, Hypervisor: s.Hypervisor, NICs: s.NICs, CreatedAt: s.CreatedAt,
		Live: s.Live, Size: s.Size, Source: sourceJSON{s.Source.VMID, s.Source.VMName, s.Source.Node}, Machine: s.Machine,
		PauseMS: milliseconds(s.Pause), Method: s.Method, Quiesced: s.Quiesced, Digest: s.Digest, UsedAt: optional(s.UsedAt), Labels: s.Labels,
	}
}

// milliseconds of d, to a thousandth.
func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
