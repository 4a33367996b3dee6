package nodejson

import (
	"time"

	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volume is a volume of the volume store.
type Volume struct {
	ID          vm.ID             `json:"id"`
	Name        string            `json:"name"`
	Owner       vm.Owner          `json:"owner,omitzero"` // absent: the operator of the node
	Kind        string            `json:"kind"`
	Size        int64             `json:"size"`      // bytes that a guest sees
	Allocated   int64             `json:"allocated"` // bytes on the storage of the node
	Serial      string            `json:"serial"`    // by which a guest finds the disk
	From        string            `json:"from,omitempty"`
	For         string            `json:"for,omitempty"` // id of the VM whose cloning made this volume
	Attachments []Attachment      `json:"attachments"`
	CreatedAt   time.Time         `json:"created_at"`
	Labels      map[string]string `json:"labels,omitempty"`
}

// Attachment says that a VM uses a volume.
type Attachment struct {
	VM       vm.ID     `json:"vm_id"`
	ReadOnly bool      `json:"ro"`
	Shared   bool      `json:"shared"` // several VMs may have the volume at the same time
	Since    time.Time `json:"since"`
}

// ResizedVolume is a volume that was grown.
type ResizedVolume struct {
	Volume
	Waiting []WaitingVM `json:"waiting"` // those that do not use the new size yet
}

// WaitingVM is a VM whose guest does not use the new size of a volume yet.
type WaitingVM struct {
	VM     vm.ID  `json:"vm_id"`
	Reason string `json:"reason"`
}

// VolumeSnapshot is a snapshot of a volume.
type VolumeSnapshot struct {
	ID        vm.ID             `json:"id"`
	Name      string            `json:"name"`
	Owner     vm.Owner          `json:"owner,omitzero"` // absent: the operator of the node
	Kind      string            `json:"kind"`
	Volume    vm.ID             `json:"volume_id"`
	Source    string            `json:"volume"`        // name that the volume had
	Size      int64             `json:"size"`          // bytes that a guest sees
	For       string            `json:"for,omitempty"` // id of the snapshot of a VM that it is part of
	CreatedAt time.Time         `json:"created_at"`
	Labels    map[string]string `json:"labels,omitempty"`
}

// FromVolume returns v in its JSON form.
func FromVolume(v nodewire.StoredVolume) Volume {
	out := Volume{
		ID: v.ID, Name: v.Name, Owner: v.Owner, Kind: v.Kind, Size: v.Size, Allocated: v.Allocated, Serial: volume.Serial(v.ID), From: v.From, For: v.For,
		Attachments: make([]Attachment, len(v.Attachments)), CreatedAt: v.CreatedAt, Labels: v.Labels,
	}
	for i, a := range v.Attachments {
		out.Attachments[i] = Attachment{VM: a.VM, ReadOnly: a.ReadOnly, Shared: a.Shared, Since: a.Since}
	}
	return out
}

// FromResized returns v in its JSON form.
func FromResized(v nodewire.ResizedVolume) ResizedVolume {
	out := ResizedVolume{Volume: FromVolume(v.StoredVolume), Waiting: make([]WaitingVM, len(v.Waiting))}
	for i, w := range v.Waiting {
		out.Waiting[i] = WaitingVM(w)
	}
	return out
}

// FromVolumeSnapshot returns s in its JSON form.
func FromVolumeSnapshot(s volume.Snapshot) VolumeSnapshot {
	return VolumeSnapshot(s)
}
